"""Attention in plain XLA: the reference that every kernel is compared with, and the CPU's choice.

Shape legend: b batch, t queries, s keys, n query heads, k key/value heads, g = n / k query heads
per key/value head, h head dim, v value dim, c queries per chunk, x chunks.

Layout (measured on CPU, see docs/profile.md): heads come before positions, and the g query heads
that share a key/value head are rows of one taller matmul, so keys and values are never repeated.
The softmax is normalized after the second matmul, which saves a pass over the (t, s) scores.

Memory: queries are cut into blocks and each block looks only at the keys its mask can reach
(`Mask.kv_range`), so a causal mask costs little more than half. From ``LONG_SEQUENCE`` keys on,
blocks are scanned in chunks of ``QUERY_CHUNK`` queries and rematerialized: no (t, s) buffer exists,
forward or backward. The result is exact in either form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from axcore.ops._attention._softmax import softmax_values, weigh
from axcore.ops._select import ambient_target, sharded_axes
from axcore.ops.masks import Full, Mask, MaskArrays
from axcore.transforms import remat, scan

__all__ = ["LONG_SEQUENCE", "QUERY_CHUNK", "attention_xla"]

#: Keys from which on queries are scanned in rematerialized chunks.
LONG_SEQUENCE = 2048
#: Queries per rematerialized chunk.
QUERY_CHUNK = 512
#: Static query blocks that skip keys out of reach, and the fewest queries in one.
_MAX_BLOCKS = 4
_MIN_BLOCK = 128

DotGeneralFn = Callable[..., jax.Array]


class _Rows(NamedTuple):
    """What belongs to a range of queries."""

    q_bkgth: jax.Array
    positions: jax.Array | None  # (t,) or (b, t)
    segment_ids: jax.Array | None  # (b, t)
    bias: jax.Array | None  # (b|1, n|1, t|1, s)


class _Columns(NamedTuple):
    """What belongs to a range of keys."""

    k_bksh: jax.Array
    v_bksv: jax.Array
    positions: jax.Array | None  # (s,) or (b, s)
    segment_ids: jax.Array | None  # (b, s)
    valid: jax.Array | None  # (b, s) bool


class _Static(NamedTuple):
    """What is the same for all blocks."""

    mask: Mask
    arrays: MaskArrays
    scale: float | jax.Array
    logit_cap: float | None
    sinks_kg: jax.Array | None
    qk_dot: DotGeneralFn
    pv_dot: DotGeneralFn
    chunked: bool


def attention_xla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    logit_scale: float | jax.Array,
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    kv_valid: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
    window: jax.Array | int | None = None,
    bias: jax.Array | None = None,
    logit_cap: float | None = None,
    sinks: jax.Array | None = None,
    qk_dot_general: DotGeneralFn | None = None,
    pv_dot_general: DotGeneralFn | None = None,
    view: object | None = None,
) -> jax.Array:
    """Computes attention; arguments as in :func:`axcore.ops.attention`, resolved.

    Returns:
        (B, T, N, V) in q's dtype; zeros in rows that see no key.
    """
    del view  # k and v are its dense form
    arrays = MaskArrays(q_segment_ids, kv_segment_ids, prefix_lengths, window)
    b, t, n, h = q.shape
    s, num_kv = k.shape[1], k.shape[2]
    g = n // num_kv
    scale = logit_scale
    if q.dtype == jnp.float32:  # one multiply per query element instead of one per score
        q, scale = q * scale, 1.0
    q_bkgth = jnp.transpose(q.reshape(b, t, num_kv, g, h), (0, 2, 3, 1, 4))
    columns = _Columns(
        k_bksh=jnp.transpose(k, (0, 2, 1, 3)),
        v_bksv=jnp.transpose(v, (0, 2, 1, 3)),
        positions=kv_positions,
        segment_ids=arrays.kv_segment_ids,
        valid=kv_valid,
    )
    rows = _Rows(q_bkgth, q_positions, arrays.q_segment_ids, bias)
    static = _Static(
        mask,
        arrays,
        scale,
        logit_cap,
        None if sinks is None else sinks.reshape(num_kv, g).astype(jnp.float32),
        qk_dot_general or lax.dot_general,
        pv_dot_general or lax.dot_general,
        chunked=s >= LONG_SEQUENCE,
    )
    indexed = q_positions is None and kv_positions is None
    outputs: list[jax.Array] = []
    for start, stop in _blocks(
        t, indexed and not _positions_sharded() and mask.kv_range(0, 1, s) != (0, s)
    ):
        lo, hi = mask.kv_range(start, stop, s) if indexed else (0, s)
        outputs.append(
            _range(
                static, _slice_rows(rows, start, stop), _slice_columns(columns, lo, hi), start, lo
            )
        )
    out_bkgtv = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=3)
    out = jnp.transpose(out_bkgtv, (0, 3, 1, 2, 4)).reshape(b, t, n, v.shape[-1])
    return out.astype(q.dtype)


def _positions_sharded() -> bool:
    """Whether positions are sharded, so that static slices of them would move data."""
    target = ambient_target()
    return target is not None and bool(sharded_axes(target, "seq"))


def _blocks(t: int, split: bool) -> list[tuple[int, int]]:
    """Static query ranges, equal but for the last."""
    num = min(_MAX_BLOCKS, t // _MIN_BLOCK) if split else 1
    size = -(-t // max(num, 1))
    return [(i, min(i + size, t)) for i in range(0, t, size)]


def _slice_rows(rows: _Rows, start: int, stop: int) -> _Rows:
    def cut(x: jax.Array | None, axis: int) -> jax.Array | None:
        if x is None or x.shape[axis] == 1:
            return x
        return lax.slice_in_dim(x, start, stop, axis=axis)

    return _Rows(
        lax.slice_in_dim(rows.q_bkgth, start, stop, axis=3),
        cut(rows.positions, -1),
        cut(rows.segment_ids, -1),
        cut(rows.bias, -2),
    )


def _slice_columns(columns: _Columns, lo: int, hi: int) -> _Columns:
    def cut(x: jax.Array | None, axis: int) -> jax.Array | None:
        return None if x is None else lax.slice_in_dim(x, lo, hi, axis=axis)

    return _Columns(
        lax.slice_in_dim(columns.k_bksh, lo, hi, axis=2),
        lax.slice_in_dim(columns.v_bksv, lo, hi, axis=2),
        cut(columns.positions, -1),
        cut(columns.segment_ids, -1),
        cut(columns.valid, -1),
    )


def _range(
    static: _Static, rows: _Rows, columns: _Columns, q_offset: int, kv_offset: int
) -> jax.Array:
    """(b, k, g, t, v) for a range of queries and the keys it can reach, chunked when long."""
    t, s = rows.q_bkgth.shape[3], columns.k_bksh.shape[2]
    if s == 0:
        return jnp.zeros((*rows.q_bkgth.shape[:4], columns.v_bksv.shape[-1]), jnp.float32)
    if not static.chunked or t <= QUERY_CHUNK:
        return _block(static, rows, columns, q_offset, kv_offset)

    num_chunks, rest = divmod(t, QUERY_CHUNK)
    whole = num_chunks * QUERY_CHUNK

    def chunked(x: jax.Array | None, axis: int) -> jax.Array | None:
        """The query dim as a leading dim of chunks; (n, ..., c, ...)."""
        if x is None:
            return None
        if x.shape[axis] == 1:
            return jnp.broadcast_to(x, (num_chunks, *x.shape))
        x = lax.slice_in_dim(x, 0, whole, axis=axis)
        axis %= x.ndim
        shape = (*x.shape[:axis], num_chunks, QUERY_CHUNK, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def chunk(offset: jax.Array, chunk_rows: _Rows) -> jax.Array:
        return _block(static, chunk_rows, columns, offset, kv_offset)

    def body(carry: None, xs: tuple[jax.Array, _Rows]) -> tuple[None, jax.Array]:
        return carry, remat(chunk, prevent_cse=False)(*xs)

    offsets = q_offset + QUERY_CHUNK * jnp.arange(num_chunks, dtype=jnp.int32)
    xs = _Rows(
        jnp.moveaxis(
            lax.slice_in_dim(rows.q_bkgth, 0, whole, axis=3).reshape(
                *rows.q_bkgth.shape[:3], num_chunks, QUERY_CHUNK, -1
            ),
            3,
            0,
        ),
        chunked(rows.positions, -1),
        chunked(rows.segment_ids, -1),
        chunked(rows.bias, -2),
    )
    _, out_xbkgcv = scan(body, None, (offsets, xs))
    out = jnp.moveaxis(out_xbkgcv, 0, 3)
    out = out.reshape(*out.shape[:3], whole, out.shape[-1])
    if rest:
        tail = _slice_rows(rows, whole, t)
        tail_out = _block(static, tail, columns, q_offset + whole, kv_offset)
        out = jnp.concatenate([out, tail_out], axis=3)
    return out


def _block(
    static: _Static,
    rows: _Rows,
    columns: _Columns,
    q_offset: int | jax.Array,
    kv_offset: int,
) -> jax.Array:
    """Exact attention of one block, (b, k, g, t, v) float32."""
    q_bkgth, k_bksh, v_bksv = rows.q_bkgth, columns.k_bksh, columns.v_bksv
    num_kv, g, t = q_bkgth.shape[1], q_bkgth.shape[2], q_bkgth.shape[3]
    s = k_bksh.shape[2]
    logits = static.qk_dot(
        q_bkgth,
        k_bksh,
        (((4,), (3,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )  # (b, k, g, t, s)
    if not (isinstance(static.scale, float) and static.scale == 1.0):
        logits = logits * static.scale
    if static.logit_cap is not None:
        logits = static.logit_cap * jnp.tanh(logits / static.logit_cap)
    if rows.bias is not None:
        bias = jnp.asarray(rows.bias, jnp.float32)
        if bias.shape[1] == 1:
            bias = bias[:, :, None]
        else:
            bias = bias.reshape(bias.shape[0], num_kv, g, *bias.shape[2:])
        if bias.shape[-1] != 1:
            bias = lax.slice_in_dim(bias, kv_offset, kv_offset + s, axis=-1)
        logits = logits + bias
    seen = _seen(static, rows, columns, q_offset, kv_offset, t, s)
    sinks = None if static.sinks_kg is None else static.sinks_kg[None, :, :, None, None]
    if static.pv_dot is lax.dot_general:
        return cast("jax.Array", softmax_values(logits, seen, v_bksv, sinks))
    weights, total, _ = weigh(logits, seen, sinks)
    out = static.pv_dot(
        weights.astype(v_bksv.dtype),
        v_bksv,
        (((4,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )  # (b, k, g, t, v)
    return out / total


def _seen(
    static: _Static,
    rows: _Rows,
    columns: _Columns,
    q_offset: int | jax.Array,
    kv_offset: int,
    t: int,
    s: int,
) -> jax.Array | None:
    """The mask of a block, broadcastable to (b, k, g, t, s), or None when all is seen."""
    seen = None
    if not isinstance(static.mask, Full):
        q_positions = rows.positions
        if q_positions is None:
            q_positions = q_offset + jnp.arange(t, dtype=jnp.int32)
        kv_positions = columns.positions
        if kv_positions is None:
            kv_positions = kv_offset + jnp.arange(s, dtype=jnp.int32)
        arrays = static.arrays._replace(
            q_segment_ids=rows.segment_ids, kv_segment_ids=columns.segment_ids
        )
        seen = static.mask.dense(q_positions, kv_positions, arrays)
        seen = seen.reshape(-1, 1, 1, *seen.shape[-2:])
    if columns.valid is not None:
        valid = columns.valid[:, None, None, None, :]
        seen = valid if seen is None else seen & valid
    return seen
