"""From a config to what an object is built from: overrides, ``scaled`` values, completeness."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from axcore.config import _store, _write
from axcore.config._provenance import Event
from axcore.config._tree import (
    ATOMS,
    Node,
    ancestors,
    children,
    copy_node,
    freeze,
    parts,
    path_of,
    rebuilt,
    state,
)
from axcore.config._types import REQUIRED, Scaled
from axcore.errors import ConfigError, did_you_mean


def prepared(
    node: Any, above: tuple[Node, ...] | None, overrides: Mapping[str, object], source: str
) -> Any:
    """See :meth:`Config.prepared`; ``above`` None means the ancestors in the node's own tree."""
    if above is None and state(node).prepared:
        return node
    twin: Any = copy_node(node)
    # The twin stands where the node stands, so that its errors and its own nested configs see
    # the full path and the ancestors.
    state(twin).parent, state(twin).key = state(node).parent, state(node).key
    for name, value in overrides.items():
        _override(twin, name, value, source)
    resolve_tree(twin, ancestors(node) if above is None else above)
    check_complete(twin, ancestors(node) if above is None else above)
    freeze(twin)
    state(twin).prepared = True
    return twin


def _override(node: Any, name: str, value: object, source: str) -> None:
    own = state(node)
    parent = source or "the root"
    if name not in own.fields:
        raise ConfigError(
            f"its parent ({parent}) sets {name!r}, which is not a field of {_store.label(node)}",
            code="AX102",
            where=path_of(node, name),
            hint=did_you_mean(name, own.fields)
            or f"add `{name}: Required[...] = REQUIRED`, or derive from the role's config",
        )
    checked = _store.convert(node, own.fields[name], value)
    old = own.values.get(name, REQUIRED)
    said = [e for key, e in own.events if key == name and e.kind not in ("default", "derived")]
    if said and old is not REQUIRED and _write.inline(old) != _write.inline(checked):
        raise ConfigError(
            f"set to {_write.brief(old)} by {said[-1]}, but its parent ({parent}) decides it and "
            f"says {_write.brief(checked)}",
            code="AX116",
            where=path_of(node, name),
            hint=f"remove the setting; change it where the parent takes it from ({parent})",
        )
    _store.store(node, name, checked)
    own.events.append((name, Event("derived", source, value=_write.brief(checked))))


def resolve_tree(node: Node, above: tuple[Node, ...]) -> None:
    """Resolves every ``scaled`` in a tree whose source is known, in place."""
    own = state(node)
    for name, value in list(own.values.items()):
        if type(value) in ATOMS or not any(True for _ in _scaled_in(value)):
            continue
        new = _resolved(value, (node, *above), name)
        if new is not value:
            _settle(node, name, value, new, above)
    for _, child in children(node):
        resolve_tree(child, (node, *above))


def _settle(node: Any, name: str, old: Any, new: Any, above: tuple[Node, ...]) -> None:
    field = state(node).fields[name]
    if isinstance(old, Scaled) and field.checker.number == "float":
        new = float(new)
    new = _store.convert(node, field, new)
    _store.store(node, name, new)
    sources = dict.fromkeys(_source(s.of, (node, *above), name) for s in _scaled_in(old))
    event = Event("derived", ", ".join(s for s in sources if s), value=_write.brief(new))
    state(node).events.append((name, event))


def _scaled_in(value: Any) -> Iterator[Scaled]:
    if isinstance(value, Scaled):
        yield value
    elif type(value) not in ATOMS and not isinstance(value, Node):
        for _, part in parts(value):
            yield from _scaled_in(part)


def _resolved(value: Any, chain: tuple[Node, ...], name: str) -> Any:
    if isinstance(value, Scaled):
        found = _compute(value, chain, name, ())
        return value if found is None else found
    if type(value) in ATOMS or isinstance(value, Node):
        return value
    return rebuilt(value, lambda _, part: _resolved(part, chain, name))


def _owner(of: str, chain: tuple[Node, ...], name: str) -> int | None:
    """Returns which of ``chain`` the ``of`` in field ``name`` of the first means."""
    for i, node in enumerate(chain):
        if of in state(node).values and not (i == 0 and of == name):
            return i
    return None


def _source(of: str, chain: tuple[Node, ...], name: str) -> str:
    i = _owner(of, chain, name)
    return "" if i is None else path_of(chain[i], of)


def _compute(
    value: Scaled, chain: tuple[Node, ...], name: str, busy: tuple[tuple[int, str], ...]
) -> int | float | None:
    """Returns the number, or None while its source is not known."""
    where = path_of(chain[0], name)
    here = (id(chain[0]), name)
    if here in busy:
        raise ConfigError(f"{value!r} depends on itself", code="AX112", where=where)
    i = _owner(value.of, chain, name)
    if i is None:
        return None
    source = state(chain[i]).values[value.of]
    if isinstance(source, Scaled):
        source = _compute(source, chain[i:], value.of, (*busy, here))
    if source is REQUIRED or source is None:
        return None
    if type(source) not in (int, float):
        raise ConfigError(
            f"{value!r}: {path_of(chain[i], value.of)} is {source!r}, not a number",
            code="AX112",
            where=where,
        )
    number = state(chain[0]).fields[name].checker.number
    to_int = number == "int" or (number is None and type(source) is int)
    return value(source, to_int=to_int)


def check_complete(node: Node, above: tuple[Node, ...]) -> None:
    """Raises ConfigError if an own field of ``node`` is REQUIRED or an unresolved ``scaled``."""
    own = state(node)
    bound = own.call is not None and own.call.partial
    missing = [n for n, v in own.values.items() if v is REQUIRED and not bound]
    if missing:
        more = f" (and {', '.join(missing[1:])})" if len(missing) > 1 else ""
        raise ConfigError(
            f"{_store.label(node)}.{missing[0]} is required and has no value{more}",
            code="AX103",
            where=path_of(node, missing[0]),
            hint=f"set it: cfg.set({missing[0]}=...), or have the parent pass it",
        )
    for name, value in own.values.items():
        for scaled in _scaled_in(value) if type(value) not in ATOMS else ():
            i = _owner(scaled.of, (node, *above), name)
            if i is None:
                known = [n for each in (node, *above) for n in state(each).values if n != name]
                reason = f"neither this config nor one above it has a field {scaled.of!r}"
                hint = did_you_mean(scaled.of, known) or None
            else:
                reason = f"{path_of((node, *above)[i], scaled.of)} has no value"
                hint = "set that first"
            raise ConfigError(
                f"{scaled!r} cannot be resolved: {reason}",
                code="AX112",
                where=path_of(node, name),
                hint=hint,
            )
