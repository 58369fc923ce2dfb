"""How a field gets its value: set or derived, checked, stored and recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from axcore.config import _write
from axcore.config._fields import REQUIRED, Field
from axcore.config._provenance import STRENGTH, Event, Stamp
from axcore.config._tree import (
    ATOMS,
    Node,
    adopt,
    ancestors,
    children,
    copy_node,
    error,
    nodes_below,
    nodes_in,
    parts,
    path_of,
    rebuilt,
    short_name,
    state,
)
from axcore.config._types import Mismatch, Scaled
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


# What an object is built from: overrides, completeness, ``scaled`` values ------------------------


class _Unknown(Exception):
    """The source of a ``scaled`` is not known; says why, and the way out."""


def prepared(
    node: Any, above: tuple[Node, ...] | None, overrides: Mapping[str, object], source: str
) -> Any:
    """See :meth:`Config.prepared`; ``above`` None means the ancestors in the node's own tree."""
    if above is None:
        if state(node).prepared:
            return node
        above = ancestors(node)
    twin: Any = copy_node(node)
    # The twin stands where the node stands, so that its errors and its own nested configs see
    # the full path and the ancestors.
    state(twin).parent, state(twin).key = state(node).parent, state(node).key
    for name, value in overrides.items():
        _override(twin, name, value, source)
    _check_complete(twin)
    _resolve(twin, above, strict=True)
    twin.freeze()
    state(twin).prepared = True
    return twin


def _override(node: Node, name: str, value: object, source: str) -> None:
    own = state(node)
    parent = source or "the root"
    if name not in own.fields:
        raise error(
            "AX102",
            f"its parent ({parent}) sets {name!r}, which is not a field of {label(node)}",
            path_of(node, name),
            did_you_mean(name, own.fields)
            or f"add `{name}: Required[...] = REQUIRED`, or derive from the role's config",
        )
    new = convert(node, own.fields[name], value)
    old = own.values.get(name, REQUIRED)
    said = [e for key, e in own.events if key == name and e.kind not in ("default", "derived")]
    if said and old is not REQUIRED and _write.inline(old) != _write.inline(new):
        raise error(
            "AX116",
            f"set to {_write.brief(old)} by {said[-1]}, but its parent ({parent}) decides it and "
            f"says {_write.brief(new)}",
            path_of(node, name),
            f"remove the setting; change it where the parent takes it from ({parent})",
        )
    _derive(node, name, new, source)


def _derive(node: Node, name: str, value: Any, source: str) -> None:
    store(node, name, value)
    state(node).events.append((name, Event("derived", source, value=_write.brief(value))))


def _check_complete(node: Node) -> None:
    own = state(node)
    missing = [name for name, value in own.values.items() if value is REQUIRED]
    if missing and not (own.call is not None and own.call.partial):
        more = f" (and {', '.join(missing[1:])})" if len(missing) > 1 else ""
        raise error(
            "AX103",
            f"{label(node)}.{missing[0]} is required and has no value{more}",
            path_of(node, missing[0]),
            f"set it: cfg.set({missing[0]}=...), or have the parent pass it",
        )


def _resolve(node: Node, above: tuple[Node, ...], strict: bool) -> None:
    """Resolves each ``scaled`` in a tree, in place; ``strict`` about those of ``node`` itself."""
    chain = (node, *above)
    for name, value in list(state(node).values.items()):
        if type(value) in ATOMS or isinstance(value, Node):
            continue
        sources: dict[str, None] = {}
        new = _resolved(value, chain, name, sources, strict)
        if new is not value:
            new = convert(node, state(node).fields[name], new)
            _derive(node, name, new, ", ".join(sources))
    for _, child in children(node):
        _resolve(child, chain, strict=False)


def _resolved(
    value: Any, chain: tuple[Node, ...], name: str, sources: dict[str, None], strict: bool
) -> Any:
    """Returns ``value`` with each ``scaled`` in it resolved; adds where from to ``sources``."""
    if isinstance(value, Scaled):
        try:
            number, source = _compute(value, chain, name, ())
        except _Unknown as e:
            if not strict:
                return value
            reason, hint = e.args
            message = f"{value!r} cannot be resolved: {reason}"
            raise error("AX112", message, path_of(chain[0], name), hint) from None
        sources[source] = None
        return number
    if type(value) in ATOMS or isinstance(value, Node):
        return value
    return rebuilt(value, lambda _, part: _resolved(part, chain, name, sources, strict))


def _compute(
    scaled: Scaled, chain: tuple[Node, ...], name: str, busy: tuple[tuple[int, str], ...]
) -> tuple[int | float, str]:
    """Returns the number and the path it follows from; ``name`` is the field of ``chain[0]``.

    Raises:
        _Unknown: There is no source, or it has no value yet.
    """
    where = path_of(chain[0], name)
    here = (id(chain[0]), name)
    if here in busy:
        raise error("AX112", f"{scaled!r} depends on itself", where)
    having = (i for i, node in enumerate(chain) if scaled.of in state(node).values)
    i = next((i for i in having if (i, scaled.of) != (0, name)), None)
    if i is None:
        known = [n for node in chain for n in state(node).values if n != name]
        reason = f"neither this config nor one above it has a field {scaled.of!r}"
        raise _Unknown(reason, did_you_mean(scaled.of, known))
    source = path_of(chain[i], scaled.of)
    value = state(chain[i]).values[scaled.of]
    if isinstance(value, Scaled):
        value, _ = _compute(value, chain[i:], scaled.of, (*busy, here))
    if value is REQUIRED or value is None:
        raise _Unknown(f"{source} has no value", "set that first")
    if type(value) not in (int, float):
        raise error("AX112", f"{scaled!r}: {source} is {value!r}, not a number", where)
    number = state(chain[0]).fields[name].checker.number
    to_int = number == "int" or (number is None and type(value) is int)
    return scaled(value, to_int=to_int), source
