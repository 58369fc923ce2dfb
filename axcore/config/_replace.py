"""``cfg.replace(Old, new)``: put another config in place of some, and lose no edit silently."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from axcore.config import _edit, _store, _write
from axcore.config._fields import REQUIRED
from axcore.config._provenance import Event, Stamp
from axcore.config._tree import (
    Node,
    children,
    copy_node,
    join,
    map_nodes,
    nodes_in,
    path_of,
    short_name,
    state,
)
from axcore.errors import ConfigError

_log = logging.getLogger("axcore.config")


class ConfigWarning(UserWarning):
    """Something in a config that is legal and probably not meant."""


@dataclass(frozen=True)
class LostEdit:
    """An edit that a replacement could not keep.

    Attributes:
        path: Where the value was.
        value: The value as text.
        event: Who had set it.
        reason: Why it could not be kept.
    """

    path: str
    value: str
    event: Event | None
    reason: str


@dataclass(frozen=True)
class Replacement:
    """What one replacement did.

    Attributes:
        path: Path of the replaced config.
        old: What was there, in text form.
        new: What is there now.
        moved: Fields whose value was taken over from the replaced config.
        defaulted: Fields that have the new config's default.
        overridden: Fields that the replaced config had set and the new one sets otherwise.
        lost: Edits that were lost.
    """

    path: str
    old: str
    new: str
    moved: tuple[str, ...] = ()
    defaulted: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    lost: tuple[LostEdit, ...] = ()


@dataclass
class _Tally:
    moved: list[str] = field(default_factory=list[str])
    defaulted: list[str] = field(default_factory=list[str])
    overridden: list[str] = field(default_factory=list[str])
    lost: list[LostEdit] = field(default_factory=list[LostEdit])


def replace(
    root: Any,
    old: Any,
    new: Any,
    where: str | Callable[[str, Any], bool] | None,
    allow_none: bool,
) -> None:
    """See :meth:`Config.replace`."""
    if not isinstance(new, Node):
        config = getattr(new, "Config", None)
        hint = f"write {new.__name__}.Config(...)" if isinstance(config, type) else None
        raise ConfigError(f"got {new!r}, expected a config to put there", code="AX101", hint=hint)
    wanted = _edit.selector(where)
    found = list(_found(root, "", old, wanted))
    if not found:
        if allow_none:
            return
        _nothing_matched(root, old, where)
    stamp = Stamp()
    reports: list[Replacement] = []
    placed: dict[int, Node] = {}
    fields: dict[tuple[int, str], tuple[Node, str, list[str]]] = {}
    for path, owner, key, node in found:
        placed[id(node)], report = _merged(node, new, path, stamp)
        reports.append(report)
        name = key.split(".")[0]
        fields.setdefault((id(owner), name), (owner, name, []))[2].append(key)
    checked: list[tuple[Node, str, list[str], Any]] = []
    for owner, name, keys in fields.values():
        value = map_nodes(state(owner).values[name], lambda _, n: placed.get(id(n), n), name)
        checked.append((owner, name, keys, _store.check(owner, name, value)))
    for owner, name, keys, value in checked:
        _store.store(owner, name, value)
        for key in keys:
            state(owner).events.append((key, stamp.event(_write.brief(new))))
    state(root).reports = (*state(root).reports, *reports)
    for report in reports:
        _tell(report)


def _found(
    node: Node, path: str, old: Any, wanted: Callable[[str, Any], bool]
) -> Iterator[tuple[str, Node, str, Node]]:
    """Yields (path, owner, key, node) of the matches below ``node``, not looking inside one."""
    for key, child in children(node):
        below = join(path, key)
        if _edit.is_match(child, old) and wanted(below, child):
            yield below, node, key, child
        else:
            yield from _found(child, below, old, wanted)


def _nothing_matched(root: Node, old: Any, where: Any) -> None:
    name = short_name(old) if hasattr(old, "__qualname__") else repr(old)
    elsewhere = [path for path, *_ in _found(root, "", old, lambda path, node: True)]
    if elsewhere:
        hint = f"`where` excludes those at: {', '.join(elsewhere[:5])}"
    elif _edit.is_match(root, old):
        hint = "only the root itself is one, and the root is never replaced"
    else:
        hint = "allow_none=True if that is fine"
    raise ConfigError(
        f"replace matched nothing: there is no {name} here"
        + (f" at {where!r}" if isinstance(where, str) else ""),
        code="AX109",
        where=path_of(root) or None,
        hint=hint,
    )


def _tell(report: Replacement) -> None:
    _log.info(
        "%s: %s replaced by %s; moved: %s; defaults: %s; overridden: %s",
        report.path,
        report.old,
        report.new,
        ", ".join(report.moved) or "none",
        ", ".join(report.defaulted) or "none",
        ", ".join(report.overridden) or "none",
    )
    edits = [e for e in report.lost if e.event is None or e.event.kind != "default"]
    if edits:
        text = "; ".join(f"{e.path} = {e.value} (set by {e.event}): {e.reason}" for e in edits)
        warnings.warn(
            f"replacing {report.old} at {report.path} by {report.new} loses: {text}",
            ConfigWarning,
            stacklevel=4,
        )


def _merged(old: Node, new: Node, path: str, stamp: Stamp) -> tuple[Node, Replacement]:
    """Returns a copy of ``new`` with what ``old`` hands on, and the report."""
    placed = copy_node(new)
    state(placed).reports = ()
    state(placed).parent, state(placed).key = state(old).parent, state(old).key
    if stamp.scoped:
        _store.claim(placed, stamp)
    tally = _Tally()
    _merge(old, placed, new, pristine(old), pristine(new), path, "", tally)
    state(placed).parent = None
    report = Replacement(
        path,
        _write.brief(old),
        _write.brief(new),
        tuple(tally.moved),
        tuple(tally.defaulted),
        tuple(tally.overridden),
        tuple(tally.lost),
    )
    return placed, report


def pristine(node: Node) -> Node | None:
    """Returns a config of the same class or callable in which nothing is set."""
    call = state(node).call
    if call is None:
        return type(node)()
    bare: Any = copy_node(node)
    state(bare).values = dict(call.values)
    state(bare).events = []
    return bare


def _events(node: Node | None, name: str) -> list[tuple[str, Event]]:
    """Returns the events of a field and of what is inside it, but not inside nodes."""
    if node is None:
        return []
    return [(k, e) for k, e in state(node).events if k == name or k.startswith(name + ".")]


def _is_set(node: Node, bare: Node | None, name: str) -> bool:
    """Whether a field was set otherwise than by the defaults of the config's own class."""
    events = _events(node, name)
    return bool(events) and events != _events(bare, name)


