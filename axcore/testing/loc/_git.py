"""From git: what the commits that landed a plugin's feature changed outside of its folder.

Works in a checkout only. A commit landed a plugin's feature when it changed the plugin's source
(``src/``, snippets for this measure aside), except for the commit that created the distribution
(its ``pyproject.toml``): that one made the empty shell. Of each such commit, the changed lines of
files outside of the plugin's folder are counted: Python normalized, other text as it is. Files that
are new there do not count as changed, but are listed, so that a feature cannot hide in new files of
core.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import axcore
from axcore.errors import CliError
from axcore.testing.loc._features import FOLDER
from axcore.testing.loc._normalize import changed_lines

__all__ = ["Landing", "find_checkout", "landings"]

_TEXT = (".md", ".toml", ".txt", ".yml", ".yaml", ".cfg", ".ini")


@dataclass(frozen=True)
class Landing:
    """The commits that landed the features of one plugin.

    Attributes:
        plugin: The distribution.
        folder: Its folder in the checkout.
        commits: Short hashes, oldest first.
        core_lines: Changed lines of existing source below ``axcore/``.
        plugin_lines: Changed lines of existing source of other plugins.
        other_lines: Changed lines of existing tests, documents and build files elsewhere.
        touched: Existing source files outside of the folder that were changed.
        new_files: Source files outside of the folder that are new in these commits.
    """

    plugin: str
    folder: str
    commits: tuple[str, ...]
    core_lines: int
    plugin_lines: int
    other_lines: int
    touched: tuple[str, ...]
    new_files: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        return asdict(self)


def find_checkout(start: Path | None = None) -> Path:
    """Returns the root of the git checkout that this core runs from.

    Args:
        start: A folder in it; by default that of the running ``axcore``.

    Raises:
        CliError: It is no checkout.
    """
    place = start or Path(axcore.__file__).parent
    try:
        root = Path(_git(place, "rev-parse", "--show-toplevel").strip())
        tracked = (
            _git(place, "ls-files", "--error-unmatch", "__init__.py") if start is None else "-"
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise CliError(
            f"--git reads the history of a checkout, and {place} is in none",
            code="AX874",
            hint="run it from a clone of the repository with axcore installed from it (pip "
            "install -e)",
        ) from error
    assert tracked
    return root


def landings(root: Path, plugins: Iterable[str] = ()) -> list[Landing]:
    """Returns what landing each plugin's features changed elsewhere.

    Args:
        root: The checkout.
        plugins: Distributions, as their folders below ``plugins/`` are called; empty for all.
    """
    folders = {
        Path(line).parent.name: str(Path(line).parent)
        for line in _git(root, "ls-files", "plugins/*/pyproject.toml").splitlines()
    }
    wanted = [name.replace("-", "_") for name in plugins] or sorted(folders)
    return [_landing(root, folders[name]) for name in wanted if name in folders]


def _landing(root: Path, folder: str) -> Landing:
    created = set(_commits(root, "--diff-filter=A", "--", f"{folder}/pyproject.toml"))
    source = (f"{folder}/src", f":(exclude)*/{FOLDER}/*")
    commits = [c for c in _commits(root, "--", *source) if c not in created]
    lines = {"core": 0, "plugin": 0, "other": 0}
    touched: dict[str, None] = {}
    new_files: dict[str, None] = {}
    for commit in commits:
        changes = _git(root, "diff-tree", "-r", "--no-renames", "--name-status", "--root", commit)
        for line in changes.splitlines():
            status, tab, path = line.partition("\t")
            if not tab or path.startswith(f"{folder}/"):
                continue
            kind = _kind(path)
            if status == "A":
                if kind != "other":
                    new_files[path] = None
                continue
            lines[kind] += _changed(root, commit, path, status)
            if kind != "other":
                touched[path] = None
    return Landing(
        plugin=Path(folder).name.replace("_", "-"),
        folder=folder,
        commits=tuple(commit[:7] for commit in commits),
        core_lines=lines["core"],
        plugin_lines=lines["plugin"],
        other_lines=lines["other"],
        touched=tuple(touched),
        new_files=tuple(new_files),
    )


def _commits(root: Path, *arguments: str) -> list[str]:
    listed = _git(root, "log", "--reverse", "--no-merges", "--format=%H", *arguments)
    return listed.split()


def _kind(path: str) -> str:
    if path.startswith("axcore/"):
        return "core"
    parts = path.split("/")
    return "plugin" if parts[0] == "plugins" and "src" in parts else "other"


def _changed(root: Path, commit: str, path: str, status: str) -> int:
    if not path.endswith((".py", *_TEXT)):
        return 1  # a picture, a weight file: one thing changed
    before = {path: _git(root, "show", f"{commit}^:{path}")}
    after = {} if status == "D" else {path: _git(root, "show", f"{commit}:{path}")}
    return changed_lines(before, after)


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-c", "core.quotepath=off", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
        timeout=120,
    )
    return done.stdout
