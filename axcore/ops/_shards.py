"""Kernels on a mesh: which dims are split, what a kernel must tolerate, and its ``shard_map``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

if TYPE_CHECKING:
    from axcore.context import Target
    from axcore.plugins import KernelSpec, OpCall

__all__ = [
    "Operand",
    "auto_axes",
    "num_shards",
    "partition_refusal",
    "shard_mapped",
    "sharded_axes",
]


class Operand(NamedTuple):
    """An argument of an op: the array (or None when absent) and the logical axis of each dim.

    Attributes:
        array: The array.
        axes: What kernels know the dims by; None for a dim that they get whole.
        placed: What the dims lie by, where that differs: another axis than the one that kernels
            know, or the axis of a dim that is gathered for all but communicating kernels.
    """

    array: Any
    axes: tuple[str | None, ...]
    placed: tuple[str | None, ...] | None = None

    @property
    def layout(self) -> tuple[str | None, ...]:
        """The logical axis that each dim lies by."""
        return self.axes if self.placed is None else self.placed


def sharded_axes(target: Target, logical_axis: str | None) -> tuple[str, ...]:
    """Mesh axes of more than one device that split ``logical_axis``, less those already manual."""
    if logical_axis is None or target.mesh is None:
        return ()
    sizes = target.mesh.shape
    return tuple(axis for axis in target.mesh_axes(logical_axis) if sizes[axis] > 1)


def auto_axes(target: Target) -> set[str]:
    """The mesh axes that no enclosing ``shard_map`` handles."""
    if target.mesh is None:
        return set()
    return set(target.mesh.axis_names) - set(jax.sharding.get_abstract_mesh().manual_axes)


def num_shards(target: Target | None, mesh_axes: tuple[str, ...]) -> int:
    num = 1
    for axis in mesh_axes:
        assert target is not None and target.mesh is not None
        num *= target.mesh.shape[axis]
    return num


def partition_refusal(call: OpCall, spec: KernelSpec, target: Target) -> str | None:
    """Why the kernel cannot run on the shards of this call, or None."""
    for argument, axes in call.axes.items():
        tolerated = spec.partitioning.get(argument, ())
        for size, axis in zip(call.shapes[argument], axes, strict=True):
            over = call.mesh_axes.get(axis or "", ())
            if axis is None or size == 1 or not over:
                continue
            if axis not in tolerated:
                return f"does not tolerate dim {axis} of {argument} sharded over {', '.join(over)}"
            num = num_shards(target, over)
            if size % num:
                return f"dim {axis} of {argument} ({size}) does not divide over {num} devices"
    heads, kv_heads = (call.mesh_axes.get(a, ()) for a in ("heads", "kv_heads"))
    keys = {"attention": ("k", 2), "paged_attention": ("k_pages", 0)}.get(call.op)
    if keys is None or heads == kv_heads:
        return None
    argument, dim = keys
    if call.shapes[argument][dim] != 1:
        return (
            f"query heads are sharded over {heads or 'nothing'} and key/value heads over"
            f" {kv_heads or 'nothing'}: a device would lack the keys of its queries"
        )
    return None


def shard_mapped(
    kernel: Callable[..., Any],
    operands: Mapping[str, Operand],
    output_placed: Any,
    static: Mapping[str, Any],
    target: Target,
    communicates: tuple[str, ...],
) -> Any:
    """Runs the kernel on each device's shards; dims that are not sharded are whole everywhere."""
    assert target.mesh is not None

    def spec(axes: tuple[str | None, ...], shape: tuple[int, ...] | None = None) -> PartitionSpec:
        sizes = shape or (0,) * len(axes)
        return PartitionSpec(
            *(
                (sharded_axes(target, axis) or None) if size != 1 else None
                for axis, size in zip(axes, sizes, strict=True)
            )
        )

    def placement(operand: Operand) -> tuple[str | None, ...]:
        pairs = zip(operand.axes, operand.layout, strict=True)
        return tuple(p if axis is not None or p in communicates else None for axis, p in pairs)

    names = list(operands)
    in_specs = tuple(
        spec(placement(operands[name]), jax.numpy.shape(operands[name].array)) for name in names
    )
    if communicates:
        static = {**static, "mesh_axes": {a: sharded_axes(target, a) for a in communicates}}

    def is_axes(x: Any) -> bool:  # and not a tuple of results, each with its own
        return isinstance(x, tuple) and all(a is None or isinstance(a, str) for a in x)

    out_specs = jax.tree.map(spec, output_placed, is_leaf=is_axes)

    def local(*arrays: jax.Array) -> Any:
        return kernel(**dict(zip(names, arrays, strict=True)), **static)

    manual = jax.sharding.get_abstract_mesh().manual_axes
    mapped = jax.shard_map(
        local,
        mesh=None if manual else target.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=auto_axes(target),
        check_vma=False,
    )
    return mapped(*(operands[name].array for name in names))
