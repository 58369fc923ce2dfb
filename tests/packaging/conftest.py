"""The seven projects, as declared and as built."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Project:
    """One distribution: its folder, its one package and its ``pyproject.toml``."""

    name: str
    folder: Path
    package: Path
    pyproject: dict[str, Any]

    @property
    def metadata(self) -> dict[str, Any]:
        """The table ``[project]``."""
        return self.pyproject["project"]


def _project(folder: Path) -> Project:
    pyproject = tomllib.loads((folder / "pyproject.toml").read_text())
    name = pyproject["project"]["name"]
    package = name.replace("-", "_")
    source = folder if folder == ROOT else folder / "src"
    return Project(name, folder, source / package, pyproject)


PROJECTS = {
    project.name: project
    for project in map(_project, [ROOT, *sorted(ROOT.glob("plugins/axlearn_*"))])
}


def pytest_generate_tests(metafunc: pytest.Metafunc):
    if "project" in metafunc.fixturenames:
        metafunc.parametrize("project", PROJECTS.values(), ids=PROJECTS)
    elif "plugin" in metafunc.fixturenames:
        plugins = {name: project for name, project in PROJECTS.items() if name != "axcore"}
        metafunc.parametrize("plugin", plugins.values(), ids=plugins)


@pytest.fixture(scope="session")
def projects() -> dict[str, Project]:
    return PROJECTS


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the seven wheels, built with the tools installed here."""
    folder = tmp_path_factory.mktemp("dist")
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    sources = [str(project.folder) for project in PROJECTS.values()]
    subprocess.run([*build, "--wheel-dir", str(folder), *sources], check=True, timeout=240)
    return folder
