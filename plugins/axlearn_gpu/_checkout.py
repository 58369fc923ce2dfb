"""Imports the packages of a checkout on a machine where nothing of it is installed."""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import importlib.util
import shutil
import sys
import tempfile
import tomllib
import types
from pathlib import Path
from typing import Any

__all__ = ["use_checkout", "use_wheels"]


#: What core imports of packaging.
_PACKAGING = ("requirements", "specifiers", "utils", "version")


def use_wheels(folder: Path) -> list[str]:
    """Makes pure Python wheels that travelled along importable, where they are missing.

    Args:
        folder: Holds ``*.whl``; nothing is unpacked.

    Returns:
        The names of the wheels, which come after all that is installed.
    """
    wheels = sorted(folder.glob("*.whl"))
    sys.path.extend(str(wheel) for wheel in wheels)
    return [wheel.name for wheel in wheels]


def use_checkout(root: Path) -> None:
    """Makes the checkout's packages importable, and their plugins known, without installing.

    Plugins are found through the metadata of distributions, which a checkout has not; so it is
    written to a temporary folder. A few small packages that serve types and tests only are replaced
    where they are missing.

    Args:
        root: The checkout.
    """
    metadata = Path(tempfile.mkdtemp(prefix="axcore-device-check-"))
    atexit.register(shutil.rmtree, metadata, ignore_errors=True)
    projects = [root, *sorted(p.parent for p in root.glob("plugins/*/pyproject.toml"))]
    for folder in projects:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        sys.path.insert(0, str(folder if folder == root else folder / "src"))
        info = metadata / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        entries = project.get("entry-points", {}).get("axcore", {})
        lines = [f"{name} = {target}" for name, target in entries.items()]
        (info / "entry_points.txt").write_text("\n".join(["[axcore]", *lines, ""]))
    sys.path.insert(0, str(metadata))
    if importlib.util.find_spec("importlib_metadata") is None:
        sys.modules["importlib_metadata"] = importlib.metadata
    if importlib.util.find_spec("packaging") is None:
        _use_vendored("packaging", ("pip._vendor", "setuptools._vendor"))
    if importlib.util.find_spec("jaxtyping") is None:
        sys.modules["jaxtyping"] = _anything("jaxtyping")
    if importlib.util.find_spec("pytest") is None:
        sys.modules["pytest"] = _little_pytest()


def _use_vendored(name: str, owners: tuple[str, ...]) -> None:
    """Takes a package from the copy that an installer carries.

    Raises:
        ModuleNotFoundError: None of them has one; says which wheel may travel along.
    """
    for owner in owners:
        try:
            copies = {
                part: importlib.import_module(f"{owner}.{name}{part and '.'}{part}")
                for part in ("", *_PACKAGING)
            }
        except ImportError:
            continue  # this installer is not here, or has none
        for part, module in copies.items():
            sys.modules[f"{name}{part and '.'}{part}"] = module
        return
    raise ModuleNotFoundError(
        f"{name} is not installed and no installer carries a copy ({', '.join(owners)}): put its "
        "wheel into a folder and name it with --wheels"
    )


def _anything(name: str) -> types.ModuleType:
    """A module whose names can be subscripted: annotations are never evaluated here."""
    module = types.ModuleType(name)

    class Name:
        def __class_getitem__(cls, item: Any) -> Any:
            return cls

    module.__dict__["__getattr__"] = lambda attribute: Name
    return module


class Skipped(Exception):
    """A suite's way to say that it does not apply."""


class _Decorator:
    """Marks and fixtures, which other packages' test helpers use where they are imported."""

    def __getattr__(self, name: str) -> _Decorator:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self


def _little_pytest() -> types.ModuleType:
    """What the conformance suites use of pytest."""
    module = types.ModuleType("pytest")

    def skip(reason: str = "") -> None:
        raise Skipped(reason)

    def fail(reason: str = "") -> None:
        raise AssertionError(reason)

    skip.__dict__["Exception"] = Skipped
    decorator = _Decorator()
    module.__dict__.update(skip=skip, fail=fail, Metafunc=object, mark=decorator, fixture=decorator)
    return module
