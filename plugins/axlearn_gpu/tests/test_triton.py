"""The kernels written in Triton: interpreted here; see ``test_kernels_aot.py`` for compiled."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from axcore.plugins import OpCall
from axlearn_gpu import supports

SUITE = Path(__file__).with_name("triton_suite.py")


@pytest.mark.slow
@pytest.mark.timeout(600)  # 90 CPU-seconds, on cores that others may use too
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (axlearn-gpu does)"
)
def test_kernels_equal_the_references_in_tritons_interpreter():
    """In a process of its own: the interpreter is chosen when the kernels are defined."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-rs", "-p", "no:xdist", str(SUITE)],
        env={**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    skipped = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all(line.endswith("the suite does not claim it") for line in skipped), skipped  # vmap


def call(op, shapes, **options):
    dtypes = dict.fromkeys(shapes, "bfloat16")
    return OpCall(op=op, shapes=shapes, dtypes=dtypes, platform="gpu", options=options)


def test_reasons(monkeypatch):
    monkeypatch.setattr(supports, "_missing_triton", lambda: None)
    gates = {"gate": (2, 8), "up": (2, 8)}
    assert supports.triton_gated_activation(call("gated_activation", gates, activation="silu")) is (
        None
    )
    assert "knows silu" in supports.triton_gated_activation(
        call("gated_activation", gates, activation="tanh")
    )
    assert "up to 32768" in supports.triton_norm(call("rms_norm", {"x": (2, 40000)}))
    replaced = call("linear_cross_entropy", {"hidden": (2, 8)}, dot_general="replaced")
    assert "cannot be replaced" in supports.triton_linear_cross_entropy(replaced)


def test_what_is_missing_is_the_reason(monkeypatch):
    monkeypatch.setattr(supports, "_missing_triton", supports._missing_triton.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = supports.triton_norm(call("rms_norm", {"x": (2, 8)}))
    assert reason == "needs jax-triton, which is not installed"