def _child(bare: Node | None, name: str, like: Node) -> Node | None:
    """Returns the pristine counterpart of a nested config, if it is of the same class."""
    value = state(bare).values.get(name) if bare is not None else None
    return value if isinstance(value, Node) and type(value) is type(like) else None


def _edits_below(node: Node, bare: Node | None, path: str) -> Iterator[tuple[str, Any, Event]]:
    """Yields (path, value, event) of what was set in a config and below it."""
    for name, value in state(node).values.items():
        if _is_set(node, bare, name):
            yield join(path, name), value, _events(node, name)[-1][1]
        for key, child in nodes_in(value, name):
            yield from _edits_below(child, _child(bare, key, child), join(path, key))


def _merge(
    old: Node,
    placed: Node,
    new: Node,
    bare_old: Node | None,
    bare_new: Node | None,
    path: str,
    prefix: str,
    tally: _Tally,
) -> None:
    """Moves into ``placed`` (a copy of ``new``) the values that ``old`` hands on."""
    theirs, ours = state(old), state(placed)

    def lose(name: str, reason: str) -> None:
        value = theirs.values[name]
        if _is_set(old, bare_old, name):
            event = _events(old, name)[-1][1]
            tally.lost.append(LostEdit(join(path, name), _write.brief(value), event, reason))
        for key, child in nodes_in(value, name):
            for at, inner, event in _edits_below(child, _child(bare_old, key, child), key):
                tally.lost.append(LostEdit(join(path, at), _write.brief(inner), event, reason))

    for name, mine in list(ours.values.items()):
        at = join(prefix, name)
        here = name in theirs.values
        value = theirs.values.get(name)
        if _is_set(new, bare_new, name):
            if here and _write.inline(value) != _write.inline(mine):
                if _is_set(old, bare_old, name):
                    tally.overridden.append(at)
            continue
        if not here:
            if mine is not REQUIRED:
                tally.defaulted.append(at)
            continue
        inner_edits = any(
            True
            for key, child in nodes_in(value, name)
            for _ in _edits_below(child, _child(bare_old, key, child), key)
        )
        if not _is_set(old, bare_old, name) and isinstance(value, Node) and isinstance(mine, Node):
            source = state(new).values[name]
            bares = _child(bare_old, name, value), _child(bare_new, name, source)
            _merge(value, mine, source, *bares, join(path, name), at, tally)
        elif _is_set(old, bare_old, name) or inner_edits:
            try:
                kept = _store.convert(placed, ours.fields[name], value)
            except ConfigError as e:
                lose(name, e.message)
                tally.defaulted.append(at)
                continue
            _store.store(placed, name, kept)
            ours.events.extend(_events(old, name))
            tally.moved.append(at)
        elif mine is not REQUIRED:
            tally.defaulted.append(at)
    for name in theirs.values:
        if name not in ours.values:
            lose(name, f"{_store.label(placed)} has no field {name!r}")
