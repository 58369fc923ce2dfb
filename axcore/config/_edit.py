"""Finding and editing below a config: paths, patterns, ``at``, ``replace``, history."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from axcore.config import _store, _write
from axcore.config._provenance import Event, Stamp
from axcore.config._tree import Node, parts, path_of, rebuilt, state, walk
from axcore.errors import ConfigError, did_you_mean

C = TypeVar("C", bound=Node)


def is_config_class(value: Any) -> bool:
    """Whether ``value`` is a config class."""
    return isinstance(value, type) and issubclass(value, Node)


def is_match(node: Node, kind: Any) -> bool:
    """Whether ``node`` is of a config class, or calls a given callable."""
    if is_config_class(kind):
        return isinstance(node, kind)
    if is_config_class(getattr(kind, "Config", None)):
        raise ConfigError(
            f"got the class {kind.__name__}, expected a config class",
            code="AX101",
            hint=f"write {kind.__name__}.Config",
        )
    if not callable(kind):
        raise ConfigError(f"got {kind!r}, expected a config class or a callable", code="AX101")
    call = state(node).call
    return call is not None and call.fn is kind


# Paths ------------------------------------------------------------------------------------------


def locate(root: Node, path: str) -> tuple[Node, str]:
    """Returns the deepest config on a path and the rest of the path below it, '' for itself.

    Raises:
        ConfigError: There is nothing at that path.
    """
    node, rest = root, path
    while rest:
        child, below = _step(node, rest)
        if child is None:
            return node, rest
        node, rest = child, below
    return node, ""


def _step(node: Node, rest: str) -> tuple[Node | None, str]:
    """Follows ``rest`` from a config to the next one and what remains; (None, rest) at a leaf."""
    first, *segments = rest.split(".")
    values = state(node).values
    if first not in values:
        raise _store.unknown(node, first)
    value, at = values[first], first
    for i, segment in enumerate(segments):
        if isinstance(value, Node):
            return value, ".".join(segments[i:])
        inner = dict(parts(value))
        if segment not in inner:
            raise ConfigError(
                f"there is nothing at {segment!r} in {_write.brief(value)}",
                code="AX108",
                where=path_of(node, at),
                hint=did_you_mean(segment, inner)
                or (f"it has: {', '.join(inner)}" if inner else "it has no parts"),
            )
        value, at = inner[segment], f"{at}.{segment}"
    return (value, "") if isinstance(value, Node) else (None, rest)


def get_path(root: Node, path: str) -> Any:
    """See :meth:`Config.get_path`."""
    node, rest = locate(root, path)
    if not rest:
        return node
    segments = rest.split(".")
    value: Any = state(node).values[segments[0]]
    for segment in segments[1:]:
        value = dict(parts(value))[segment]
    return value


def set_path(root: Node, path: str, value: Any) -> None:
    """See :meth:`Config.set_path`."""
    node, rest = place(root, path)
    name, *inner = rest.split(".")
    whole = _put(state(node).values[name], inner, value) if inner else value
    checked = _store.check(node, name, whole)
    _store.assign(node, name, checked, Stamp(), rest if inner else None)


def place(root: Node, path: str) -> tuple[Node, str]:
    """Returns the config that holds what is at ``path``, and the path below that config.

    A field that a callable leaves unset, or accepts by ``**kwargs``, is a place too.
    """
    if not path:
        raise ConfigError("the root itself cannot be set", code="AX108", hint="give a path")
    above, _, last = path.rpartition(".")
    try:
        node, rest = locate(root, path)
    except ConfigError:
        node, rest = locate(root, above)
        if rest or (last not in state(node).fields and not _takes(node, last)):
            raise
        return node, last
    if rest:
        return node, rest
    own = state(node)
    holder = own.parent() if own.parent is not None else None
    assert holder is not None
    return holder, own.key


def _takes(node: Node, name: str) -> bool:
    call = state(node).call
    return call is not None and call.extra_field(name) is not None


def _put(value: Any, segments: list[str], new: Any) -> Any:
    """Returns ``value``, rebuilt with ``new`` at a path inside it."""
    if not segments:
        return new
    first, *rest = segments
    return rebuilt(value, lambda key, part: _put(part, rest, new) if key == first else part)


def history(root: Node, path: str) -> tuple[Event, ...]:
    """See :meth:`Config.history`."""
    if not path:
        return (Event("default", _store.label(root), value=_write.brief(root)),)
    node, rest = place(root, path)
    own = state(node)
    name = rest.split(".")[0]
    field = own.fields[name]
    default = _write.brief(field.default)
    if "." in rest:
        default = _write.brief(get_path(node, rest))
    events = [Event("default", field.owner, value=default)]
    for key, event in own.events:
        if rest == key or rest.startswith(key + "."):
            events.append(event)
    return tuple(events)


# Patterns ---------------------------------------------------------------------------------------


def matches(pattern: str, path: str) -> bool:
    """Whether a dotted path matches: ``*`` one segment (a glob within it), ``**`` any number."""
    return _matches(pattern.split("."), path.split(".") if path else [])


def _matches(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_matches(pattern[1:], path[i:]) for i in range(len(path) + 1))
    if not path or not fnmatch.fnmatchcase(path[0], pattern[0]):
        return False
    return _matches(pattern[1:], path[1:])


class Selection(Generic[C]):
    """The configs that a pattern matched; made by ``cfg.at(pattern)``.

    Attributes:
        nodes: Path -> config.
    """

    def __init__(self, root: C, pattern: str):
        self._root = root
        found = [(path, node) for path, node in walk(root) if path]
        self.nodes = {path: node for path, node in found if matches(pattern, path)}
        if not self.nodes:
            known = [path for path, _ in found]
            raise ConfigError(
                f"the pattern {pattern!r} matches no config",
                code="AX108",
                where=path_of(root) or None,
                hint=did_you_mean(pattern, known) or _some(known),
            )

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())

    def __len__(self) -> int:
        return len(self.nodes)

    def set(self, /, **values: Any) -> C:
        """Sets fields of every selected config, or (on an error) of none; returns the root."""
        stamp = Stamp()
        checked = [
            (node, name, _store.check(node, name, value))
            for node in self.nodes.values()
            for name, value in values.items()
        ]
        for node, name, value in checked:
            _store.assign(node, name, value, stamp)
        return self._root


def _some(known: list[str]) -> str:
    if not known:
        return "there are no configs below"
    return f"paths are: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"


def selector(where: str | Callable[[str, Any], bool] | None) -> Callable[[str, Any], bool]:
    """Returns the predicate that a ``where`` argument means."""
    if where is None:
        return lambda path, node: True
    if isinstance(where, str):
        return lambda path, node: matches(where, path)
    return where
