"""Finding and editing below a config: paths, patterns, ``at``, ``replace``, history."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from axcore.config import _store, _write
from axcore.config._fields import REQUIRED
from axcore.config._provenance import Event, Stamp
from axcore.config._tree import Node, error, is_config_class, parts, path_of, rebuilt, state, walk
from axcore.errors import did_you_mean

C = TypeVar("C", bound=Node)
Predicate = Callable[[str, Any], bool]
Where = str | Predicate | None


def is_match(node: Node, kind: Any) -> bool:
    """Whether ``node`` is of a config class, or calls a given callable."""
    if is_config_class(kind):
        return isinstance(node, kind)
    if is_config_class(getattr(kind, "Config", None)):
        message = f"got the class {kind.__name__}, expected a config class"
        raise error("AX101", message, hint=f"write {kind.__name__}.Config")
    if not callable(kind):
        raise error("AX101", f"got {kind!r}, expected a config class or a callable")
    call = state(node).call
    return call is not None and call.fn is kind


# Paths ------------------------------------------------------------------------------------------


def place(root: Node, path: str) -> tuple[Node, str, Any]:
    """Follows a path below ``root``.

    Returns:
        The config that holds what is there, the path below that config, and the value. A field
        that a callable leaves unset, or accepts by ``**kwargs``, is a place too: its value is
        REQUIRED.

    Raises:
        ConfigError: There is nothing at that path.
    """
    if not path:
        raise error("AX108", "the root itself cannot be set", hint="give a path")
    owner, rest, value = root, "", root
    for segment in path.split("."):
        if isinstance(value, Node):
            owner, rest = value, segment
            if _store.field_of(owner, segment) is None:
                raise _store.unknown(owner, segment)
            value = state(owner).values.get(segment, REQUIRED)
            continue
        inner = dict(parts(value))
        if segment not in inner:
            known = f"it has: {', '.join(inner)}" if inner else "it has no parts"
            raise error(
                "AX108",
                f"there is nothing at {segment!r} in {_write.brief(value)}",
                path_of(owner, rest),
                did_you_mean(segment, inner) or known,
            )
        rest, value = f"{rest}.{segment}", inner[segment]
    return owner, rest, value


def get_path(root: Node, path: str) -> Any:
    """See :meth:`Config.get_path`."""
    if not path:
        return root
    owner, rest, value = place(root, path)
    if rest not in state(owner).values and "." not in rest:
        raise _store.unknown(owner, rest)
    return value


def set_path(root: Node, path: str, value: Any) -> None:
    """See :meth:`Config.set_path`."""
    owner, rest, _ = place(root, path)
    name, *inner = rest.split(".")
    whole = _put(state(owner).values[name], inner, value) if inner else value
    _store.assign(owner, name, _store.check(owner, name, whole), Stamp(), rest)


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
    owner, rest, value = place(root, path)
    field = _store.field_of(owner, rest.split(".")[0])
    assert field is not None
    default = value if "." in rest else field.default
    events = [Event("default", field.owner, value=_write.brief(default))]
    mine = [e for key, e in state(owner).events if f"{rest}.".startswith(f"{key}.")]
    return (*events, *mine)


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
            message = f"the pattern {pattern!r} matches no config"
            hint = did_you_mean(pattern, known) or _some(known)
            raise error("AX108", message, path_of(root), hint)

    def set(self, /, **values: Any) -> C:
        """Sets fields of every selected config, or (on an error) of none; returns the root."""
        _store.set_all(self.nodes.values(), values)
        return self._root


def _some(known: list[str]) -> str:
    if not known:
        return "there are no configs below"
    return f"paths are: {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"


def selector(where: Where) -> Predicate:
    """Returns the predicate that a ``where`` argument means."""
    if where is None:
        return lambda path, node: True
    if isinstance(where, str):
        return lambda path, node: matches(where, path)
    return where
