"""Layer stacks in two forms, and the way from one to the other.

A stack's subtrees stand either per layer (children ``0``, ``1``, ...) or stacked under keys
``start:stop:step``, whose arrays have one leading axis over ``range(start, stop, step)``:

    decoder/layer/0/weight (4, 4)   decoder/layer/1/weight (4, 4)      unrolled
    decoder/layer/0:2:1/weight (2, 4, 4)                               stacked

The *canonical* paths are the unrolled ones. Everything here works on flat mappings
``{"decoder/layer/0/weight": leaf}``, so it holds for optimizer state too, where the parameter tree
stands inside optax's named tuples. Values are moved, never computed with: they stay bitwise equal.

A leaf below a stacked key may also lack the leading axis (the ``(1,)`` placeholders of a factored
optimizer): then all layers share it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
    "Plan",
    "Recipe",
    "Source",
    "assemble",
    "canonical",
    "flatten",
    "leaf_path",
    "plan",
    "restack",
]

_STACK_KEY = re.compile(r"(\d+):(\d+):([1-9]\d*)")


class ShapeLike(Protocol):
    """Anything with a shape and a dtype: numpy and JAX arrays, ``jax.ShapeDtypeStruct``."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Source:
    """One stored leaf, or one layer of it.

    Attributes:
        path: Path of the stored leaf.
        index: Position on the leading (layer) axes; None for the whole leaf.
    """

    path: str
    index: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How one target leaf is made.

    Attributes:
        sources: The parts, in the order of the layers.
        stacked: Lengths of the leading axes that the parts fill; empty when there is one part.
        shared: Whether all parts must be equal, since the target holds one value for all layers.
    """

    sources: tuple[Source, ...]
    stacked: tuple[int, ...] = ()
    shared: bool = False

    @property
    def direct(self) -> bool:
        """Whether the target is one stored leaf as it stands."""
        return len(self.sources) == 1 and not self.stacked and self.sources[0].index is None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How to make every leaf of a target from the leaves of a store.

    Attributes:
        recipes: Target path -> recipe, for the leaves that can be made.
        missing: Target path -> first canonical path that the store lacks.
        reshaped: Target path -> (stored shape, expected shape), both as that leaf stands.
        unexpected: Stored paths that no target leaf uses (wholly or in part).
    """

    recipes: Mapping[str, Recipe]
    missing: Mapping[str, str]
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    unexpected: tuple[str, ...]


def leaf_path(keys: Sequence[Any]) -> str:
    """Returns ``"a/0/b"`` for the key path of a leaf, as ``jax.tree_util`` gives it."""
    return "/".join(_segment(key) for key in keys)


def flatten(tree: Any) -> dict[str, Any]:
    """Returns ``{path: leaf}`` of any pytree, in the tree's own order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {leaf_path(keys): leaf for keys, leaf in leaves}


def canonical(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the per-layer form of flat leaves.

    Args:
        leaves: Arrays or ``jax.ShapeDtypeStruct`` by path, in any form.

    Returns:
        The same values by canonical path, stacked leaves split into their layers.
    """
    out: dict[str, Any] = {}
    for path, leaf in leaves.items():
        ranges = _ranges(path)
        stacked = bool(ranges) and _has_layer_axes(leaf.shape, ranges)
        for name, index in _expand(path, ranges):
            out[name] = _take(leaf, index) if stacked else leaf
    return out


def plan(stored: Mapping[str, ShapeLike], target: Mapping[str, ShapeLike]) -> Plan:
    """Finds for every target leaf the stored leaves, or layers of them, that make it.

    Args:
        stored: Leaves of the store by path (shapes are enough).
        target: Leaves wanted by path (shapes are enough).

    Returns:
        The plan; it is complete when nothing is missing or reshaped. Dtypes are not compared.
    """
    where: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in stored:
        for name, index in _expand(path, _ranges(path)):
            where[name] = (path, index)

    recipes: dict[str, Recipe] = {}
    missing: dict[str, str] = {}
    reshaped: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    used: set[str] = set()
    for path, leaf in target.items():
        ranges = _ranges(path)
        names = [name for name, _ in _expand(path, ranges)]
        used.update(names)
        absent = next((name for name in names if name not in where), None)
        if path not in stored and absent is not None:
            missing[path] = absent
            continue
        if path in stored and tuple(stored[path].shape) == tuple(leaf.shape):
            recipes[path] = Recipe((Source(path, None),))
            continue
        recipe = _recipe(path, leaf, [where[name] for name in names], stored)
        if recipe is None:
            first = path if path in stored else where[names[0]][0]
            reshaped[path] = (tuple(stored[first].shape), tuple(leaf.shape))
        else:
            recipes[path] = recipe
    unexpected = [
        path
        for path in stored
        if path not in target and any(n not in used for n, _ in _expand(path, _ranges(path)))
    ]
    return Plan(recipes, missing, reshaped, tuple(unexpected))


def assemble(recipe: Recipe, leaves: Mapping[str, Any], *, sharding: Any = None) -> Any:
    """Makes one target leaf.

    Args:
        recipe: What to take.
        leaves: Stored leaves by path: numpy arrays, JAX arrays or ``jax.ShapeDtypeStruct``.
        sharding: Sharding of the result, for JAX arrays; None leaves it to JAX.

    Returns:
        The leaf, of the same kind as its sources.

    Raises:
        ValueError: A shared leaf whose layers differ.
    """
    first = leaves[recipe.sources[0].path]
    if recipe.direct:
        return first
    indices = [source.index for source in recipe.sources]
    arrays = [leaves[source.path] for source in recipe.sources]
    if isinstance(first, jax.ShapeDtypeStruct):
        shape = _take(first, indices[0]).shape
        return jax.ShapeDtypeStruct((*recipe.stacked, *shape), first.dtype, sharding=sharding)
    if recipe.shared:
        parts = [_take(array, index) for array, index in zip(arrays, indices, strict=True)]
        if not all(_same_bits(parts[0], part) for part in parts[1:]):
            names = ", ".join(dict.fromkeys(source.path for source in recipe.sources))
            raise ValueError(f"layers differ where one value for all is expected: {names}")
        return parts[0] if sharding is None else jax.device_put(parts[0], sharding)
    if isinstance(first, np.ndarray):
        return _gather(np, arrays, indices, recipe.stacked)
    build = _jitted_gather(recipe.stacked, sharding)
    return build(arrays, [None if i is None else np.asarray(i, np.int32) for i in indices])


