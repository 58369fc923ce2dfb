"""The one place where a field gets its value: checked, stored, and recorded."""

from __future__ import annotations

from typing import Any

from axcore.config import _write
from axcore.config._fields import REQUIRED, Field, short_name
from axcore.config._provenance import STRENGTH, Stamp
from axcore.config._tree import ATOMS, Node, adopt, nodes_in, parts, path_of, state, walk
from axcore.config._types import Mismatch
from axcore.errors import ConfigError, did_you_mean


class UnknownFieldError(ConfigError, AttributeError):
    """A field that a config does not have; also an AttributeError, for hasattr and copy."""


def label(node: Node) -> str:
    """Returns what a config is in words: ``Linear.Config``, ``config_for(adamw)``."""
    call = state(node).call
    if call is not None:
        return f"{call.word}({getattr(call.fn, '__name__', '?')})"
    return short_name(type(node).__qualname__)


def unknown(node: Node, name: str) -> UnknownFieldError:
    """Returns the error for a field that a config does not have."""
    own = state(node)
    where = path_of(node, name)
    if name in own.fields:
        return UnknownFieldError(
            f"{label(node)}.{name} is not set: the callable uses its own default",
            code="AX102",
            where=where,
        )
    hint = did_you_mean(name, own.fields)
    return UnknownFieldError(
        f"{label(node)} has no field {name!r}",
        code="AX102",
        where=where,
        hint=hint or f"its fields are: {', '.join(own.fields) or 'none'}",
    )


def check(node: Node, name: str, value: Any) -> Any:
    """Returns ``value`` as the field stores it. Raises ConfigError; changes nothing."""
    own = state(node)
    if own.frozen:
        raise ConfigError(
            f"{label(node)} is frozen",
            code="AX104",
            where=path_of(node, name),
            hint="edit a copy: cfg = cfg.copy()",
        )
    field = own.fields.get(name)
    if field is None and own.call is not None:
        field = own.call.extra_field(name)
    if field is None:
        raise unknown(node, name)
    return convert(node, field, value)


def convert(node: Node, field: Field, value: Any) -> Any:
    """Returns ``value`` converted to the type of ``field``; errors name the path."""
    if value is REQUIRED:
        return value
    try:
        return field.checker.convert(value)
    except Mismatch as e:
        raise e.error(f"{label(node)}.{field.name}", path_of(node, field.name)) from None


def assign(node: Node, name: str, value: Any, stamp: Stamp, key: str | None = None) -> None:
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
    for segment in key.split(".")[1:] if key else ():
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
    for _, top in nodes_in(value, ""):
        for _, node in walk(top):
            own = state(node)
            last = {key: event for key, event in own.events}
            for key, event in last.items():
                if STRENGTH[event.kind] < STRENGTH[stamp.kind]:
                    own.events.append((key, stamp.event(event.value)))
