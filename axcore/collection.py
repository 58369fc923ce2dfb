"""What module calls hand back beside their outputs: losses, summaries, state updates, outputs.

Every entry states its *reduction*, and this file holds the one merge that serves repeated calls,
scan iterations, microbatches, pipeline stages and replicas alike.

Layer scans are not reductions: entries of scanned layers are *stacked* under a path component such
as ``0:8:1`` (layers ``range(0, 8, 1)`` along the leading axis); :meth:`OutputCollection.expand`
writes them per layer, so scanned and unrolled stacks report the same names.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from axcore.errors import ModuleError

__all__ = [
    "Entry",
    "OutputCollection",
    "Reduction",
    "apply_state_updates",
    "expand_path",
    "glob_matches",
    "merge",
    "reduce_leading",
    "total_loss",
]

Reduction = Literal["sum", "mean", "weighted_mean", "max", "last"]
KINDS = ("losses", "summaries", "state_updates", "outputs")
_SLICE = re.compile(r"^(\d+):(\d+):(\d+)$")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entry:
    """One collected value.

    Attributes:
        total: The accumulated value: for ``mean`` and ``weighted_mean`` the sum of value x items,
            otherwise the sum, maximum or last value. Any shape; a pytree for ``last`` outputs.
        num_items: Denominator of ``mean`` and ``weighted_mean``; None for the others.
        reduction: How two entries of the same name combine.
        weight: Coefficient of a loss in the total loss; 1.0 elsewhere.
    """

    total: Any
    num_items: Any = None
    reduction: Reduction = dataclasses.field(default="mean", metadata=dict(static=True))
    weight: float = dataclasses.field(default=1.0, metadata=dict(static=True))

    def result(self) -> Any:
        """Returns the reduced value; a mean over zero items is zero."""
        if self.num_items is None:
            return self.total
        items = jnp.asarray(self.num_items, jnp.float32)
        # Of layers that a scan keeps apart there is a number each: the leading dims of the total.
        items = items.reshape(items.shape + (1,) * (jnp.ndim(self.total) - items.ndim))
        safe = jnp.where(items > 0, items, 1.0)
        return jnp.where(items > 0, self.total / safe, 0.0)


def make_entry(value: Any, reduction: Reduction, items: Any, weight: float = 1.0) -> Entry:
    """Returns the entry of one observation; ``items`` counts what a mean was taken over."""
    if reduction in ("mean", "weighted_mean"):
        items = jnp.asarray(1.0 if items is None else items, jnp.float32)
        value = jnp.asarray(value, jnp.float32)
        # A mean over no items may be 0/0 at the caller; what weighs zero must not poison the sum.
        total = jnp.where(items > 0, value * items, 0.0)
        return Entry(total, items, reduction, weight)
    if reduction in ("sum", "max", "last"):
        return Entry(value, None, reduction, weight)
    raise ModuleError(
        f"reduction {reduction!r} is not one of sum, mean, weighted_mean, max, last", code="AX310"
    )


def _combine(name: str, a: Entry, b: Entry) -> Entry:
    if (a.reduction, a.weight) != (b.reduction, b.weight):
        raise ModuleError(
            f"{name!r} was collected as {a.reduction} x {a.weight} and as {b.reduction} x "
            f"{b.weight}: one name has one reduction and one weight",
            code="AX311",
        )
    if a.reduction == "last":
        return b
    if a.reduction == "max":
        return dataclasses.replace(a, total=jax.tree.map(jnp.maximum, a.total, b.total))
    items = None if a.num_items is None else a.num_items + b.num_items
    return dataclasses.replace(a, total=jax.tree.map(jnp.add, a.total, b.total), num_items=items)


def _reduce_entry(entry: Entry, over: Callable[[str, Any], Any]) -> Entry:
    """Applies ``over(how, array)`` with ``how`` in sum, max, last to the arrays of an entry."""
    how = {"mean": "sum", "weighted_mean": "sum"}.get(entry.reduction, entry.reduction)
    items = None if entry.num_items is None else over("sum", entry.num_items)
    return dataclasses.replace(
        entry, total=jax.tree.map(lambda x: over(how, x), entry.total), num_items=items
    )


def _over_leading(how: str, x: jax.Array) -> jax.Array:
    if how == "sum":
        return jnp.sum(x, axis=0, dtype=x.dtype)
    return jnp.max(x, axis=0) if how == "max" else x[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OutputCollection:
    """The four kinds of things a module call hands back, each ``{"path/name": Entry}``.

    A pytree: it crosses ``jax.jit`` and every transform.
    """

    losses: dict[str, Entry] = dataclasses.field(default_factory=dict)
    summaries: dict[str, Entry] = dataclasses.field(default_factory=dict)
    state_updates: dict[str, Entry] = dataclasses.field(default_factory=dict)
    outputs: dict[str, Entry] = dataclasses.field(default_factory=dict)

    def add(self, kind: str, path: str, entry: Entry) -> None:
        """Adds an entry; a name that is taken raises."""
        entries = getattr(self, kind)
        if path in entries:
            raise ModuleError(
                f"{kind} {path!r} was added twice in one call",
                code="AX312",
                hint="give the second value its own name, or combine the two before adding",
            )
        entries[path] = entry

    def update(self, other: OutputCollection) -> None:
        """Takes over the entries of a finished child call; a name that is taken raises.

        State that is reduced is the exception: calls of one child have a path each, but one state,
        whose updates combine.
        """
        for kind in KINDS:
            for path, entry in getattr(other, kind).items():
                taken = self.state_updates.get(path) if kind == "state_updates" else None
                if taken is None or taken.reduction == "last":
                    self.add(kind, path, entry)
                else:
                    self.state_updates[path] = _combine(path, taken, entry)

    def map_entries(self, fn: Callable[[str, Entry], Entry]) -> OutputCollection:
        """Returns a collection with ``fn(path, entry)`` in place of each entry."""
        return OutputCollection(
            *({p: fn(p, e) for p, e in getattr(self, kind).items()} for kind in KINDS)
        )

    def expand(self) -> OutputCollection:
        """Returns the collection with stacked layers written one by one (``layer/0/...``)."""
        new = OutputCollection()
        for kind in KINDS:
            for path, entry in getattr(self, kind).items():
                for layer_path, index in expand_path(path):
                    taken = jax.tree.map(lambda x, i=index: x[i], (entry.total, entry.num_items))
                    new.add(
                        kind,
                        layer_path,
                        dataclasses.replace(entry, total=taken[0], num_items=taken[1]),
                    )
        return new

    def names(self) -> dict[str, tuple[str, ...]]:
        """Returns the collected paths by kind."""
        return {kind: tuple(getattr(self, kind)) for kind in KINDS}


def merge(a: OutputCollection, b: OutputCollection) -> OutputCollection:
    """Combines two collections of the same program part by each entry's reduction."""
    new = OutputCollection()
    for kind in KINDS:
        left, right = getattr(a, kind), getattr(b, kind)
        for path in [*left, *(p for p in right if p not in left)]:
            if path in left and path in right:
                entry = _combine(path, left[path], right[path])
            else:
                entry = left.get(path) or right[path]
            new.add(kind, path, entry)
    return new


