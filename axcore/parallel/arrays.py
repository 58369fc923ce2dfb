"""Arrays of several processes: which rows a process feeds, and the global array made of them."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from axcore.errors import ShardingError

__all__ = ["check_batch_shape", "make_global_array", "process_rows"]


def process_rows(
    sharding: Sharding, batch_size: int, *, process_index: int | None = None
) -> tuple[int, ...]:
    """Returns the rows of the global batch that a process feeds, ascending.

    Rows that several processes need (the mesh splits them over ``seq`` or ``model`` across
    processes) are fed by each of them.

    Args:
        sharding: Sharding of the batch; its first dim is the rows.
        batch_size: Rows of the global batch.
        process_index: The process; None for this one.

    Raises:
        ShardingError: The rows do not divide among the devices that split them.
    """
    if process_index is None:
        process_index = jax.process_index()
    shape = (batch_size,) + (1,) * (_rank(sharding) - 1)
    if isinstance(sharding, NamedSharding):
        # Only rows matter: the other dims have size 1 here and may not be split.
        first = sharding.spec[0] if sharding.spec else None
        sharding = NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(first))
    check_batch_shape(sharding, shape)
    rows: set[int] = set()
    for device, index in sharding.devices_indices_map(shape).items():
        if device.process_index == process_index:
            rows.update(range(batch_size)[index[0]])
    return tuple(sorted(rows))


def make_global_array(
    local_rows: np.ndarray,
    sharding: Sharding,
    global_shape: tuple[int, ...],
    *,
    rows: tuple[int, ...] | None = None,
) -> jax.Array:
    """Makes a global array from the rows that this process feeds.

    Args:
        local_rows: Whole rows in the order of :func:`process_rows`, (len(rows), ...).
        sharding: Sharding of the global array.
        global_shape: Its shape; the first dim is the rows of all processes.
        rows: What :func:`process_rows` returned, to save the time to find it again.

    Raises:
        ShardingError: The local rows are not those of this process, or do not divide.
    """
    check_batch_shape(sharding, global_shape)
    rows = process_rows(sharding, global_shape[0]) if rows is None else rows
    expected = (len(rows), *global_shape[1:])
    if local_rows.shape != expected:
        raise ShardingError(
            f"this process got rows of shape {local_rows.shape}, expected {expected} for the "
            f"global shape {global_shape}",
            code="AX463",
            hint="feed exactly the rows that process_rows names",
        )
    if len(rows) == global_shape[0]:
        return jax.make_array_from_callback(global_shape, sharding, lambda index: local_rows[index])
    position = {row: i for i, row in enumerate(rows)}

    def shard(index: Any) -> np.ndarray:
        wanted = [position[row] for row in range(global_shape[0])[index[0]]]
        return local_rows[wanted][(slice(None), *index[1:])]

    return jax.make_array_from_callback(global_shape, sharding, shard)


def _rank(sharding: Sharding) -> int:
    return max(1, len(sharding.spec)) if isinstance(sharding, NamedSharding) else 1


def check_batch_shape(sharding: Sharding, shape: tuple[int, ...]) -> None:
    """Refuses shapes that a sharding does not divide.

    Args:
        sharding: Of the global array.
        shape: Its shape, rows first.

    Raises:
        ShardingError: AX458 with the dim, the mesh axes and the nearest sizes.
    """
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        message, hint = _uneven(sharding, shape) or (str(error), "change mesh_shape")
        raise ShardingError(
            f"a batch of shape {shape}: {message}", code="AX458", where="batch", hint=hint
        ) from error


def _uneven(sharding: Sharding, shape: tuple[int, ...]) -> tuple[str, str] | None:
    """Returns which dim does not divide among which mesh axes, and what would."""
    if not isinstance(sharding, NamedSharding):
        return None
    for dim, (size, entry) in enumerate(zip(shape, sharding.spec, strict=False)):
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        parts = math.prod(sharding.mesh.shape[axis] for axis in axes)
        if size % parts:
            split = " x ".join(f"{axis}={sharding.mesh.shape[axis]}" for axis in axes)
            below, above = size // parts * parts, -(-size // parts) * parts
            sizes = f"{below} or {above}" if below else f"{above}"
            what = "batch_size" if dim == 0 else "seq_len" if dim == 1 else f"dim {dim}"
            return (
                f"dim {dim} of size {size} does not divide into {parts} parts ({split})",
                f"make {what} {sizes}, or change mesh_shape",
            )
    return None
