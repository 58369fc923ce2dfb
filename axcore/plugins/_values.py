"""Checks of spec fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from axcore.config import FrozenMapping
from axcore.errors import PluginError

_DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"


def _text(regex: str) -> Callable[[object], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(regex, value) is not None


def _is_identifier(value: object) -> bool:
    return isinstance(value, str) and value.isidentifier()


_NAME = "a name of letters, digits and '._:+-'"
_IDENTIFIER = "an identifier such as 'attention'"
# A field name means the same thing in every spec, so one table serves them all: what tells a good
# value, and how to say it. "?" is optional, "*" a tuple, "+" a tuple that is not empty.
_TABLE: Sequence[tuple[str, Callable[[object], bool], str]] = (
    ("name family key traits* tags* dtypes+", _text(r"[A-Za-z0-9][\w.:+-]*"), _NAME),
    ("pattern", _text(r"[A-Za-z0-9*?][\w.:+*?-]*"), "a name, in which '*' and '?' may stand"),
    ("platform platforms+", _text(r"[a-z][a-z0-9_]*|\*"), "a JAX platform such as 'gpu', or '*'"),
    ("target supports? detect?", _text(rf"{_DOTTED}:{_DOTTED}"), "'module:attribute'"),
    ("op implementation events+", _is_identifier, _IDENTIFIER),
    ("argument axes* communicates*", _is_identifier, _IDENTIFIER),  # the parts of partitioning
    ("description scope", _text(r"(?s).*"), "a string"),
    ("reason", _text(r"(?s).*\S.*"), "a sentence that says why"),
    ("priority", lambda value: type(value) is int, "an int"),
    ("compiler_partitioned", lambda value: isinstance(value, bool), "True or False"),
    ("value", lambda value: isinstance(value, bool | int | float | str), "a plain value"),
)
_FORMS = {
    field.rstrip("?*+"): (field[-1], known, expected)
    for fields, known, expected in _TABLE
    for field in fields.split()
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
            raise field_error(where, field, value, "a mapping of argument names to logical axes")
        items = cast("Mapping[str, Any]", value).items()
        checked = [
            (_check(where, field, "argument", k), _check(where, field, "axes", v)) for k, v in items
        ]
        # Sorted, so that digests do not depend on the order in which items were written.
        return FrozenMapping(dict(sorted(checked)))
    return _check(where, field, field, value)


def _check(where: str, field: str, form: str, value: Any) -> Any:
    repeat, known, expected = _FORMS[form]
    if repeat in "*+":
        several = isinstance(value, Sequence) and not isinstance(value, str)
        items = tuple(cast("Sequence[Any]", value)) if several else ()
        if not several or (repeat == "+" and not items):
            raise field_error(where, field, value, f"a tuple, each {expected}")
        value = items
    else:
        items = () if repeat == "?" and value is None else (value,)
    for item in items:
        if not known(item):
            raise field_error(where, field, item, expected)
    return value


def field_error(where: str, field: str, value: Any, expected: str) -> PluginError:
    """Builds the error for a field that holds something else."""
    return PluginError(f"{field} is {value!r}, expected {expected}", code="AX202", where=where)
