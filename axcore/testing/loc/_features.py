"""Features as text: what is written to add one, where it comes from, what it needs.

A feature is one Python file in a folder named ``loc_features`` of an installed plugin's package, or
in this package's ``features``. Nothing imports it; its sections are copied into generated code
bases. A section starts with a line ``# %% NAME``:

- before the first: the docstring (its first line is the title) and ``# requires: module:attribute``
  lines, without which the feature is skipped;
- ``feature``: the feature's own file, which is not counted; a feature that is installed has none;
- ``integration``: what a user adds to an experiment, counted as it is laid out: imports and a
  function ``integrate(cfg: Trainer.Config)`` that edits the config;
- ``check``: how the gate tells that it works, not counted: ``check(probe)`` compares numbers before
  and after, ``is_present(cfg, model)`` looks at a built model;
- ``edit GLOB``: ``edit(text)`` returns what pre-existing files that match become: for a feature
  that cannot do without; every line counts;
- ``flat SLOT``: the same feature in the flat control style, see :mod:`axcore.testing.loc._flat`.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import importlib_metadata

from axcore.errors import AxcoreError, CliError, did_you_mean
from axcore.plugins import host
from axcore.testing.loc._normalize import Files, code_lines

__all__ = ["FOLDER", "Feature", "find_features", "parse_feature"]

FOLDER = "loc_features"
_OWN = Path(__file__).parent / "features"
_SECTION = re.compile(r"^# %% (?P<name>.+)$", re.MULTILINE)
_REQUIRES = re.compile(r"^# requires: (?P<target>\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Feature:
    """One feature.

    Attributes:
        name: The file's name without suffix.
        title: One line.
        provider: Distribution that the file belongs to, or the folder it is in.
        sections: Section -> source.
        requires: Targets that must exist for it to be measured.
    """

    name: str
    title: str
    provider: str
    sections: Mapping[str, str]
    requires: tuple[str, ...] = field(default=())

    @property
    def integration(self) -> str:
        """The snippet in the experiment."""
        return self.sections["integration"]

    @property
    def integration_lines(self) -> int:
        """Its lines of code: imports and the body of ``integrate``, not its header."""
        return code_lines(self.integration) - 1

    @property
    def flat(self) -> tuple[str, str] | None:
        """Slot and source in the flat control style, if there is one."""
        for name, source in self.sections.items():
            if name.startswith("flat "):
                return name.removeprefix("flat ").strip(), source
        return None

    def edited(self, files: Files) -> dict[str, str]:
        """Returns the pre-existing files as they are with the feature."""
        result = dict(files)
        for name, source in self.sections.items():
            if not name.startswith("edit "):
                continue
            pattern = name.removeprefix("edit ").strip()
            scope: dict[str, Any] = {}
            exec(compile(source, f"<{self.name}: {name}>", "exec"), scope)
            for path in fnmatch.filter(files, pattern):
                result[path] = scope["edit"](result[path])
        return result

    def missing(self) -> str | None:
        """Returns why it cannot be measured here, or None."""
        for target in self.requires:
            module, _, attribute = target.partition(":")
            try:
                found = hasattr(importlib.import_module(module), attribute)
            except ImportError as error:
                return f"needs {target}: {error}"
            if not found:
                return f"needs {target}, which is not there"
        return None


def parse_feature(name: str, text: str, provider: str) -> Feature:
    """Reads a feature from the text of its file.

    Raises:
        CliError: A section is missing or there is no function where one is expected.
    """
    marks = list(_SECTION.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    sections = {
        mark["name"].strip(): text[mark.end() : end].strip() + "\n"
        for mark, end in zip(marks, ends, strict=True)
    }
    head = text[: marks[0].start()] if marks else text
    for section, functions in (("integration", ("integrate",)), ("check", ("check", "is_present"))):
        defined = {
            node.name
            for node in ast.parse(sections.get(section, "")).body
            if isinstance(node, ast.FunctionDef)
        }
        missing = [function for function in functions if function not in defined]
        if missing:
            raise CliError(
                f"feature {name!r} defines no {', '.join(missing)} under '# %% {section}'",
                code="AX871",
                where=provider,
                hint=f"sections found: {', '.join(sections) or 'none'}",
            )
    title = (ast.get_docstring(ast.parse(head)) or name).splitlines()[0].rstrip(".")
    requires = tuple(match["target"] for match in _REQUIRES.finditer(head))
    return Feature(name, title, provider, sections, requires)


def find_features(names: Iterable[str] = (), folders: Iterable[Path] = ()) -> tuple[Feature, ...]:
    """Returns core's features, those of the active plugins, and those in further folders.

    Args:
        names: Only these; empty for all.
        folders: Folders with more of them.

    Raises:
        CliError: Two have one name, or a name is not found.
    """
    found: dict[str, Feature] = {}
    for provider, folder in _folders(folders):
        for path in sorted(folder.glob("*.py")):
            if path.stem.startswith("_"):
                continue
            feature = parse_feature(path.stem, path.read_text("utf-8"), provider)
            if feature.name in found:
                first = found[feature.name].provider
                raise CliError(
                    f"feature {feature.name!r} is given by {first} and by {provider}", code="AX872"
                )
            found[feature.name] = feature
    wanted = tuple(names) or tuple(found)
    unknown = [name for name in wanted if name not in found]
    if unknown:
        raise CliError(
            f"no feature {unknown[0]!r}; known: {', '.join(found)}",
            code="AX872",
            hint=did_you_mean(unknown[0], found) or "a plugin that is not installed may have it",
        )
    return tuple(found[name] for name in wanted)


def _folders(more: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    for record in host(check=False).active_records():
        for package in _packages(record.distribution):
            try:
                spec = importlib.util.find_spec(package)
            except (ImportError, ValueError):  # a package that is only half there
                continue
            for place in (spec.submodule_search_locations if spec else None) or ():
                if (Path(place) / FOLDER).is_dir():
                    yield record.distribution, Path(place) / FOLDER
    yield "axcore", _OWN
    for folder in more:
        if not folder.is_dir():
            raise CliError(f"there is no folder {str(folder)!r}", code="AX872", where="--folder")
        yield str(folder), folder


def _packages(distribution: str) -> list[str]:
    """Returns the packages that a plugin's entry points are in."""
    try:
        entry_points = importlib_metadata.distribution(distribution).entry_points
    except (importlib_metadata.PackageNotFoundError, AxcoreError):
        return []
    values = [e.value for e in entry_points.select(group="axcore")]
    return sorted({re.split(r"[.:\[]", value)[0].strip() for value in values})
