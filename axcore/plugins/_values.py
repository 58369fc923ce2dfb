"""Checks of spec fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from axcore.config import FrozenMapping
from axcore.errors import PluginError

_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"


def _matching(regex: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(regex, value) is not None


def _is_identifier(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


# What a field holds -> (how to tell, how to say it).
_FORMS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "name": (_matching(r"[A-Za-z0-9][\w.:+-]*"), "a name of letters, digits and '._:+-'"),
    "pattern": (_matching(r"[A-Za-z0-9*?][\w.:+*?-]*"), "a name, in which '*' and '?' may stand"),
    "platform": (_matching(r"[a-z][a-z0-9_]*|\*"), "a JAX platform such as 'gpu', or '*'"),
    "target": (_matching(rf"{_DOTTED}:{_DOTTED}"), "'module:attribute'"),
    "identifier": (_is_identifier, "an identifier such as 'attention'"),
    "text": (lambda value: isinstance(value, str), "a string"),
    "reason": (_matching(r"(?s).*\S.*"), "a sentence that says why"),
    "integer": (lambda value: type(value) is int, "an int"),
    "literal": (lambda value: isinstance(value, bool | int | float | str), "a plain value"),
}
# A field name means the same thing in every spec, so one table serves them all. "?" is optional,
# "*" a tuple, "+" a tuple that is not empty.
_FIELDS: Mapping[str, str] = {
    "name": "name",
    "description": "text",
    "target": "target",
    "supports": "target?",
    "detect": "target?",
    "op": "identifier",
    "implementation": "identifier",
    "platform": "platform",
    "platforms": "platform+",
    "priority": "integer",
    "pattern": "pattern",
    "family": "name",
    "traits": "name*",
    "reason": "reason",
    "key": "name",
    "value": "literal",
    "dtypes": "name+",
    "scope": "text",
    "tags": "name*",
    "events": "identifier+",
}


def check_field(where: str, field: str, value: Any) -> Any:
    """Checks one field of a spec.

    Args:
        where: The spec, for the message.
        field: The field's name.
        value: What was given.

    Returns:
        The value to store: sequences become tuples, mappings immutable.

    Raises:
        PluginError: The value is not what the field holds.
    """
    if field == "partitioning":  # argument name -> logical axes
        if not isinstance(value, Mapping):
            raise _error(where, field, value, "a mapping of argument names to logical axes")
        items = cast("Mapping[str, Any]", value).items()
        # Sorted, so that digests do not depend on the order in which items were written.
        checked = [
            (_check(where, field, "identifier", k), _check(where, field, "identifier*", v))
            for k, v in items
        ]
        return FrozenMapping(dict(sorted(checked)))
    return _check(where, field, _FIELDS[field], value)


def _check(where: str, field: str, form: str, value: Any) -> Any:
    if form.endswith("?") and value is None:
        return None
    known, expected = _FORMS[form.rstrip("?*+")]
    if form[-1] not in "*+":
        if not known(value):
            raise _error(where, field, value, expected)
        return value
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = cast("Sequence[Any]", value)
        if items or form[-1] == "*":
            return tuple(_check(where, field, form[:-1], item) for item in items)
    raise _error(where, field, cast("Any", value), f"a tuple, each {expected}")


def _error(where: str, field: str, value: Any, expected: str) -> PluginError:
    return PluginError(f"{field} is {value!r}, expected {expected}", code="AX202", where=where)
