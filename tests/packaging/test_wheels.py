"""What the seven wheels hold, and that each installs alone."""

import email
import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

# One worker builds the wheels for all.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheels")]


def _wheel(dist: Path, project) -> zipfile.ZipFile:
    (path,) = dist.glob(f"{project.package.name}-*.whl")
    return zipfile.ZipFile(path)


def _info(project) -> str:
    return f"{project.package.name}-{project.metadata['version']}.dist-info"


def test_wheel_holds_its_own_package_completely_and_nothing_else(dist, project):
    with _wheel(dist, project) as wheel:
        names = set(wheel.namelist())
    package = {name for name in names if not name.startswith(_info(project) + "/")}
    sources = {
        str(path.relative_to(project.package.parent))
        for path in project.package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert package == sources
    assert f"{project.package.name}/py.typed" in package


def test_wheel_metadata_states_licence_ranges_and_entry_points(dist, project):
    with _wheel(dist, project) as wheel:
        metadata = email.message_from_bytes(wheel.read(f"{_info(project)}/METADATA"))
        entry_points = wheel.read(f"{_info(project)}/entry_points.txt").decode()
        assert wheel.read(f"{_info(project)}/licenses/LICENSE")
    assert metadata["Name"] == project.name
    assert metadata["License-Expression"] == "Apache-2.0"
    required = {str(Requirement(line)) for line in metadata.get_all("Requires-Dist", [])}
    assert {str(Requirement(line)) for line in project.metadata["dependencies"]} <= required
    if project.name == "axcore":
        assert "axcore = axcore.cli:main" in entry_points
    else:
        assert f"{project.name} = {project.package.name}.plugin" in entry_points


def _environment(folder: Path) -> Path:
    """Makes an environment that has every third-party package of this one and none of ours.

    The packages are links, so that it costs neither time nor network. Returns its interpreter.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    base = {"base": str(folder), "platbase": str(folder)}
    target = Path(sysconfig.get_path("purelib", "venv", vars=base))
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        ours = path.name.startswith(("axcore", "axlearn_", "_axcore", "_axlearn_"))
        if not ours and path.suffix != ".pth" and path.name != "__pycache__":
            (target / path.name).symlink_to(path)
    return python


def test_installs_alone_with_its_declared_dependencies(dist, project, projects, tmp_path):
    python = _environment(tmp_path / "env")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    done = subprocess.run(
        [*install, "--find-links", str(dist), project.name],
        capture_output=True,
        text=True,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("PIP_")},
    )
    assert done.returncode == 0, done.stderr
    code = """
import importlib, importlib.metadata, json, sys
from axcore.plugins import host
ours = {d.name: d.version for d in importlib.metadata.distributions()
        if d.name.startswith(("axcore", "axlearn"))}
module = importlib.import_module(sys.argv[1])
records = {record.distribution: record.status for record in host().records}
print(json.dumps([ours, module.__file__, records]))
"""
    output = subprocess.run(
        [python, "-I", "-c", code, project.package.name],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    installed, origin, records = json.loads(output)
    expected = {project.name, "axcore"}
    if project.name == "axlearn-models":
        expected.add("axlearn-rope")
    version = project.metadata["version"]
    assert installed == dict.fromkeys(expected, version)
    assert Path(origin).is_relative_to(tmp_path)
    assert records == dict.fromkeys(expected, "active")


@pytest.mark.timeout(280)
def test_all_resolve_together_from_the_index(dist, projects):
    """Every dependency from scratch, as ``pip install --find-links dist`` would choose them."""
    resolve = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    names = [*(name for name in projects if name != "axlearn-models"), "axlearn-models[moe]"]
    done = subprocess.run(
        [*resolve, "--quiet", "--report", "-", "--find-links", str(dist), *names],
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    offline = ("NewConnectionError", "Temporary failure in name resolution", "ConnectTimeout")
    if done.returncode and any(sign in done.stderr for sign in offline):
        pytest.skip(f"the package index is out of reach: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    chosen = {
        entry["metadata"]["name"].lower(): entry["metadata"]["version"]
        for entry in json.loads(done.stdout)["install"]
    }
    assert set(projects) <= set(chosen)
    assert all(chosen[name] == projects[name].metadata["version"] for name in projects)
    assert not {"torch", "tensorflow"} & set(chosen)
