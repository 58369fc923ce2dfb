"""What ``axcore plugins new`` writes: its own tests pass, installed in a scratch environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from axcore.cli._new_plugin import write_plugin

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """An environment that sees the packages installed here and has the new plugin besides."""
    folder = tmp_path_factory.mktemp("scratch")
    write_plugin("acme-kernels", folder / "acme-kernels")
    environment = folder / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    here = sysconfig.get_path("purelib")
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    python = environment / "bin" / "python"
    install = [python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*install, "-e", str(folder / "acme-kernels")], check=True, timeout=200, env=_environment()
    )
    return folder


def _environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COV", "AXCORE"))}
    return {**kept, "JAX_PLATFORMS": "cpu", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [str(folder / "env" / "bin" / "python"), *command],
        cwd=folder / "acme-kernels",
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_installing_it_makes_it_active(scratch):
    listing = _run(
        scratch,
        "-c",
        "import json, sys; from axcore.plugins import host;"
        "print(json.dumps([r.to_json() for r in host().records]));"
        "sys.exit('jax' in sys.modules)",
    )
    (record,) = [r for r in json.loads(listing) if r["distribution"] == "acme-kernels"]
    assert record["status"] == "active", record["reason"]
    assert record["provides"] == {
        "kernels": ["rms_norm.acme_kernels"],
        "layers": ["SquaredReLUFeedForward"],
        "modifiers": ["acme-kernels:squared-relu"],
    }


def test_installing_it_changes_nothing_for_any_instance(scratch):
    kernels = _run(
        scratch,
        "-c",
        "from axcore.plugins import host; h = host();"
        "print(sorted(k.name for k in h.active_for('cpu').kernels if k.op == 'rms_norm'),"
        " sorted(k.name for k in h.active_for('cpu', ['acme-kernels']).kernels"
        " if k.op == 'rms_norm'))",
    )
    assert kernels.strip() == "['rms_norm.xla'] ['rms_norm.acme_kernels', 'rms_norm.xla']"


def test_its_own_tests_pass(scratch):
    report = _run(scratch, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert " passed" in report and "failed" not in report
