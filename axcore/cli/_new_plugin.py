"""Writes a new plugin from the template beside this module."""

from __future__ import annotations

import importlib.resources
import keyword
import re
import sys
from importlib.resources.abc import Traversable
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

import axcore
from axcore.errors import CliError

__all__ = ["write_plugin"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_.][A-Za-z0-9]+)*")
_TAKEN = frozenset({"axcore", "jax", "jaxlib", "numpy", "optax", "src", "tests", "pytest"})


def write_plugin(name: str, root: Path) -> list[Path]:
    """Writes a plugin's files.

    Args:
        name: The distribution's name.
        root: Its folder, which must not exist.

    Returns:
        The files, relative to ``root``, sorted.

    Raises:
        CliError: The name cannot be a distribution's and a package's, or ``root`` exists.
    """
    package = canonicalize_name(name).replace("-", "_")
    if _NAME.fullmatch(name) is None or keyword.iskeyword(package):
        raise CliError(
            f"{name!r} cannot name a distribution",
            code="AX810",
            hint="use letters, digits and single dashes, such as acme-kernels",
        )
    if package in _TAKEN or package in sys.stdlib_module_names:
        raise CliError(
            f"a distribution {name!r} would have a package {package!r}, which exists already",
            code="AX810",
            hint=f"choose another name, such as {name}-plugin",
        )
    if root.exists() or root.is_symlink():
        raise CliError(
            f"{root} exists already; nothing was written",
            code="AX811",
            hint="choose another name, or move it away",
        )
    core = Version(axcore.__version__)
    values = {
        "NAME": canonicalize_name(name),
        "PACKAGE": package,
        "IMPLEMENTATION": package,
        "CORE_MIN": f"{core.major}.{core.minor}",
        "CORE_MAX": f"{core.major}.{core.minor + 1}",
    }
    written: list[Path] = []
    _copy(importlib.resources.files("axcore.cli") / "_plugin_template", root, values, written)
    return sorted(path.relative_to(root) for path in written)


def _copy(source: Traversable, target: Path, values: dict[str, str], written: list[Path]) -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        # Hidden files are stored without their dot, so that no tool takes the template for its own.
        name = {"github": ".github", "gitignore.in": ".gitignore.in"}.get(entry.name, entry.name)
        name = name.replace("PACKAGE", values["PACKAGE"])
        if entry.is_dir():
            _copy(entry, target / name, values, written)
        elif name.endswith(".in"):
            path = target / name.removesuffix(".in")
            text = entry.read_text(encoding="utf-8")
            path.write_text(_fill(text, values), encoding="utf-8")
            written.append(path)


def _fill(text: str, values: dict[str, str]) -> str:
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match.group(1)], text)
