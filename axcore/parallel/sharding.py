"""From names to shardings: the PartitionSpec of an array, and shardings of whole trees.

Sizes are checked here: JAX leaves a constrained dim that does not divide whole, silently.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axcore.errors import ShardingError
from axcore.parallel.rules import RuleTable, ShardingRules, TableName

__all__ = [
    "ArraySpec",
    "ShardedBytes",
    "batch_sharding",
    "bytes_per_device",
    "named_sharding",
    "named_shardings",
    "partition_spec",
    "replicated",
]


class ArraySpec(Protocol):
    """An array before it exists: :class:`axcore.ParameterSpec`, or a leaf of optimizer state."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> str:
        """Its dtype's name."""
        ...

    @property
    def axes(self) -> tuple[str | None, ...]:
        """Logical axis or None for each dim."""
        ...


def partition_spec(
    shape: Sequence[int],
    axes: Sequence[str | None],
    mesh: Mesh,
    table: RuleTable,
    *,
    name: str = "array",
) -> PartitionSpec:
    """Returns how an array is split: one entry per dim, of mesh axes larger than 1.

    The first alternative whose mesh axes are still free and whose size divides the dim is taken.
    Mesh axes of size 1 count as used all the same, so that a mistake shows on every mesh.

    Args:
        shape: Shape of the array.
        axes: Logical axis or None (not split) for each dim.
        mesh: The mesh.
        table: The rules.
        name: The array's name, for messages.

    Raises:
        ShardingError: A logical axis is unknown, no alternative is free of mesh axes that an
            earlier dim uses, or none divides the dim.
    """
    if len(shape) != len(axes):
        raise ShardingError(
            f"got {len(axes)} axis names {tuple(axes)} for shape {tuple(shape)}",
            code="AX456",
            where=name,
            hint="give one logical axis name, or None, for each dim",
        )
    entries: list[Any] = []
    used: dict[str, int] = {}  # mesh axis -> dim that uses it
    for dim, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        if axis is None:
            entries.append(None)
            continue
        where = f"{name}{_described(shape, axes)}"
        alternatives = table.alternatives(axis, where)
        problems: list[tuple[str, str, str]] = []  # code, message, hint
        for mesh_axes in alternatives:
            parts = math.prod(mesh.shape.get(a, 1) for a in mesh_axes)
            clash = [a for a in mesh_axes if a in used]
            if clash:
                problems.append(_clash(clash, used, dim, axes))
            elif size % parts:
                problems.append(_indivisible(size, dim, axis, mesh_axes, parts, mesh))
            else:
                used.update(dict.fromkeys(mesh_axes, dim))
                real = tuple(a for a in mesh_axes if mesh.shape.get(a, 1) > 1)
                entries.append(real[0] if len(real) == 1 else real or None)
                break
        else:
            code, _, hint = problems[-1]
            raise ShardingError(
                "; ".join(message for _, message, _ in problems),
                code=code,
                where=f"{where} under {table.name}_rules",
                hint=hint,
            )
    return PartitionSpec(*entries)


def _described(shape: Sequence[int], axes: Sequence[str | None]) -> str:
    dims = ", ".join(f"{a or '-'}={s}" for a, s in zip(axes, shape, strict=True))
    return f"[{dims}]"


def _clash(
    clash: list[str], used: Mapping[str, int], dim: int, axes: Sequence[str | None]
) -> tuple[str, str, str]:
    mesh_axis = clash[0]
    first = used[mesh_axis]
    return (
        "AX457",
        f"mesh axis {mesh_axis!r} is used twice: by dim {first} ({axes[first]!r}) "
        f"and by dim {dim} ({axes[dim]!r})",
        f"give {axes[dim]!r} an alternative without {mesh_axis!r} in the rules, or give the dim "
        "another logical axis",
    )


