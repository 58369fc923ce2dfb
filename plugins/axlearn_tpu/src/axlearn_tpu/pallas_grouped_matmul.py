"""Grouped products by JAX's megablox kernels for TPU: each tile of rows meets its group's matrix.

``jax.experimental.pallas.ops.tpu.megablox.gmm`` has a backward pass of two further kernels: another
grouped product for the rows' gradient, and one that sums over each group for the weights'. Neither
it nor they write rows past the last group, so what stands there is set here.

References:
    MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox import gmm

from axlearn_tpu._block_sizes import LANES, grouped_tiles, tile
from axlearn_tpu._target import instance_name

__all__ = ["grouped_matmul_megablox"]


def grouped_matmul_megablox(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies each group of rows of one device with its own matrix.

    Args:
        rows: (M, K), bfloat16 or float32, sorted by group.
        weights: (E, K, N), bfloat16 or float32.
        group_sizes: (E,) int32.
        preferred_element_type: Dtype of the result; by default that of ``rows``.
        interpret: Runs the kernel step by step on any device, for tests.

    Returns:
        (M, N); sums are float32 inside.
    """
    num_rows = rows.shape[0]
    itemsize = max(rows.dtype.itemsize, weights.dtype.itemsize)
    largest = grouped_tiles(instance_name(), itemsize)
    length, _ = tile(num_rows, largest[0])
    group_sizes = group_sizes.astype(jnp.int32)
    # Selected on both sides: rows of no group get zeros, and give their cotangent's garbage none.
    used = (jnp.arange(length, dtype=jnp.int32) < jnp.sum(group_sizes))[:, None]
    padded = jnp.pad(rows, ((0, length - num_rows), (0, 0)))
    out = gmm(
        jnp.where(used, padded, jnp.zeros((), rows.dtype)),
        weights,
        group_sizes,
        jnp.dtype(preferred_element_type or rows.dtype),
        _tiling(largest),
        None,
        None,
        False,
        interpret,
    )
    return jnp.where(used, out, jnp.zeros((), out.dtype))[:num_rows]


@functools.cache
def _tiling(largest: tuple[int, int, int]) -> Callable[[int, int, int], tuple[int, int, int]]:
    """What megablox asks for the tiles of a product of (m, k) with (k, n): three of them differ."""

    def tiles(m: int, k: int, n: int) -> tuple[int, int, int]:
        inner, columns = (
            min(most, -(-size // LANES) * LANES)
            for most, size in zip(largest[1:], (k, n), strict=True)
        )
        return tile(m, largest[0])[1], inner, columns

    return tiles
