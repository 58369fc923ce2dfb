"""``axcore plugins check NAME`` runs the suites on what a distribution registers."""

from __future__ import annotations

import pytest

from axcore.testing import only_distribution, write_distribution

PLUGIN = """
from axcore.plugins import KernelSpec, hookimpl


@hookimpl
def axcore_kernels():
    return [
        KernelSpec(
            op="add_rms_norm",
            implementation=name,
            platforms=("*",),
            target=f"acme_kernels:{name}",
        )
        for name in ("right", "wrong")
    ]
"""
KERNELS = """
import jax
import jax.numpy as jnp


def right(x, residual, scale=None, *, eps):
    total = x + residual
    y = total * jax.lax.rsqrt(jnp.mean(jnp.square(total), -1, keepdims=True) + eps)
    return (y if scale is None else y * scale).astype(x.dtype), total


def wrong(x, residual, scale=None, *, eps):
    return right(x, residual, scale, eps=1e-2)
"""


@pytest.fixture(scope="module")
def acme(tmp_path_factory):
    """A plugin with a kernel that computes the op, and one that does not."""
    path = tmp_path_factory.mktemp("site")
    (path / "acme_kernels.py").write_text(KERNELS)
    write_distribution(path, "acme-norms", PLUGIN, requires=["axcore>=0.1"])
    with pytest.MonkeyPatch.context() as patch, only_distribution(path, "acme-norms"):
        patch.setenv("PYTHONPATH", str(path))
        yield


def test_every_test_of_every_suite_has_a_row(acme, cli):
    done = cli("plugins", "check", "acme-norms", "--json")
    assert done.code == 2, done.err
    checks = done.json["checks"]
    failed = {(c["suite"], c["subject"], c["test"]) for c in checks if c["outcome"] == "failed"}
    assert ("KernelConformance", "add_rms_norm.wrong", "test_forward[scaled]") in failed
    assert {subject for _, subject, _ in failed} == {"add_rms_norm.wrong"}
    assert {c["subject"] for c in checks} == {
        "acme-norms", "add_rms_norm.right", "add_rms_norm.wrong"
    }  # fmt: skip
    reasons = {c["reason"] for c in checks if c["outcome"] == "failed"}
    assert any("relative error" in reason for reason in reasons)


def test_a_plugin_that_is_not_installed(acme, cli):
    done = cli("plugins", "check", "acme-norm")
    assert done.code == 2
    assert "did you mean 'acme-norms'" in done.err


def test_without_a_name_nothing_runs(acme, cli):
    done = cli("plugins", "check")
    assert done.code == 0 and "all well" in done.out
