"""The shape of a config tree: nodes, their state, and the immutable containers between them.

Every other module here works on these few functions. A *node* is a Config; between two nodes there
may be tuples, frozen mappings and frozen dataclasses ("records"). Everything else is a leaf.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from axcore.errors import ConfigError

if TYPE_CHECKING:
    from axcore.config._fields import Field
    from axcore.config._provenance import Event

V = TypeVar("V")


class Unset:
    """Type of REQUIRED."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "REQUIRED"

    def __reduce__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = Unset()

#: Leaves that are shared between copies without a look inside.
ATOMS: frozenset[type] = frozenset({bool, int, float, str, type(None), Unset})


def error(code: str, message: str, where: str = "", hint: str | None = None) -> ConfigError:
    """Returns the error of this package; an empty ``where`` or hint is none."""
    return ConfigError(message, code=code, where=where or None, hint=hint or None)


def short_name(cls: Any) -> str:
    """Returns the qualified name of a class, without the function it is defined in."""
    return cls.__qualname__.rsplit("<locals>.", 1)[-1]


@dataclass(slots=True, eq=False)
class State:
    """What a node holds besides its class; reached with ``state(node)``.

    Attributes:
        fields: Field name to Field; of the class, or of the callable for ``config_for``.
        call: The callable and its signature, for ``config_for`` nodes only.
        values: Field name to value, in declaration order.
        events: What was set by whom, oldest first: (path below this node, event).
        parent: The node that holds this one; weak, since the parent owns the child.
        key: Path from the parent to this node, such as ``"layers.0"``.
        frozen: Whether edits are refused.
        prepared: Whether an object may be built from this very config: resolved, complete, frozen.
        reports: What ``replace`` did, oldest first.
    """

    fields: Mapping[str, Field]
    call: Any
    values: dict[str, Any]
    events: list[tuple[str, Event]]
    parent: weakref.ref[Node] | None = None
    key: str = ""
    frozen: bool = False
    prepared: bool = False
    reports: tuple[Any, ...] = ()


class Node:
    """Base of Config; it only carries the state, so that this module needs no other."""

    __slots__ = ("__ax__", "__weakref__")

    if TYPE_CHECKING:
        __ax__: State


def is_config_class(value: Any) -> TypeGuard[type[Node]]:
    """Whether ``value`` is a config class."""
    return isinstance(value, type) and issubclass(value, Node)


def state(node: Node) -> State:
    """Returns the state of a node."""
    return node.__ax__


def set_up(
    node: Node, fields: Mapping[str, Field], values: Mapping[str, Any], call: Any = None
) -> State:
    """Gives a new node its state, with copies of ``values``."""
    own = State(fields, call, {}, [])
    object.__setattr__(node, "__ax__", own)  # past the node's own checks on attribute writes
    for name, value in values.items():
        if type(value) not in ATOMS:
            value = map_nodes(value, lambda _, child: copy_node(child), "")
            adopt(node, name, value)
        own.values[name] = value
    return own


def copy_node(node: Node) -> Node:
    """Returns an unfrozen deep copy, provenance included, without a parent."""
    old = state(node)
    new = object.__new__(type(node))
    own = set_up(new, old.fields, old.values, old.call)
    own.events = list(old.events)
    own.reports = old.reports
    return new


class FrozenMapping(Mapping[str, V]):
    """An immutable mapping that keeps insertion order; how configs store a Mapping."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | None = None):
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return (FrozenMapping, (self._items,))


def is_record(value: object) -> bool:
    """Whether ``value`` is an instance of a dataclass."""
    return hasattr(type(value), "__dataclass_fields__")


@functools.cache
def record_names(cls: type) -> tuple[str, ...]:
    """Returns the names of the fields that the constructor of a dataclass takes."""
    return tuple(f.name for f in dataclasses.fields(cls) if f.init)


def parts(value: object) -> Iterator[tuple[str, Any]]:
    """Yields (path segment, part) of a tuple, mapping or record; nothing for a leaf or a node."""
    kind = type(value)
    if kind in ATOMS:
        return
    if kind is tuple:
        for i, part in enumerate(value):  # pyright: ignore
            yield str(i), part
    elif isinstance(value, FrozenMapping):
        yield from value.items()  # pyright: ignore[reportUnknownMemberType,reportUnknownVariableType]
    elif is_record(value) and not isinstance(value, Node):
        for name in record_names(kind):
            yield name, getattr(value, name)


def rebuilt(value: Any, fn: Callable[[str, Any], Any]) -> Any:
    """Applies ``fn(segment, part)`` to each part; returns ``value`` itself when none changed.

    Records are made again through their constructor, so nothing done inside one is ever lost.
    """
    old = list(parts(value))
    new = [(segment, fn(segment, part)) for segment, part in old]
    if all(a is b for (_, a), (_, b) in zip(old, new, strict=True)):
        return value
    if type(value) is tuple:
        return tuple(part for _, part in new)
    if isinstance(value, FrozenMapping):
        return FrozenMapping[Any](dict(new))
    return type(value)(**dict(new))


def map_nodes(value: Any, fn: Callable[[str, Node], Any], key: str) -> Any:
    """Replaces each node in ``value`` (not nodes inside nodes) by ``fn(key, node)``."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, Node):
        return fn(key, value)
    return rebuilt(value, lambda segment, part: map_nodes(part, fn, f"{key}.{segment}"))


def nodes_in(value: Any, key: str) -> Iterator[tuple[str, Node]]:
    """Yields (key, node) for each node in ``value``, not looking inside nodes."""
    if type(value) in ATOMS:
        return
    if isinstance(value, Node):
        yield key, value
    else:
        for segment, part in parts(value):
            yield from nodes_in(part, f"{key}.{segment}")


def children(node: Node) -> Iterator[tuple[str, Node]]:
    """Yields (key, child node) over all fields of ``node``."""
    for name, value in state(node).values.items():
        yield from nodes_in(value, name)


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yields (path, node) in pre-order, ``node`` itself first."""
    yield path, node
    for key, child in children(node):
        yield from walk(child, join(path, key))


def nodes_below(value: Any) -> Iterator[Node]:
    """Yields every node in ``value``, also inside nodes."""
    for _, top in nodes_in(value, ""):
        for _, node in walk(top):
            yield node


def join(*segments: str) -> str:
    """Joins path segments, leaving out empty ones."""
    return ".".join(s for s in segments if s)


def ancestors(node: Node) -> tuple[Node, ...]:
    """Returns the nodes above ``node``, nearest first."""
    found: list[Node] = []
    parent = state(node).parent
    while parent is not None and (above := parent()) is not None:
        found.append(above)
        parent = state(above).parent
    return tuple(found)


def path_of(node: Node, name: str = "") -> str:
    """Returns the path of ``node`` (or of its field ``name``) below the root."""
    line = (node, *ancestors(node))
    return join(*reversed([name, *(state(each).key for each in line[:-1])]))


def adopt(owner: Node, name: str, value: Any) -> None:
    """Makes ``owner`` the parent of the nodes in its field ``name``."""
    for key, child in nodes_in(value, name):
        state(child).parent = weakref.ref(owner)
        state(child).key = key
