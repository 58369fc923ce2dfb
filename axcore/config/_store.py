"""The one place where a field gets its value: checked, stored, and recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from axcore.config import _write
from axcore.config._fields import REQUIRED, Field
from axcore.config._provenance import STRENGTH, Stamp
from axcore.config._tree import (
    ATOMS,
    Node,
    adopt,
    error,
    nodes_below,
    nodes_in,
    parts,
    path_of,
    short_name,
    state,
)
from axcore.config._types import Mismatch
from axcore.errors import ConfigError, did_you_mean


class UnknownFieldError(ConfigError, AttributeError):
    """A field that a config does not have; also an AttributeError, for hasattr and copy."""


def label(node: Node) -> str:
    """Returns what a config is in words: ``Linear.Config``, ``config_for(adamw)``."""
    call = state(node).call
    if call is not None:
        return f"{call.word}({getattr(call.fn, '__name__', '?')})"
    return short_name(type(node))


def field_of(node: Node, name: str) -> Field | None:
    """Returns a field, also one for a keyword that only ``**kwargs`` of a callable takes."""
    own = state(node)
    if name in own.fields or own.call is None:
        return own.fields.get(name)
    return own.call.extra_field(name)


def unknown(node: Node, name: str) -> UnknownFieldError:
    """Returns the error for a field that a config does not have."""
    own = state(node)
    message = f"{label(node)} has no field {name!r}"
    hint = did_you_mean(name, own.fields) or f"its fields are: {', '.join(own.fields) or 'none'}"
    if name in own.fields:
        message = f"{label(node)}.{name} is not set: the callable uses its own default"
        hint = None
    return UnknownFieldError(message, code="AX102", where=path_of(node, name), hint=hint)


def check(node: Node, name: str, value: Any) -> Any:
    """Returns ``value`` as the field stores it. Raises ConfigError; changes nothing."""
    if state(node).frozen:
        hint = "edit a copy: cfg = cfg.copy()"
        raise error("AX104", f"{label(node)} is frozen", path_of(node, name), hint)
    field = field_of(node, name)
    if field is None:
        raise unknown(node, name)
    return convert(node, field, value)


def set_all(nodes: Iterable[Node], values: Mapping[str, Any]) -> None:
    """Sets fields of every node, or (on an error) of none."""
    stamp = Stamp()
    pairs = [(node, name) for node in nodes for name in values]
    checked = [(node, name, check(node, name, values[name])) for node, name in pairs]
    for node, name, value in checked:
        assign(node, name, value, stamp)


def convert(node: Node, field: Field, value: Any) -> Any:
    """Returns ``value`` converted to the type of ``field``; errors name the path."""
    if value is REQUIRED:
        return value
    try:
        return field.checker.convert(value)
    except Mismatch as e:
        raise e.error(f"{label(node)}.{field.name}", path_of(node, field.name)) from None


def assign(node: Node, name: str, value: Any, stamp: Stamp, key: str = "") -> None:
    """Stores a checked value and records who set it.

    Args:
        node: The config.
        name: Its field.
        value: The whole value of the field.
        stamp: Who sets it.
        key: The path of the part that is set, if only a part (``"stages.0.steps"``).
    """
    store(node, name, value)
    part = value
    for segment in key.split(".")[1:]:
        part = dict(parts(part))[segment]
    if type(part) not in ATOMS and stamp.scoped:
        claim(part, stamp)
    state(node).events.append((key or name, stamp.event(_write.brief(part))))


def store(node: Node, name: str, value: Any) -> None:
    """Stores a checked value, detaching the nodes it displaces."""
    own = state(node)
    old = own.values.get(name)
    if type(old) not in ATOMS:
        for _, child in nodes_in(old, name):
            state(child).parent = None
    if name not in own.fields:  # a further keyword argument of a callable
        own.fields = {**own.fields, name: own.call.extra_field(name)}
    own.values[name] = value
    adopt(node, name, value)


def claim(value: Any, stamp: Stamp) -> None:
    """Records that what a placed config sets counts as set by who placed it, if that is stronger.

    A modifier that places a config written elsewhere thereby sets that config's values; a rule
    that wraps a config does not take over what a flag had set inside it.
    """
    for node in nodes_below(value):
        events = state(node).events
        for key, event in dict(events).items():
            if STRENGTH[event.kind] < STRENGTH[stamp.kind]:
                events.append((key, stamp.event(event.value)))
