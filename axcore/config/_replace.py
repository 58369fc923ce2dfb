"""``cfg.replace(Old, new)``: put another config in place of some, and lose no edit silently."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from axcore.config import _edit, _store, _write
from axcore.config._fields import REQUIRED
from axcore.config._provenance import Event, Stamp
from axcore.config._tree import (
    Node,
    children,
    copy_node,
    error,
    join,
    map_nodes,
    path_of,
    short_name,
    state,
    walk,
)
from axcore.errors import ConfigError

#: The events of a tree by path of the field that they are about.
_Events = dict[str, list[tuple[str, Event]]]

_log = logging.getLogger("axcore.config")
_LISTED = 4


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


def replace(root: Any, old: Any, new: Any, where: _edit.Where, allow_none: bool) -> None:
    """See :meth:`Config.replace`."""
    if not isinstance(new, Node):
        hint = f"write {new.__name__}.Config(...)" if hasattr(new, "Config") else None
        raise error("AX101", f"got {new!r}, expected a config to put there", hint=hint)
    found = list(_found(root, "", old, _edit.selector(where)))
    if not found and not allow_none:
        raise _nothing_matched(root, old, where)
    stamp = Stamp()
    placed: dict[int, Node] = {}
    reports: list[Replacement] = []
    for path, _, _, node in found:
        placed[id(node)], report = _merged(node, new, path, stamp)
        reports.append(report)
    checked: list[tuple[Node, str, Any]] = []
    for owner in {id(owner): owner for _, owner, _, _ in found}.values():
        for name, value in state(owner).values.items():
            swapped = map_nodes(value, lambda _, node: placed.get(id(node), node), name)
            if swapped is not value:
                checked.append((owner, name, _store.check(owner, name, swapped)))
    for owner, name, value in checked:
        _store.store(owner, name, value)
    for _, owner, key, _ in found:
        state(owner).events.append((key, stamp.event(_write.brief(new))))
    state(root).reports = (*state(root).reports, *reports)
    for report in reports:
        _tell(report)


def _found(
    node: Node, path: str, old: Any, wanted: _edit.Predicate
) -> Iterator[tuple[str, Node, str, Node]]:
    """Yields (path, owner, key, node) of the matches below ``node``, not looking inside one."""
    for key, child in children(node):
        below = join(path, key)
        if _edit.is_match(child, old) and wanted(below, child):
            yield below, node, key, child
        else:
            yield from _found(child, below, old, wanted)


def _nothing_matched(root: Node, old: Any, where: Any) -> ConfigError:
    name = short_name(old) if hasattr(old, "__qualname__") else repr(old)
    elsewhere = [path for path, *_ in _found(root, "", old, lambda path, node: True)]
    if elsewhere:
        hint = f"`where` excludes those at: {', '.join(elsewhere[:5])}"
    elif _edit.is_match(root, old):
        hint = "only the root itself is one, and the root is never replaced"
    else:
        hint = "allow_none=True if that is fine"
    at = f" at {where!r}" if isinstance(where, str) else ""
    message = f"replace matched nothing: there is no {name} here{at}"
    return error("AX109", message, path_of(root), hint)


def _tell(report: Replacement) -> None:
    limits = {"moved": _LISTED, "defaulted": _LISTED, "overridden": None}
    told = "; ".join(f"{kind}: {_first(getattr(report, kind), n)}" for kind, n in limits.items())
    _log.info("%s: %s replaced by %s; %s", report.path, report.old, report.new, told)
    edits = [e for e in report.lost if e.event is None or e.event.kind != "default"]
    if edits:
        text = "; ".join(f"{e.path} = {e.value} (set by {e.event}): {e.reason}" for e in edits)
        message = f"replacing {report.old} at {report.path} by {report.new} loses: {text}"
        warnings.warn(message, ConfigWarning, stacklevel=4)


def _first(names: tuple[str, ...], limit: int | None) -> str:
    shown = ", ".join(names[:limit]) or "none"
    more = len(names[limit:]) if limit else 0
    return f"{shown} and {more} more (`axcore config explain` lists them)" if more else shown


def _merged(old: Node, new: Node, path: str, stamp: Stamp) -> tuple[Node, Replacement]:
    """Returns a copy of ``new`` with what ``old`` hands on, and the report."""
    placed = copy_node(new)
    own = state(placed)
    own.reports = ()
    own.parent, own.key = state(old).parent, state(old).key  # for the paths in errors
    if stamp.scoped:
        _store.claim(placed, stamp)
    moved: list[str] = []
    overridden: list[str] = []
    lost: list[LostEdit] = []
    kept = _edits(new)
    for at, events in _edits(old).items():
        value = _edit.get_path(old, at)
        if _is_within(at, kept):
            if _write.inline(value) != _write.inline(_edit.get_path(new, at)):
                overridden.append(at)
        elif not _is_within(at, moved):
            try:
                _hand_on(placed, at, value, events)
                moved.append(at)
            except ConfigError as e:
                brief = _write.brief(value)
                lost.append(LostEdit(join(path, at), brief, events[-1][1], e.message))
    defaulted = [
        join(below, name)
        for below, node in walk(placed)
        for name, value in state(node).values.items()
        if value is not REQUIRED and not isinstance(value, Node)
        if not _is_within(join(below, name), [*kept, *moved])
    ]
    heads = _write.brief(old), _write.brief(new)
    changes = tuple(moved), tuple(defaulted), tuple(overridden), tuple(lost)
    return placed, Replacement(path, *heads, *changes)


def _hand_on(placed: Node, at: str, value: Any, events: list[tuple[str, Event]]) -> None:
    """Gives ``placed`` a value of the replaced config. Raises ConfigError if it does not fit."""
    owner, name, _ = _edit.place(placed, at)
    if name not in state(owner).values:
        raise _store.unknown(owner, name)
    _store.store(owner, name, _store.check(owner, name, value))
    state(owner).events.extend(events)


def _is_within(path: str, fields: Iterable[str]) -> bool:
    return any(f"{path}.".startswith(f"{field}.") for field in fields)


def _edits(node: Node) -> _Events:
    """Returns the events of what is set otherwise than by the defaults of the config's class."""
    call = state(node).call
    bare = type(node)() if call is None else call.bare(type(node))
    usual = _events(bare)
    return {path: found for path, found in _events(node).items() if found != usual.get(path)}


def _events(root: Node) -> _Events:
    found: _Events = {}
    for path, node in walk(root):
        for key, event in state(node).events:
            found.setdefault(join(path, key.split(".")[0]), []).append((key, event))
    return found
