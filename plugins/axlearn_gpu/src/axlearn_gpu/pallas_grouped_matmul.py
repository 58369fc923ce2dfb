"""Grouped products: a Pallas kernel, lowered through Triton, in which each tile has one group.

Rows are cut into tiles that belong to one group each, at most M / t + E for tiles of t rows; the
blocks of a tile find out whose they are in a table that is made beforehand. The gradient of the
rows is the same kernel with the matrices transposed; that of the matrices is a kernel with a block
of one group's matrix each, which walks over the group's rows. Nothing of size E x M is made.

Matrices in fewer bits than the rows (weight-only quantization) are widened block by block on chip,
and so are two kinds of float8 that meet. Float32 is multiplied in full precision.

Shape legend: m rows, k and n sides of a matrix, e groups.

References:
    MegaBlocks, arXiv:2211.15841.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from axlearn_gpu._pallas_blocks import MIN_DOT

__all__ = ["grouped_matmul_pallas"]

_MAX_ROWS = 128


class _Static(NamedTuple):
    """Hashable facts of a call: dtype names of sums and result, and whether it is interpreted."""

    sums: str
    result: str
    interpret: bool


class _Blocks(NamedTuple):
    """How much is worked on at a time.

    Attributes:
        rows: Rows of a tile.
        inner: Of the dim that is summed over.
        columns: Of the result.
        num_warps: Warps of a thread block.
        num_stages: How far loads run ahead.
    """

    rows: int
    inner: int
    columns: int
    num_warps: int
    num_stages: int


class _Tiles(NamedTuple):
    """The table of tiles, int32 (tiles,) each; those that are not needed are empty."""

    starts: jax.Array
    stops: jax.Array
    groups: jax.Array


def grouped_matmul_pallas(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: str | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiplies each group of rows of one device with its own matrix.

    See :func:`axlearn_gpu.supports.pallas_grouped` for what it serves.

    Args:
        rows: (M, K), sorted by group.
        weights: (E, K, N), of the rows' dtype or of fewer bits.
        group_sizes: (E,) int32.
        preferred_element_type: Dtype of the result; by default that of ``rows``.
        interpret: Runs the kernel's code as JAX operations, on any platform.

    Returns:
        (M, N); sums are float32 inside, those of integers int32. Rows of no group give zeros.
    """
    sums = "int32" if jnp.issubdtype(rows.dtype, jnp.integer) else "float32"
    static = _Static(sums, preferred_element_type or rows.dtype.name, interpret)
    out: Any = _product(static, rows, weights, group_sizes.astype(jnp.int32))
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    static: _Static, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    return _multiply(static, rows, weights, group_sizes, contracted=1)