def reduce_leading(
    collection: OutputCollection, *, keep: Callable[[str], bool] | None = None
) -> OutputCollection:
    """Reduces the leading axis of every entry (iterations of a scan, a vmap, microbatches).

    Args:
        collection: Entries with a leading axis.
        keep: Paths that stay stacked (the layers of a layer scan), or None.
    """
    return collection.map_entries(
        lambda p, e: e if keep and keep(p) else _reduce_entry(e, _over_leading)
    )


def reduce_replicas(collection: OutputCollection, axes: tuple[str, ...]) -> OutputCollection:
    """Reduces over mesh axes inside ``shard_map``; ``last`` is the value of the last replica."""

    def over(how: str, x: jax.Array) -> jax.Array:
        if how == "sum":
            return jax.lax.psum(x, axes)
        if how == "max":
            return jax.lax.pmax(x, axes)
        is_last = jnp.array(True)
        for axis in axes:
            is_last &= jax.lax.axis_index(axis) == jax.lax.axis_size(axis) - 1
        return jax.lax.psum(jnp.where(is_last, x, jnp.zeros_like(x)), axes)

    return collection.map_entries(lambda _, e: _reduce_entry(e, over))


def neutral(entry: Entry) -> Entry:
    """Returns the entry that changes nothing when merged (shapes in, zeros or lowest out)."""

    def fill(x: Any) -> jax.Array:
        if entry.reduction != "max":
            return jnp.zeros(x.shape, x.dtype)
        low = -jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
        return jnp.full(x.shape, low, x.dtype)

    items = None if entry.num_items is None else jnp.zeros(entry.num_items.shape, jnp.float32)
    return dataclasses.replace(entry, total=jax.tree.map(fill, entry.total), num_items=items)


def total_loss(collection: OutputCollection) -> jax.Array:
    """Returns the float32 scalar ``sum_k weight_k * mean_k`` over all collected losses."""
    loss = jnp.zeros((), jnp.float32)
    for entry in collection.losses.values():
        loss = loss + entry.weight * jnp.sum(entry.result())
    return loss


def expand_path(path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields ``(per-layer path, index into the leading axes)`` of a path with stacked layers.

    Example:
        >>> list(expand_path("layer/0:4:2/w"))
        [('layer/0/w', (0,)), ('layer/2/w', (1,))]
    """
    parts = path.split("/")
    for n, part in enumerate(parts):
        if found := _SLICE.match(part):
            layers = range(*map(int, found.groups()))
            for tail, index in expand_path("/".join(parts[n + 1 :])):
                for i, layer in enumerate(layers):
                    head = "/".join([*parts[:n], str(layer)])
                    yield (f"{head}/{tail}" if tail else head), (i, *index)
            return
    yield path, ()


def glob_matches(pattern: str, path: str) -> bool:
    """Tells whether a glob matches a whole path.

    ``**`` stands for any number of path components (none included); ``*``, ``?`` and ``[...]``
    stay within one.

    Example:
        >>> glob_matches("decoder/layer/[0-3]/**/bias", "decoder/layer/2/up/bias")
        True
    """
    return _match(pattern.split("/"), path.split("/"))


def _match(pattern: Sequence[str], path: Sequence[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return any(_match(pattern[1:], path[n:]) for n in range(len(path) + 1))
    if not path or not fnmatch.fnmatchcase(path[0], pattern[0]):
        return False
    return _match(pattern[1:], path[1:])


def apply_state_updates(state: Mapping[str, Any], collection: OutputCollection) -> dict[str, Any]:
    """Returns ``state`` (nested dicts by child name) with the collection's state updates put in."""
    new = _copy_dicts(state)
    for path, entry in collection.state_updates.items():
        *parents, name = path.split("/")
        node = new
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = entry.result()
    return new


def _copy_dicts(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy_dicts(v) if isinstance(v, Mapping) else v for k, v in tree.items()}
