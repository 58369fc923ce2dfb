"""Grouped matmul in blocks of rows, for platforms whose ragged product visits every group.

XLA's backends for CPUs and GPUs compute ``ragged_dot`` as a product with all E matrices: E times
the work and the memory. Here rows are cut into tiles that belong to one group each, and a loop
multiplies each tile with the matrix of its group: at most ``M + E t`` rows for tiles of t rows.
Tiles that the sizes at hand do not need are skipped: in a loop of fixed length, so that its cost
can be counted.

Shape legend: m rows, k and n sides of a matrix, e groups, t rows of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["blocked_grouped_matmul", "widened"]

_MIN_TILE, _MAX_TILE = 8, 128


class _Tiles(NamedTuple):
    """Where tiles lie; arrays of one entry per tile, in the order of rows.

    Entries past the number of tiles that are needed mean nothing.
    """

    starts: jax.Array  # first row
    stops: jax.Array  # end of the group's rows
    groups: jax.Array
    is_needed: jax.Array


def blocked_grouped_matmul(
    rows: jax.Array, weights: jax.Array, group_sizes: jax.Array, sums: str, result: str
) -> jax.Array:
    """Computes the product of :func:`axcore.ops.grouped_matmul`.

    Args:
        rows: (M, K), sorted by group.
        weights: (E, K, N).
        group_sizes: (E,) int32.
        sums: Dtype name of the sums of a tile, and of a group's weight gradient.
        result: Dtype name of the result: what is kept for all rows.
    """
    return _product(sums, result, rows, weights, group_sizes)


def widened(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns weights of fewer bits than the rows in their dtype, others as they are."""
    return weights.astype(rows.dtype) if weights.dtype.itemsize < rows.dtype.itemsize else weights


def _tile_rows(num_rows: int, num_groups: int) -> int:
    """Rows of a tile: about a quarter of a group's share, so that an eighth of the work is padding.

    Down to 32 rows tiles of float32 multiply as fast as larger ones.
    """
    share = max(num_rows // max(4 * num_groups, 1), 1)
    return min(max(1 << (share - 1).bit_length(), _MIN_TILE), _MAX_TILE)


def _tiles(num_rows: int, group_sizes: jax.Array, tile: int) -> _Tiles:
    ends = jnp.cumsum(group_sizes)
    counts = -(-group_sizes // tile)
    last_tiles = jnp.cumsum(counts)
    number = jnp.arange(num_rows // tile + group_sizes.shape[0], dtype=group_sizes.dtype)
    groups = jnp.searchsorted(last_tiles, number, side="right").astype(jnp.int32)
    groups = jnp.minimum(groups, group_sizes.shape[0] - 1)
    within = number - (last_tiles - counts)[groups]
    starts = (ends - group_sizes)[groups] + within * tile
    return _Tiles(starts, ends[groups], groups, number < last_tiles[-1])


def _for_each(
    tiles: _Tiles, multiply: Callable[[_Tiles, jax.Array], jax.Array], out: jax.Array
) -> jax.Array:
    """Applies ``multiply`` to all tiles that are needed, one after another."""

    def step(out: jax.Array, at: _Tiles) -> tuple[jax.Array, None]:
        return lax.cond(at.is_needed, multiply, lambda _, out: out, at, out), None

    return lax.scan(step, out, tiles)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    sums: str, result: str, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    return _forward(sums, result, rows, weights, group_sizes)


def _forward(
    sums: str,
    result: str,
    rows_mk: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    contracted: int = 1,
) -> jax.Array:
    """(m, n); ``contracted`` is the dim of the weights (e, k, n) or (e, n, k) that rows have."""
    m, n = rows_mk.shape[0], weights.shape[3 - contracted]
    tile = _tile_rows(m, weights.shape[0])
    tiles = _tiles(m, group_sizes, tile)
    rows_mk = jnp.pad(rows_mk, ((0, tile), (0, 0)))

    def multiply(at: _Tiles, out_mn: jax.Array) -> jax.Array:
        rows_tk = lax.dynamic_slice_in_dim(rows_mk, at.starts, tile)
        weight = lax.dynamic_index_in_dim(weights, at.groups, keepdims=False)
        weight = widened(weight, rows_tk)
        dims = (((1,), (contracted - 1,)), ((), ()))
        out_tn = lax.dot_general(rows_tk, weight, dims, preferred_element_type=jnp.dtype(sums))
        # Rows past the group's end are written again by the tiles of the next groups.
        return lax.dynamic_update_slice_in_dim(out_mn, out_tn.astype(result), at.starts, 0)

    out_mn = _for_each(tiles, multiply, jnp.zeros((m + tile, n), result))
    in_a_group = jnp.arange(m) < jnp.sum(group_sizes)
    return jnp.where(in_a_group[:, None], out_mn[:m], 0)


def _weight_gradient(
    sums: str,
    rows_mk: jax.Array,
    grads_mn: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    """(e, k, n): of each group, its rows transposed times its gradients."""
    m, e = rows_mk.shape[0], group_sizes.shape[0]
    tile = _tile_rows(m, e)
    tiles = _tiles(m, group_sizes, tile)
    rows_mk = jnp.pad(rows_mk, ((0, tile), (0, 0)))
    grads_mn = jnp.pad(grads_mn, ((0, tile), (0, 0)))

    def multiply(at: _Tiles, out_ekn: jax.Array) -> jax.Array:
        rows_tk = lax.dynamic_slice_in_dim(rows_mk, at.starts, tile)
        grads_tn = lax.dynamic_slice_in_dim(grads_mn, at.starts, tile)
        mine = at.starts + jnp.arange(tile) < at.stops
        # Both: 0 times what another group's rows have may be NaN.
        rows_tk = jnp.where(mine[:, None], rows_tk, 0)
        grads_tn = jnp.where(mine[:, None], grads_tn, 0)
        product_kn = jnp.matmul(rows_tk.T, grads_tn, preferred_element_type=jnp.dtype(sums))
        old_kn = lax.dynamic_index_in_dim(out_ekn, at.groups, keepdims=False)
        return lax.dynamic_update_index_in_dim(out_ekn, old_kn + product_kn, at.groups, 0)

    shape = (e, rows_mk.shape[1], grads_mn.shape[1])
    return _for_each(tiles, multiply, jnp.zeros(shape, sums))


def _save(
    sums: str, result: str, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _forward(sums, result, rows, weights, group_sizes), (rows, weights, group_sizes)


def _backward(
    sums: str, result: str, saved: tuple[jax.Array, jax.Array, jax.Array], grads: jax.Array
) -> tuple[jax.Array, jax.Array | np.ndarray, np.ndarray]:
    del result
    rows, weights, group_sizes = saved
    d_rows = _forward(sums, rows.dtype.name, grads, weights, group_sizes, contracted=2)
    d_weights = _weight_gradient(sums, rows, grads, group_sizes)
    zero = np.zeros(group_sizes.shape, jax.dtypes.float0)
    if jnp.issubdtype(weights.dtype, jnp.integer):
        return d_rows, np.zeros(weights.shape, jax.dtypes.float0), zero
    return d_rows, d_weights.astype(weights.dtype), zero


_product.defvjp(_save, _backward)
