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
    out, temporary = tmp_path / "report.json", tmp_path / "temporary"
    temporary.mkdir()
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "TMPDIR": str(temporary)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert out.exists(), result.stderr[-3000:]
    assert not list(temporary.glob("axcore-*"))
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


# What a machine without network may lack; core and the catalog declare some of them.
ABSENT = ("packaging", "pytest", "jaxtyping", "rich", "grain", "triton", "jax_triton", "tokamax")
BLOCK = f"""\
import importlib.abc, runpy, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in {ABSENT} else find(name, *a)
sys.meta_path.insert(0, Absent())
"""


@pytest.mark.slow
def test_it_trains_where_only_jax_numpy_optax_orbax_and_pluggy_are_installed(tmp_path):
    pytest.importorskip("pip", reason="its copy of packaging stands in for the one that is blocked")
    pytest.importorskip("axlearn_models", reason="the catalog is not installed: axlearn-models")
    out = tmp_path / "report.json"
    arguments = [str(SCRIPT), "--dry-run", "--part", "training", "--out", str(out)]
    folder = str(SCRIPT.parent)
    code = (
        f"{BLOCK}sys.argv[1:] = {arguments[1:]}\nsys.path.insert(0, {folder!r})\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", f"import importlib.util\n{code}"],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(out.read_text())
    assert set(report["environment"]["absent"]) >= {"packaging", "grain", "jax_triton", "tokamax"}
    assert report["training"]["steps"] == 3


def test_a_run_that_hangs_is_ended_with_its_report(tmp_path):
    out = tmp_path / "report.json"
    code = (
        "import pathlib, time\nfrom _device_report import Check\n"
        f"check = Check(pathlib.Path({str(out)!r}), 280.0, True)\n"
        "check.report['done'] = ['first']\ncheck.watch(0.2)\ntime.sleep(600)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=SCRIPT.parent)
    assert result.returncode == 5
    report = json.loads(out.read_text())
    assert report["done"] == ["first"]
    assert "time was over" in report["not_run"][-1]["reason"]