def restack(tree: Any, target: Any) -> Any:
    """Returns ``tree``'s values in the structure, and so the stack form, of ``target``.

    Args:
        tree: A state tree of numpy arrays, JAX arrays or ``jax.ShapeDtypeStruct``.
        target: A tree of the wanted structure; only shapes are looked at.

    Returns:
        A tree like ``target``.

    Raises:
        ValueError: The trees do not hold the same tensors.
    """
    leaves, wanted = flatten(tree), flatten(target)
    found = plan(leaves, wanted)
    if found.missing or found.reshaped or found.unexpected:
        raise ValueError(
            f"the trees hold different tensors: missing {sorted(found.missing)}, "
            f"of another shape {sorted(found.reshaped)}, unexpected {sorted(found.unexpected)}"
        )
    made = [assemble(found.recipes[path], leaves) for path in wanted]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(target), made)


def _segment(key: Any) -> str:
    tree_util = jax.tree_util
    if isinstance(key, tree_util.GetAttrKey):
        text = key.name
    elif isinstance(key, tree_util.SequenceKey):
        text = str(key.idx)
    elif isinstance(key, tree_util.DictKey | tree_util.FlattenedIndexKey):
        text = str(key.key)
    else:
        text = str(key)
    return text.replace("%", "%25").replace("/", "%2F")


def _layers(segment: str) -> range | None:
    """The layers that a path segment stands for, when it is the key of a (non-empty) stack."""
    match = _STACK_KEY.fullmatch(segment)
    return (range(*map(int, match.groups())) or None) if match else None


def _ranges(path: str) -> list[range]:
    """The layers of each stacked segment of a path, outermost first."""
    if ":" not in path:
        return []
    found = (_layers(segment) for segment in path.split("/"))
    return [layers for layers in found if layers is not None]


def _expand(path: str, ranges: list[range]) -> list[tuple[str, tuple[int, ...]]]:
    """Pairs (canonical path, position on the layer axes) of a path, in the order of the layers."""
    if not ranges:
        return [(path, ())]
    segments = path.split("/")
    places = [i for i, segment in enumerate(segments) if _layers(segment) is not None]
    out: list[tuple[str, tuple[int, ...]]] = []
    for index in itertools.product(*(range(len(r)) for r in ranges)):
        for place, layers, position in zip(places, ranges, index, strict=True):
            segments[place] = str(layers[position])
        out.append(("/".join(segments), index))
    return out


def _has_layer_axes(shape: Sequence[int], ranges: list[range]) -> bool:
    return tuple(shape[: len(ranges)]) == tuple(len(r) for r in ranges)


def _recipe(
    path: str,
    leaf: ShapeLike,
    parts: list[tuple[str, tuple[int, ...]]],
    stored: Mapping[str, ShapeLike],
) -> Recipe | None:
    """The recipe of a leaf from (stored path, index) per layer, or None when no shape fits."""
    ranges = _ranges(path)
    lengths = tuple(len(r) for r in ranges)
    shape = tuple(leaf.shape)
    wanted: list[tuple[tuple[int, ...], bool]] = []  # (shape of one layer, whether shared)
    if not ranges or _has_layer_axes(shape, ranges):
        wanted.append((shape[len(ranges) :], False))
    if ranges:
        wanted.append((shape, True))
    for layer_shape, shared in wanted:
        sources = [_source(stored[name], name, index, layer_shape) for name, index in parts]
        found = tuple(source for source in sources if source is not None)
        if len(found) == len(parts):
            return Recipe(found, () if shared else lengths, shared)
    return None


def _source(
    leaf: ShapeLike, path: str, index: tuple[int, ...], wanted: tuple[int, ...]
) -> Source | None:
    ranges = _ranges(path)
    shape = tuple(leaf.shape)
    if ranges and _has_layer_axes(shape, ranges) and shape[len(ranges) :] == wanted:
        return Source(path, index)
    return Source(path, None) if shape == wanted else None


def _take(leaf: Any, index: Any) -> Any:
    if index is None or len(index) == 0:
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape[len(index) :], leaf.dtype)
    return leaf[tuple(index)]


@functools.lru_cache(maxsize=256)
def _jitted_gather(lengths: tuple[int, ...], sharding: Any) -> Callable[..., Any]:
    # The index is an operand: all layers of all leaves of one shape share one compilation.
    def gather(arrays: list[jax.Array], indices: list[jax.Array | None]) -> jax.Array:
        return _gather(jnp, arrays, indices, lengths)

    return jax.jit(gather, out_shardings=sharding)


def _gather(xp: Any, arrays: list[Any], indices: list[Any], lengths: tuple[int, ...]) -> Any:
    parts = [_take(array, index) for array, index in zip(arrays, indices, strict=True)]
    if not lengths:
        return parts[0]
    return xp.stack(parts).reshape((*lengths, *parts[0].shape))


def _same_bits(a: Any, b: Any) -> bool:
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()
