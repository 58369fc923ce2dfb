"""Who set a value: events, and the ambient author that they are recorded under."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, NamedTuple

Kind = Literal["default", "experiment", "modifier", "rule", "file", "flag", "derived"]

#: A placed config's values count as set by who placed it only if that is a stronger kind.
STRENGTH: dict[str, int] = {
    "derived": 0, "default": 1, "experiment": 2, "rule": 3, "modifier": 4, "file": 5, "flag": 6
}  # fmt: skip

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_AXCORE = os.path.dirname(os.path.dirname(_HERE)) + os.sep


@dataclass(frozen=True, slots=True)
class Event:
    """One setting of one value.

    Attributes:
        kind: What set it.
        name: Which one: a class for defaults, an experiment, a modifier, a file, a flag, or the
            path that a derived value comes from.
        plugin: Distribution that the setter belongs to, if any.
        location: ``file:line`` of the code that set it: the author's own line, or the one that
            applied the modifier, rather than one of axcore. None where there is none.
        value: The value as text.
    """

    kind: Kind
    name: str
    plugin: str | None = None
    location: str | None = None
    value: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.name})" if self.name else self.kind

    def to_json(self) -> dict[str, Any]:
        """Returns the event as a plain dictionary."""
        return dataclasses.asdict(self)


class _Scope(NamedTuple):
    """An author, and the frame that has opened its scope."""

    kind: Kind
    name: str
    plugin: str | None
    frame: FrameType


_AUTHOR: contextvars.ContextVar[_Scope | None] = contextvars.ContextVar(
    "axcore_config_author", default=None
)


@contextlib.contextmanager
def author(kind: Kind, name: str, plugin: str | None = None) -> Generator[None]:
    """Scope in which every edit is recorded as made by the given author.

    Outside any scope edits are recorded as kind ``experiment``, named by the module that made them.

    Args:
        kind: One of default, experiment, modifier, rule, file, flag, derived.
        name: Which one.
        plugin: Distribution it belongs to, if any.

    Example:
        >>> with author("flag", "--set"):
        ...     cfg.set(max_step=10)
    """
    if kind not in STRENGTH:
        raise ValueError(f"author kind {kind!r} is not one of {', '.join(STRENGTH)}")
    opened = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]  # beyond contextlib's
    token = _AUTHOR.set(_Scope(kind, name, plugin, opened))
    try:
        yield
    finally:
        _AUTHOR.reset(token)


def current_author() -> tuple[Kind, str, str | None] | None:
    """Returns (kind, name, plugin) of the innermost scope, or None outside any."""
    scope = _AUTHOR.get()
    return None if scope is None else (scope.kind, scope.name, scope.plugin)


class Stamp:
    """The author and the calling line, looked up once for all the values of one call."""

    __slots__ = ("kind", "location", "name", "plugin", "scoped")
    kind: Kind

    def __init__(self):
        scope = _AUTHOR.get()
        frame = _beyond_here(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        self.scoped = scope is not None
        if scope is None:
            name = str(frame.f_globals.get("__name__", ""))
            self.kind, self.name, self.plugin = "experiment", name, None
        else:
            self.kind, self.name, self.plugin, _ = scope
        shown = frame if scope is None else _shown_frame(frame, scope)
        self.location = None if shown is None else f"{shown.f_code.co_filename}:{shown.f_lineno}"

    def event(self, value: str) -> Event:
        """Returns the event for one value given as text."""
        return Event(self.kind, self.name, self.plugin, self.location, value)


def _beyond_here(frame: FrameType) -> FrameType:
    """Returns the first frame outwards that is not of this package."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame


def _shown_frame(frame: FrameType, scope: _Scope) -> FrameType | None:
    """Returns the frame whose line tells most of an edit made in ``frame``.

    That is where code outside axcore has applied the modifier; else the innermost frame of the
    author's package, which is that of the outermost frame in the scope that is not axcore's. Of a
    flag that axcore itself carries out there is none.
    """
    if scope.kind == "modifier" and not _is_ours(applied := _beyond_here(scope.frame)):
        return applied
    theirs: list[FrameType] = []
    at: FrameType | None = frame
    while at is not None:
        if not _is_ours(at):
            theirs.append(at)
        if at is scope.frame:
            break
        at = at.f_back
    if at is None:  # the scope was opened on another stack
        return frame
    if not theirs:
        return None if scope.kind == "flag" else frame
    package = _package(theirs[-1])
    return next(f for f in theirs if _package(f) == package)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_AXCORE)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
