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
from typing import Any, Literal

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
        location: ``file:line`` of the code that set it, or that applied the modifier unless that
            is axcore's; None where there is none.
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


#: Kind, name and plugin of an author; and the line that applied it, if that is none of axcore's.
_Author = tuple[Kind, str, str | None, str | None]
_AUTHOR: contextvars.ContextVar[_Author | None] = contextvars.ContextVar(
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
    applied = _beyond_here(sys._getframe(2))  # pyright: ignore[reportPrivateUsage]
    theirs = kind == "modifier" and not applied.f_code.co_filename.startswith(_AXCORE)
    token = _AUTHOR.set((kind, name, plugin, _line(applied) if theirs else None))
    try:
        yield
    finally:
        _AUTHOR.reset(token)


class Stamp:
    """The author and the calling line, looked up once for all the values of one call."""

    __slots__ = ("kind", "location", "name", "plugin", "scoped")
    kind: Kind

    def __init__(self):
        who = _AUTHOR.get()
        frame = _beyond_here(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        self.scoped = who is not None
        if who is None:
            who = ("experiment", str(frame.f_globals.get("__name__", "")), None, None)
        self.kind, self.name, self.plugin, applied = who
        self.location = applied or _line(frame)

    def event(self, value: str) -> Event:
        """Returns the event for one value given as text."""
        return Event(self.kind, self.name, self.plugin, self.location, value)


def _beyond_here(frame: FrameType) -> FrameType:
    """Returns the first frame outwards that is not of this package."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
