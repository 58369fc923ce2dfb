"""From a config to what an object is built from: overrides, completeness, ``scaled`` values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axcore.config import _store, _write
from axcore.config._provenance import Event
from axcore.config._tree import (
    ATOMS,
    Node,
    ancestors,
    children,
    copy_node,
    error,
    path_of,
    rebuilt,
    state,
)
from axcore.config._types import REQUIRED, Scaled
from axcore.errors import did_you_mean


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
            f"its parent ({parent}) sets {name!r}, which is not a field of {_store.label(node)}",
            path_of(node, name),
            did_you_mean(name, own.fields)
            or f"add `{name}: Required[...] = REQUIRED`, or derive from the role's config",
        )
    new = _store.convert(node, own.fields[name], value)
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
    _store.store(node, name, value)
    state(node).events.append((name, Event("derived", source, value=_write.brief(value))))


def _check_complete(node: Node) -> None:
    own = state(node)
    missing = [name for name, value in own.values.items() if value is REQUIRED]
    if missing and not (own.call is not None and own.call.partial):
        more = f" (and {', '.join(missing[1:])})" if len(missing) > 1 else ""
        raise error(
            "AX103",
            f"{_store.label(node)}.{missing[0]} is required and has no value{more}",
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
            new = _store.convert(node, state(node).fields[name], new)
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
