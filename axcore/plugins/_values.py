"""Checks of spec fields, and an immutable mapping that hashes and pickles."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

from axcore.errors import PluginError

__all__ = ["CHECKS", "FrozenMap", "check_field", "is_target"]

K = TypeVar("K")
V = TypeVar("V")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]*")
_PATTERN = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9._:+*?-]*")
_PLATFORM = re.compile(r"[a-z][a-z0-9_]*|\*")
_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_TARGET = re.compile(rf"{_DOTTED}:{_DOTTED}")


class FrozenMap(Mapping[K, V]):
    """A mapping that never changes; equal to any mapping with the same items.

    Args:
        items: The mapping to copy.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[K, V] | None = None):
        self._items: dict[K, V] = dict(items or {})

    def __getitem__(self, key: K) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        # Sorted, so that digests do not depend on the order in which items were written.
        items = sorted((repr(k), repr(v)) for k, v in self._items.items())
        return "{" + ", ".join(f"{k}: {v}" for k, v in items) + "}"

    def __reduce__(self) -> tuple[type[FrozenMap[K, V]], tuple[dict[K, V]]]:
        return (FrozenMap, (self._items,))


def is_target(value: object) -> bool:
    """Tells whether ``value`` is a string of the form ``"module:attribute"``."""
    return isinstance(value, str) and _TARGET.fullmatch(value) is not None


class _Bad(Exception):
    """What was expected of a field."""


def _matching(regex: re.Pattern[str], expected: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if not isinstance(value, str) or regex.fullmatch(value) is None:
            raise _Bad(expected)
        return value

    return check


def _identifier(value: object) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise _Bad("an identifier such as 'attention'")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Bad("a string")
    return value


def _reason(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Bad("a sentence that says why")
    return value


def _integer(value: object) -> int:
    if type(value) is not int:
        raise _Bad("an int")
    return value


def _literal(value: object) -> object:
    if not isinstance(value, bool | int | float | str):
        raise _Bad("a bool, int, float or str")
    return value


def _optional(check: Callable[[object], str]) -> Callable[[object], str | None]:
    def checked(value: object) -> str | None:
        return None if value is None else check(value)

    return checked


def _tuple_of(
    check: Callable[[object], str], *, empty: bool = False
) -> Callable[[object], tuple[str, ...]]:
    def checked(value: object) -> tuple[str, ...]:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise _Bad("a tuple of strings")
        items = tuple(cast("Sequence[object]", value))
        if not items and not empty:
            raise _Bad("a tuple with at least one entry")
        return tuple(check(item) for item in items)

    return checked


def _partitioning(value: object) -> FrozenMap[str, tuple[str, ...]]:
    if not isinstance(value, Mapping):
        raise _Bad("a mapping of argument names to tuples of logical axes")
    dims = _tuple_of(_identifier, empty=True)
    items = cast("Mapping[object, object]", value).items()
    return FrozenMap({_identifier(argument): dims(names) for argument, names in items})


_name = _matching(_NAME, "a name of letters, digits and '._:+-'")
_pattern = _matching(_PATTERN, "a name or pattern of letters, digits, '._:+-', '*' and '?'")
_platform = _matching(_PLATFORM, "a JAX platform such as 'cpu', 'gpu', 'tpu', 'neuron', or '*'")
_target = _matching(_TARGET, "'module:attribute'")

# A field name means the same thing in every spec, so one table checks them all.
CHECKS: Mapping[str, Callable[[object], object]] = {
    "name": _name,
    "description": _text,
    "target": _target,
    "supports": _optional(_target),
    "detect": _optional(_target),
    "op": _identifier,
    "implementation": _identifier,
    "platform": _platform,
    "platforms": _tuple_of(_platform),
    "partitioning": _partitioning,
    "priority": _integer,
    "pattern": _pattern,
    "family": _name,
    "traits": _tuple_of(_name, empty=True),
    "reason": _reason,
    "key": _name,
    "value": _literal,
    "dtypes": _tuple_of(_name),
    "scope": _text,
    "tags": _tuple_of(_name, empty=True),
    "events": _tuple_of(_identifier),
}


def check_field(where: str, field: str, value: object) -> object:
    """Checks one field of a spec.

    Args:
        where: The spec, for the message.
        field: The field's name, a key of ``CHECKS``.
        value: What was given.

    Returns:
        The value to store: sequences become tuples, mappings :class:`FrozenMap`.

    Raises:
        PluginError: The value is not what the field holds.
    """
    try:
        return CHECKS[field](value)
    except _Bad as bad:
        raise PluginError(
            f"{field} is {value!r}, expected {bad}", code="AX202", where=where
        ) from None
