"""The script for machines with a GPU, here where there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "device_check.py"


def run(tmp_path, *arguments):
    """Runs the script in another folder; returns its exit code and report."""
    out = tmp_path / "report.json"
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert out.exists(), result.stderr[-3000:]
    return result.returncode, json.loads(out.read_text())


def test_without_a_gpu_it_says_what_was_not_run(tmp_path):
    code, report = run(tmp_path)
    assert code == 77
    assert [entry["what"] for entry in report["not_run"]] == ["conformance", "speed", "training"]
    assert all("no GPU" in entry["reason"] for entry in report["not_run"])


@pytest.mark.slow
def test_a_dry_run_goes_through_all_parts(tmp_path):
    pytest.importorskip("axlearn_models", reason="the catalog is not installed: axlearn-models")
    code, report = run(tmp_path, "--dry-run", "--seconds", "250")
    assert code == 0, report["failures"]
    assert report["conformance"]["attention.pallas_triton"]["passed"] >= 7
    assert {row["implementation"] for row in report["speed"]} == {"pallas_triton", "xla_gpu"}
    training = report["training"]
    assert training["steps"] == len(training["losses"]) == 3
    assert training["losses"][-1] < training["losses"][0]
