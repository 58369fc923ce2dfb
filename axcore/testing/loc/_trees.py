"""Code bases on disk: written into a folder, imported under a name of their own, and forgotten."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from axcore.testing.loc._normalize import Files

__all__ = ["CodeBase", "imported"]

_serial = itertools.count()


class CodeBase:
    """An imported code base.

    Attributes:
        name: The package's name in this process.
        path: The folder that it was written to.
    """

    def __init__(self, name: str, path: Path):
        self.name = name
        self.path = path

    def module(self, path: str) -> ModuleType:
        """Imports the module of a file, such as ``modules/m03.py``."""
        dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return importlib.import_module(f"{self.name}.{dotted}")

    def add(self, files: Files) -> None:
        """Writes further files; files that are there stay as they are."""
        for path, text in files.items():
            place = self.path / path
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("x", encoding="utf-8") as file:
                file.write(text)
        importlib.invalidate_caches()

    def read(self, files: Files) -> dict[str, str]:
        """Returns what is on disk now of these files."""
        return {p: (self.path / p).read_text("utf-8") for p in files if (self.path / p).is_file()}


@contextmanager
def imported(files: Files) -> Iterator[CodeBase]:
    """Writes a code base and imports its root package; both are gone afterwards."""
    name = f"loc_codebase_{next(_serial)}"
    former = sys.dont_write_bytecode
    with tempfile.TemporaryDirectory(prefix="axcore-loc-") as folder:
        root = Path(folder) / name
        base = CodeBase(name, root)
        base.add({"__init__.py": "", **files})
        spec = importlib.util.spec_from_file_location(
            name, root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec is not None and spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[name] = package
        sys.dont_write_bytecode = True
        try:
            spec.loader.exec_module(package)
            yield base
        finally:
            sys.dont_write_bytecode = former
            for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
                del sys.modules[module]
