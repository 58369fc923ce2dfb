"""Finds plugins through entry points, and imports each so that a broken one harms nobody."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from .records import Status

GROUP = "axcore"
_distributions: Callable[..., Iterable[Any]] = getattr(importlib_metadata, "distributions")  # noqa: B009
# Importing any of these while plugins are listed costs seconds or claims devices.
FRAMEWORKS = ("jax", "jaxlib", "torch", "tensorflow")


class Fault(Exception):
    """Why a plugin cannot be active; the original exception, if there is one, is its cause.

    Args:
        status: The record's status.
        reason: The record's reason.
    """

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status: Status = status


@dataclass(frozen=True)
class Candidate:
    """One entry point, not yet imported.

    Attributes:
        distribution: Normalized name of its distribution.
        version: Version of the distribution.
        name: Name of the entry point.
        load: Imports the module and returns the plugin object.
        requires: The distribution's requirements, as in its metadata.
        packages: Top-level packages of the distribution.
        fault: Set if the metadata already shows that it cannot work.
    """

    distribution: str
    version: str
    name: str
    load: Callable[[], object]
    requires: tuple[str, ...] = ()
    packages: frozenset[str] = frozenset()
    fault: Fault | None = field(default=None, compare=False)

    def is_called(self, name: str) -> bool:
        """Tells whether ``name`` is the distribution's or the entry point's name."""
        return name == self.name or canonicalize_name(name) == self.distribution

    @classmethod
    def from_entry_point(cls, entry_point: Any) -> Candidate:
        """Reads what the host needs from an ``importlib_metadata.EntryPoint`` and its ``dist``."""
        packages = {re.split(r"[.:\[]", entry_point.value)[0].strip()}
        fault = None
        name, version, requires = entry_point.name, "unknown", ()
        try:
            metadata = entry_point.dist.metadata  # parsed anew at each access
            name, version = str(metadata["Name"]), str(metadata["Version"])
            requires = tuple(metadata.get_all("Requires-Dist") or ())
            packages |= top_level(entry_point.dist)
        except Exception as error:
            fault = Fault("invalid", f"its metadata cannot be read: {describe(error)}")
            fault.__cause__ = error
        return cls(
            distribution=canonicalize_name(name),
            version=version,
            name=entry_point.name,
            load=entry_point.load,
            requires=requires,
            packages=frozenset(packages),
            fault=fault,
        )


def describe(error: BaseException) -> str:
    """Returns ``"Type: message"`` in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def find_candidates(path: Sequence[str] | None = None) -> tuple[Candidate, ...]:
    """Returns the entry points of the group ``axcore``, importing none of them.

    Args:
        path: Directories to search instead of ``sys.path``.
    """
    where = {} if path is None else {"path": list(path)}
    found: dict[tuple[str, str, str], Candidate] = {}
    for dist in _distributions(**where):
        try:
            entry_points = list(dist.entry_points.select(group=GROUP))
        except Exception:  # another package's unreadable entry_points.txt is not our business
            continue
        for entry_point in entry_points:
            candidate = Candidate.from_entry_point(entry_point)
            if candidate.fault or _is_first_on_path(dist, candidate.distribution, where):
                key = (candidate.distribution, entry_point.name, entry_point.value)
                found.setdefault(key, candidate)
    return tuple(found.values())


def _is_first_on_path(dist: Any, name: str, where: dict[str, Any]) -> bool:
    """Tells whether ``dist`` is the copy that Python imports, not one later on the path."""
    first = next(iter(_distributions(name=name, **where)), None)
    return first is None or first.locate_file("") == dist.locate_file("")


def top_level(dist: Any) -> frozenset[str]:
    """Returns the names that the distribution makes importable, as its files show."""
    listed = dist.read_text("top_level.txt")
    if listed:
        return frozenset(listed.split())
    names: set[str] = set()
    for file in dist.files or ():
        first, *rest = file.parts
        name = first if rest else first.removesuffix(".py")
        if (rest or first.endswith(".py")) and name.isidentifier() and not name.startswith("__"):
            names.add(name)
    return frozenset(names)


def satisfies(requirement: Requirement, version: str) -> bool:
    """Tells whether ``version`` meets ``requirement``; a pre-release counts as its release too.

    A core of ``0.3.0.dev1`` therefore runs plugins that ask for ``>=0.3``.
    """
    parsed = Version(version)
    candidates = [version, parsed.base_version] if parsed.is_prerelease else [version]
    return any(requirement.specifier.contains(v, prereleases=True) for v in candidates)


def requirements(requires: Iterable[str]) -> list[Requirement]:
    """Parses requirements, leaving out any that are malformed or for another environment."""
    parsed: list[Requirement] = []
    for text in requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or _is_extra(requirement) or requirement.marker.evaluate():
            parsed.append(requirement)
    return parsed


def unmet_core_requirement(requires: Iterable[str], core_version: str) -> str | None:
    """Returns the requirement on ``axcore`` that ``core_version`` does not meet, or None."""
    for requirement in requirements(requires):
        if canonicalize_name(requirement.name) == "axcore" and not _is_extra(requirement):
            if not satisfies(requirement, core_version):
                return str(requirement)
    return None


def _is_extra(requirement: Requirement) -> bool:
    return "extra" in str(requirement.marker)


def import_plugin(candidate: Candidate) -> object:
    """Imports one plugin.

    Raises:
        Fault: It raised (``SystemExit`` and the like included), or brought in a framework.
    """
    before = set(sys.modules)
    try:
        plugin = candidate.load()
    except KeyboardInterrupt:  # the user's, not the plugin's
        raise
    except BaseException as error:
        raise Fault("failed", f"import failed: {describe(error)}") from error
    new = {name: m for name, m in list(sys.modules.items()) if name not in before}
    if framework := imported_framework(plugin, before, new):
        raise Fault(
            "invalid",
            f"imports {framework} at import; a plugin module holds hook functions and strings "
            "only: name code by target strings",
        )
    return plugin


def imported_framework(
    plugin: object, before: set[str], new: dict[str, types.ModuleType]
) -> str | None:
    """Returns the framework that importing ``plugin`` brought in, or None.

    Where the framework was loaded already, the plugin's own modules are searched for it.

    Args:
        plugin: The plugin object.
        before: Names of the modules loaded before.
        new: The modules loaded since.
    """
    for framework in FRAMEWORKS:
        if framework in new:
            return framework
    loaded = [f for f in FRAMEWORKS if f in before]
    for holder in (plugin, *new.values()):
        for value in list(getattr(holder, "__dict__", {}).values()):
            of = "__name__" if isinstance(value, types.ModuleType) else "__module__"
            package = str(getattr(value, of, None)).partition(".")[0]
            if package in loaded:
                return package
    return None