def _product_fwd(
    static: _Static, rows: jax.Array, weights: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _product(static, rows, weights, group_sizes), (rows, weights, group_sizes)


def _product_bwd(
    static: _Static, saved: tuple[jax.Array, ...], grads: jax.Array
) -> tuple[jax.Array, Any, np.ndarray]:
    rows, weights, group_sizes = saved
    to_rows = static._replace(result=rows.dtype.name)
    d_rows = _multiply(to_rows, grads.astype(rows.dtype), weights, group_sizes, contracted=2)
    if jnp.issubdtype(weights.dtype, jnp.integer):
        d_weights = np.zeros(weights.shape, jax.dtypes.float0)
    else:
        to_weights = static._replace(result=weights.dtype.name)
        d_weights = _sum_groups(to_weights, rows, grads.astype(rows.dtype), group_sizes)
    return d_rows, d_weights, np.zeros(group_sizes.shape, jax.dtypes.float0)


_product.defvjp(_product_fwd, _product_bwd)


def _power_of_two(number: int) -> int:
    return 1 << (max(number, 1) - 1).bit_length()


def _blocks(num_rows: int, groups: int, inner: int, columns: int, dtype: Any) -> _Blocks:
    """Blocks that fit into a Hopper's shared memory; how fast they are has not been measured.

    Tiles have about half of a group's share of rows, so that a quarter of the work is padding at
    most where groups are large, and what a product takes at least where they are small.
    """
    wide = jnp.dtype(dtype).itemsize > 2
    share = _power_of_two(max(num_rows // max(2 * groups, 1), 1))
    rows = min(max(share, MIN_DOT), _MAX_ROWS // 2 if wide else _MAX_ROWS)
    # Triton's products of integers have 32 elements to sum at least.
    least = 2 * MIN_DOT
    return _Blocks(
        rows,
        min(max(_power_of_two(inner), least), 32 if wide else 64),
        min(max(_power_of_two(columns), least), 64 if wide else 128),
        num_warps=4 if wide or rows < _MAX_ROWS else 8,
        num_stages=2 if wide else 3,
    )


def _table(group_sizes: jax.Array, num_rows: int, tile: int) -> _Tiles:
    groups = group_sizes.shape[0]
    ends = jnp.cumsum(group_sizes)
    counts = -(-group_sizes // tile)
    last_tiles = jnp.cumsum(counts)
    number = jnp.arange(-(-num_rows // tile) + groups, dtype=jnp.int32)
    of_tile = jnp.searchsorted(last_tiles, number, side="right").astype(jnp.int32)
    of_tile = jnp.minimum(of_tile, groups - 1)
    starts = (ends - group_sizes)[of_tile] + (number - (last_tiles - counts)[of_tile]) * tile
    is_needed = number < last_tiles[-1]
    return _Tiles(jnp.where(is_needed, starts, 0), jnp.where(is_needed, ends[of_tile], 0), of_tile)


def _options(static: _Static, blocks: _Blocks, name: str, flops: int, moved: int) -> dict[str, Any]:
    return {
        # Says which backend, too: without parameters JAX 0.10 would take Mosaic, 0.12 Triton.
        "compiler_params": plgpu.CompilerParams(
            num_warps=blocks.num_warps, num_stages=blocks.num_stages
        ),
        # Tiles that are not needed cost nothing, which a grid does not tell.
        "cost_estimate": pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0),
        "interpret": static.interpret,
        "name": name,
    }


def _multiply(
    static: _Static,
    rows_mk: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    contracted: int,
) -> jax.Array:
    """(m, n); ``contracted`` is the dim of the weights (e, k, n) or (e, n, k) that rows have."""
    (m, k), e, n = rows_mk.shape, weights.shape[0], weights.shape[3 - contracted]
    blocks = _blocks(m, e, k, n, rows_mk.dtype)
    table = _table(group_sizes, m, blocks.rows)
    kernel = functools.partial(
        _multiply_kernel, static=static, blocks=blocks, contracted=contracted, sizes=(k, n)
    )
    out: Any = jax.ShapeDtypeStruct((m, n), static.result)
    moved = rows_mk.nbytes + weights.nbytes + m * n * out.dtype.itemsize
    out_mn = pl.pallas_call(
        kernel,
        grid=(table.starts.shape[0], pl.cdiv(n, blocks.columns)),
        out_shape=out,
        **_options(static, blocks, "grouped_matmul", 2 * m * k * n, moved),
    )(*table, rows_mk, weights)
    in_a_group = jnp.arange(m) < jnp.sum(group_sizes)
    return jnp.where(in_a_group[:, None], out_mn, jnp.zeros((), out_mn.dtype))


def _multiply_kernel(
    starts_ref: Any,
    stops_ref: Any,
    groups_ref: Any,
    rows_ref: Any,
    weights_ref: Any,
    out_ref: Any,
    *,
    static: _Static,
    blocks: _Blocks,
    contracted: int,
    sizes: tuple[int, int],
) -> None:
    tile, first = pl.program_id(0), pl.program_id(1) * blocks.columns
    start, stop, group = starts_ref[tile], stops_ref[tile], groups_ref[tile]
    mine = start + jnp.arange(blocks.rows) < stop
    columns = _within(first, blocks.columns, sizes[1])

    @pl.when(start < stop)
    def _() -> None:
        def body(i: Any, acc: jax.Array) -> jax.Array:
            at = i * blocks.inner
            inner = _within(at, blocks.inner, sizes[0])
            here, there = pl.ds(at, blocks.inner), pl.ds(first, blocks.columns)
            rows = _load(rows_ref.at[pl.ds(start, blocks.rows), here], mine, inner)
            if contracted == 1:
                matrix = _load(weights_ref.at[group, here, there], inner, columns)
            else:
                matrix = _load(weights_ref.at[group, there, here], columns, inner)
            return acc + _dot(*_alike(rows, matrix), (1, contracted - 1), static.sums)

        acc = lax.fori_loop(
            0,
            pl.cdiv(sizes[0], blocks.inner),
            body,
            jnp.zeros((blocks.rows, blocks.columns), static.sums),
        )
        plgpu.store(
            out_ref.at[pl.ds(start, blocks.rows), pl.ds(first, blocks.columns)],
            acc.astype(out_ref.dtype),
            mask=_both(mine, columns),
        )


def _sum_groups(
    static: _Static, rows_mk: jax.Array, grads_mn: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """(e, k, n): of each group, its rows transposed times its gradients."""
    (m, k), n, e = rows_mk.shape, grads_mn.shape[1], group_sizes.shape[0]
    # The sides of a block are those of the result, and what is summed over are rows.
    blocks = _blocks(m, 1, m, n, rows_mk.dtype)
    blocks = blocks._replace(rows=min(max(_power_of_two(k), 2 * MIN_DOT), blocks.rows))
    ends = jnp.cumsum(group_sizes)
    kernel = functools.partial(_sum_kernel, static=static, blocks=blocks, sizes=(k, n))
    out: Any = jax.ShapeDtypeStruct((e, k, n), static.result)
    moved = rows_mk.nbytes + grads_mn.nbytes + e * k * n * out.dtype.itemsize
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(k, blocks.rows), pl.cdiv(n, blocks.columns), e),
        out_shape=out,
        **_options(static, blocks, "grouped_matmul_sums", 2 * m * k * n, moved),
    )(ends - group_sizes, ends, rows_mk, grads_mn)


def _sum_kernel(
    starts_ref: Any,
    stops_ref: Any,
    rows_ref: Any,
    grads_ref: Any,
    out_ref: Any,
    *,
    static: _Static,
    blocks: _Blocks,
    sizes: tuple[int, int],
) -> None:
    group = pl.program_id(2)
    start, stop = starts_ref[group], stops_ref[group]
    left, right = pl.program_id(0) * blocks.rows, pl.program_id(1) * blocks.columns
    in_left = _within(left, blocks.rows, sizes[0])
    in_right = _within(right, blocks.columns, sizes[1])

    def body(i: Any, acc: jax.Array) -> jax.Array:
        at = start + i * blocks.inner
        here = pl.ds(at, blocks.inner)
        mine = at + jnp.arange(blocks.inner) < stop
        rows = _load(rows_ref.at[here, pl.ds(left, blocks.rows)], mine, in_left)
        grads = _load(grads_ref.at[here, pl.ds(right, blocks.columns)], mine, in_right)
        return acc + _dot(rows, grads, (0, 0), static.sums)

    acc = lax.fori_loop(
        0,
        pl.cdiv(stop - start, blocks.inner),
        body,
        jnp.zeros((blocks.rows, blocks.columns), static.sums),
    )
    plgpu.store(
        out_ref.at[group, pl.ds(left, blocks.rows), pl.ds(right, blocks.columns)],
        acc.astype(out_ref.dtype),
        mask=_both(in_left, in_right),
    )


def _within(first: Any, length: int, size: int) -> jax.Array | None:
    """Which places of a block are inside of a dim; None if all are, whichever block it is."""
    return None if size % length == 0 else first + jnp.arange(length) < size


def _both(left: jax.Array | None, right: jax.Array | None) -> jax.Array | None:
    if left is None or right is None:
        return left[:, None] if left is not None else right[None, :] if right is not None else None
    return left[:, None] & right[None, :]


def _load(ref: Any, left: jax.Array | None, right: jax.Array | None) -> jax.Array:
    """A block, with zeros outside of the array or the group."""
    mask = _both(left, right)
    return (
        plgpu.load(ref)
        if mask is None
        else plgpu.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))
    )


def _alike(rows: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both in one dtype that holds either exactly: Triton multiplies no others."""
    if rows.dtype.itemsize > 1 or rows.dtype == matrix.dtype:
        return rows, matrix.astype(rows.dtype)
    return rows.astype(jnp.bfloat16), matrix.astype(jnp.bfloat16)  # two kinds of float8


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], sums: str) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.dtype(sums),
    )