def _indivisible(
    size: int, dim: int, axis: str, mesh_axes: tuple[str, ...], parts: int, mesh: Mesh
) -> tuple[str, str, str]:
    split = " x ".join(f"{a}={mesh.shape.get(a, 1)}" for a in mesh_axes)
    below, above = size // parts * parts, -(-size // parts) * parts
    sizes = f"{below} or {above}" if below else f"{above}"
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    near = sorted(divisors, key=lambda d: abs(d - parts))[:2]
    pad = f"; or pad it with vocab_multiple_of={parts} of its layers" if axis == "vocab" else ""
    return (
        "AX458",
        f"dim {dim} ({axis!r}) of size {size} does not divide into {parts} parts ({split})",
        f"nearest sizes that do: {sizes}; or split it into {' or '.join(map(str, sorted(near)))} "
        f"parts with mesh_shape; or allow {axis!r} to stay whole with the alternatives "
        f"({tuple(mesh_axes)}, ()){pad}",
    )


def named_sharding(
    spec: ArraySpec, mesh: Mesh, table: RuleTable, *, name: str = "parameter"
) -> NamedSharding:
    """Returns the sharding of one described array, in its ``memory`` if it states one.

    Raises:
        ShardingError: As for :func:`partition_spec`.
    """
    parts = partition_spec(spec.shape, spec.axes, mesh, table, name=name)
    return NamedSharding(mesh, parts, memory_kind=getattr(spec, "memory", None))


def named_shardings(
    specs: Any, mesh: Mesh, rules: ShardingRules, *, table: TableName = "param"
) -> Any:
    """Returns the shardings of a tree of described arrays, in the same structure.

    Args:
        specs: Nested dicts of :class:`axcore.ParameterSpec`, as ``module.parameter_specs()`` gives
            them, or any pytree of :class:`ArraySpec`.
        mesh: The mesh.
        rules: The rules.
        table: Which of the tables: ``param``, or ``optimizer`` for state of a parameter's shape.

    Raises:
        ShardingError: As for :func:`partition_spec`; names the parameter's path.
    """
    chosen = rules.table(table)
    return _map_specs(specs, lambda name, spec: named_sharding(spec, mesh, chosen, name=name))


def _is_spec(value: Any) -> bool:
    return hasattr(value, "axes") and hasattr(value, "shape")


def _map_specs(specs: Any, fn: Callable[[str, ArraySpec], Any]) -> Any:
    def one(path: Any, spec: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not _is_spec(spec):
            raise ShardingError(
                f"expected a ParameterSpec or the like, got {type(spec).__name__}",
                code="AX456",
                where=name,
            )
        return fn(name, spec)

    return jax.tree_util.tree_map_with_path(one, specs, is_leaf=_is_spec)


def batch_sharding(
    mesh: Mesh, rules: ShardingRules, axes: tuple[str | None, ...] = ("batch", "seq")
) -> NamedSharding:
    """Returns the sharding of a batch's arrays by the activations' table.

    No size is known here: the first alternative of each axis holds. Sizes are checked by
    :func:`axcore.parallel.make_global_array` and wherever the model constrains.

    Args:
        mesh: The mesh.
        rules: The rules.
        axes: Logical axes of the arrays' leading dims.

    Raises:
        ShardingError: A logical axis is unknown or a mesh axis is used twice.
    """
    table = rules.table("activation")
    # 0 divides into any number of parts.
    return NamedSharding(mesh, partition_spec((0,) * len(axes), axes, mesh, table, name="batch"))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that puts the whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


@dataclasses.dataclass(frozen=True)
class ShardedBytes:
    """Memory of a tree of parameters.

    Attributes:
        total: Bytes of all of it, once.
        per_device: Bytes on one device.
    """

    total: int
    per_device: int


def bytes_per_device(specs: Any, shardings: Any) -> ShardedBytes:
    """Returns the bytes of a tree of specs, in all and on one device.

    Args:
        specs: Tree of :class:`ArraySpec` or ``jax.ShapeDtypeStruct``.
        shardings: Tree of shardings, the same structure.
    """
    total = per_device = 0
    leaves = jax.tree.leaves(specs, is_leaf=_is_spec)
    for spec, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        item_bytes = jnp.dtype(spec.dtype).itemsize
        total += math.prod(spec.shape) * item_bytes
        per_device += math.prod(sharding.shard_shape(spec.shape)) * item_bytes
    return ShardedBytes(total, per_device)
