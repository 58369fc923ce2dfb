"""Who set a value: events, and the ambient author that they are recorded under."""

from __future__ import annotations

import contextvars
import os
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

Kind = Literal["default", "experiment", "modifier", "rule", "file", "flag", "derived"]

#: A placed config's values count as set by who placed it only if that is a stronger kind.
STRENGTH: dict[str, int] = {
    "derived": 0, "default": 1, "experiment": 2, "rule": 3, "modifier": 4, "file": 5, "flag": 6
}  # fmt: skip

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class Event:
    """One setting of one value.

    Attributes:
        kind: What set it.
        name: Which one: a class for defaults, an experiment, a modifier, a file, a flag, or the
            path that a derived value comes from.
        plugin: Distribution that the setter belongs to, if any.
        location: ``file:line`` of the code that set it, or None where there is none.
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
        return {
            "kind": self.kind,
            "name": self.name,
            "plugin": self.plugin,
            "location": self.location,
            "value": self.value,
        }


_AUTHOR: contextvars.ContextVar[tuple[Kind, str, str | None] | None] = contextvars.ContextVar(
    "axcore_config_author", default=None
)


class author:
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

    def __init__(self, kind: Kind, name: str, plugin: str | None = None):
        if kind not in STRENGTH:
            raise ValueError(f"author kind {kind!r} is not one of {', '.join(STRENGTH)}")
        self._who = (kind, name, plugin)
        self._tokens: list[contextvars.Token[Any]] = []

    def __enter__(self) -> None:
        self._tokens.append(_AUTHOR.set(self._who))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _AUTHOR.reset(self._tokens.pop())


def current_author() -> tuple[Kind, str, str | None] | None:
    """Returns (kind, name, plugin) of the innermost scope, or None outside any."""
    return _AUTHOR.get()


class Stamp:
    """The author and the calling line, looked up once for all the values of one call."""

    __slots__ = ("kind", "location", "name", "plugin", "scoped")

    def __init__(self):
        who = _AUTHOR.get()
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
            frame = frame.f_back
        self.location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.scoped = who is not None
        self.kind: Kind
        if who is not None:
            self.kind, self.name, self.plugin = who
        else:
            module = str(frame.f_globals.get("__name__", ""))
            self.kind, self.name, self.plugin = "experiment", module, None

    def event(self, value: str) -> Event:
        """Returns the event for one value given as text."""
        return Event(self.kind, self.name, self.plugin, self.location, value)
