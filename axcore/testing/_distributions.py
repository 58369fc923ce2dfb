"""Writes small distributions into a folder, for tests of how plugins are found and combined."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from axcore.plugins import PluginHost, find_candidates, reset_host

__all__ = ["only_distribution", "write_distribution"]


def write_distribution(
    path: Path,
    name: str,
    source: str | None,
    *,
    version: str = "1.0",
    requires: Iterable[str] = (),
    entry_points: Mapping[str, str] | None = None,
    module: str | None = None,
) -> str:
    """Writes an importable module and the metadata of a distribution that registers it.

    Args:
        path: Folder, to be put on ``sys.path``.
        name: The distribution's name.
        source: The module's source (dedented), or None to write metadata only.
        version: The distribution's version.
        requires: Its requirements, such as ``["axcore>=0.1"]``.
        entry_points: Entry-point name -> value; by default the distribution's name -> the module.
        module: Name of the module; by default the distribution's name with underscores.

    Returns:
        The module's name.
    """
    module = module or name.replace("-", "_")
    path.mkdir(parents=True, exist_ok=True)
    if source is not None:
        (path / f"{module}.py").write_text(textwrap.dedent(source))
    info = path / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    (info / "METADATA").write_text("\n".join(metadata) + "\n")
    entry_points = {name: module} if entry_points is None else entry_points
    lines = [f"{key} = {value}" for key, value in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[axcore]", *lines]) + "\n")
    (info / "RECORD").write_text(f"{module}.py,,\n")
    return module


@contextmanager
def only_distribution(path: Path, name: str, *folders: Path) -> Iterator[None]:
    """Runs a block with core and one distribution in a folder as the only plugins.

    Args:
        path: The folder that :func:`write_distribution` wrote to; it is on ``sys.path`` meanwhile.
        name: The distribution's name.
        folders: Further folders with modules that it needs.
    """
    added = [str(path), *map(str, folders)]
    sys.path[:0] = added
    found = [c for c in find_candidates([str(path)]) if c.distribution == name]
    former = reset_host(PluginHost(found))
    try:
        yield
    finally:
        reset_host(former)
        for folder in added:
            sys.path.remove(folder)
