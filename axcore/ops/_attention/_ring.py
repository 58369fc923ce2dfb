"""Ring attention: queries stay, keys and values travel around the devices that split the sequence.

Each device holds its part of the queries and sees the others' keys one block at a time, passed from
neighbour to neighbour, with a running maximum and sum (Liu et al., arXiv:2310.01889). The backward
pass is a second ring in which keys travel with the gradients that the devices add to: what is kept
for it is local, as is every buffer, and no (t, s) array exists. Blocks that the mask hides are not
computed. Under a causal mask the positions are laid out in zigzag (see :class:`RingPlan`), so
that no device waits for another.

Shape legend, of one device: b batch, k key/value heads, g query heads per key/value head, x chunks
of c queries, y chunks of s keys, h head dim, v value dim.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from axcore.ops._attention._ring_plan import RingPlan, plan_ring
from axcore.ops.masks import Full, Mask, MaskArrays

__all__ = ["KEY_CHUNK", "QUERY_CHUNK", "attention_ring"]

#: Most queries and keys whose logits exist at a time.
QUERY_CHUNK = 512
KEY_CHUNK = 1024


class _Static(NamedTuple):
    """Hashable facts of a call."""

    mask: Mask
    axes: tuple[str, ...]
    num_devices: int
    plan: RingPlan
    scale: float
    logit_cap: float | None


class _Rows(NamedTuple):
    """The queries of a device, in chunks."""

    q_xbkgch: jax.Array
    positions_xbc: jax.Array  # (x, 1 | b, c)
    segment_ids_xbc: jax.Array | None


class _Columns(NamedTuple):
    """Keys and what travels with them, in chunks."""

    k_ybksh: jax.Array
    v_ybksv: jax.Array
    positions_ybs: jax.Array | None  # None: they follow from the device that the block is of
    segment_ids_ybs: jax.Array | None
    valid_ybs: jax.Array | None


class _Everywhere(NamedTuple):
    """What all devices have."""

    prefix_lengths: jax.Array | None
    window: jax.Array | None
    sinks_kg: jax.Array | None  # float32


class _Running(NamedTuple):
    """The softmax so far, per chunk: (x, b, k, g, c, 1) float32, sum_v of the values."""

    peak: jax.Array
    total: jax.Array
    values: jax.Array


def attention_ring(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    logit_scale: float | jax.Array,
    mesh_axes: dict[str, tuple[str, ...]],
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    kv_valid: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    prefix_lengths: jax.Array | None = None,
    window: jax.Array | int | None = None,
    logit_cap: float | None = None,
    sinks: jax.Array | None = None,
    qk_dot_general: None = None,
    pv_dot_general: None = None,
    view: None = None,
) -> jax.Array:
    """Computes attention inside ``shard_map``; arguments as in :func:`axcore.ops.attention`.

    Args:
        q: (B, T, N, H) of this device; keys and all that has positions likewise.
        k: (B, T, K, H).
        v: (B, T, K, V).
        mask: The mask.
        logit_scale: Factor of the logits.
        mesh_axes: ``{"seq": mesh axes that split the positions}``.
        q_positions: (T,) or (B, T), or None when positions are indices.
        kv_positions: (T,) or (B, T), or None when positions are indices.
        kv_valid: (B, T) bool.
        q_segment_ids: (B, T) int.
        kv_segment_ids: (B, T) int.
        prefix_lengths: (B,) int.
        window: () int.
        logit_cap: Soft cap.
        sinks: (N,).
        qk_dot_general: Not replaceable here.
        pv_dot_general: Not replaceable here.
        view: No cache is served.

    Returns:
        (B, T, N, V) in q's dtype.
    """
    assert qk_dot_general is None and pv_dot_general is None and view is None
    dtype = q.dtype
    if not isinstance(logit_scale, int | float):
        q, logit_scale = q.astype(jnp.float32) * logit_scale, 1.0
    axes = tuple(mesh_axes["seq"])
    num_devices = math.prod(lax.axis_size(a) for a in axes)
    b, t, n, h = q.shape
    num_kv = k.shape[2]
    indexed = q_positions is None and kv_positions is None
    plan = plan_ring(mask, t, num_devices) if indexed else RingPlan(False, num_devices)
    static = _Static(mask, axes, num_devices, plan, float(logit_scale), logit_cap)
    if plan.zigzag:
        q, k, v = (_zigzag(static, x) for x in (q, k, v))
        kv_valid, q_segment_ids, kv_segment_ids = (
            None if x is None else _zigzag(static, x)
            for x in (kv_valid, q_segment_ids, kv_segment_ids)
        )
    own = _positions(static, lax.axis_index(axes), t)
    if not indexed and kv_positions is None:
        kv_positions = own
    piece = t // 2 if plan.zigzag else t
    c, s = _divisor(piece, QUERY_CHUNK), _divisor(piece, KEY_CHUNK)
    rows = _Rows(
        _chunks(q.reshape(b, t, num_kv, n // num_kv, h), c).transpose(0, 1, 3, 4, 2, 5),
        _chunks(jnp.atleast_2d(own if q_positions is None else q_positions), c),
        None if q_segment_ids is None else _chunks(q_segment_ids, c),
    )
    columns = _Columns(
        _chunks(k, s).transpose(0, 1, 3, 2, 4),
        _chunks(v, s).transpose(0, 1, 3, 2, 4),
        None if kv_positions is None else _chunks(jnp.atleast_2d(kv_positions), s),
        None if kv_segment_ids is None else _chunks(kv_segment_ids, s),
        None if kv_valid is None else _chunks(kv_valid, s),
    )
    everywhere = _Everywhere(
        prefix_lengths,
        None if window is None else jnp.asarray(window),
        None if sinks is None else sinks.astype(jnp.float32).reshape(num_kv, n // num_kv),
    )
    out_xbkgcv: Any = _ring(static, rows, columns, everywhere)
    out = out_xbkgcv.transpose(1, 0, 4, 2, 3, 5).reshape(b, t, n, v.shape[-1])
    if plan.zigzag:
        out = _zigzag(static, out, back=True)
    return out.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(static: _Static, rows: _Rows, columns: _Columns, everywhere: _Everywhere) -> jax.Array:
    """(x, b, k, g, c, v) in q's dtype."""
    return _forward(static, rows, columns, everywhere)[0]


def _forward(
    static: _Static, rows: _Rows, columns: _Columns, everywhere: _Everywhere
) -> tuple[jax.Array, Any]:
    me = lax.axis_index(static.axes)

    def see(columns: _Columns, hop: jax.Array | int, running: _Running) -> _Running:
        block = _placed(static, columns, (me - hop) % static.num_devices)

        def keys(running: _Running, column: _Columns) -> tuple[_Running, None]:
            def queries(_: None, xs: tuple[_Rows, _Running]) -> tuple[None, _Running]:
                row, state = xs
                return None, _when(
                    _reaches(static, row, column, everywhere),
                    lambda: _add(static, row, column, everywhere, state),
                    lambda: state,
                )

            return lax.scan(queries, None, (rows, running))[1], None

        return lax.scan(keys, running, block)[0]

    def step(
        carry: tuple[_Columns, _Running], hop: jax.Array
    ) -> tuple[tuple[_Columns, _Running], None]:
        columns, running = carry
        following = _pass_on(static, columns)  # on its way while these are computed
        return (following, see(columns, hop, running)), None

    carry = (columns, _nothing_seen(rows, columns, everywhere))
    last = static.plan.hops - 1
    carry, _ = lax.scan(step, carry, jnp.arange(last, dtype=jnp.int32))
    running = see(carry[0], last, carry[1])
    saw = running.total > 0.0
    out = running.values / jnp.where(saw, running.total, 1.0)
    out = out.astype(rows.q_xbkgch.dtype)
    # exp(logits - log_total) are the weights; of rows that see nothing none is ever asked for.
    log_total = jnp.where(saw, _finite(running.peak) + jnp.log(running.total), 0.0)
    return out, (rows, columns, everywhere, out, log_total)


def _backward(
    static: _Static, residuals: Any, grad: jax.Array
) -> tuple[_Rows, _Columns, _Everywhere]:
    rows, columns, everywhere, out, log_total = residuals
    me = lax.axis_index(static.axes)
    grad = grad.astype(rows.q_xbkgch.dtype)
    product = grad.astype(jnp.float32) * out.astype(jnp.float32)
    delta = jnp.sum(product, axis=-1, keepdims=True)
    grad_sinks = None
    if everywhere.sinks_kg is not None:
        share = jnp.exp(everywhere.sinks_kg[None, None, :, :, None, None] - log_total)
        grad_sinks = -jnp.sum(share * delta, axis=(0, 1, 4, 5))

    def see(columns: _Columns, hop: jax.Array | int, grads: Any) -> Any:
        block = _placed(static, columns, (me - hop) % static.num_devices)
        grad_q, grad_k, grad_v = grads

        def keys(grad_q: jax.Array, xs: Any) -> tuple[jax.Array, Any]:
            column, grads_kv = xs

            def queries(grads_kv: Any, xs: Any) -> tuple[Any, jax.Array]:
                row, row_grad, row_log_total, row_delta, row_grad_q = xs
                terms = (row_grad, row_log_total, row_delta)
                return _when(
                    _reaches(static, row, column, everywhere),
                    lambda: _add_gradients(
                        static, row, column, everywhere, terms, grads_kv, row_grad_q
                    ),
                    lambda: (grads_kv, row_grad_q),
                )

            grads_kv, grad_q = lax.scan(queries, grads_kv, (rows, grad, log_total, delta, grad_q))
            return grad_q, grads_kv

        grad_q, (grad_k, grad_v) = lax.scan(keys, grad_q, (block, (grad_k, grad_v)))
        return grad_q, grad_k, grad_v

    def step(carry: Any, hop: jax.Array) -> tuple[Any, None]:
        columns, grads = carry
        following = _pass_on(static, columns)
        grad_q, grad_k, grad_v = see(columns, hop, grads)
        return (following, (grad_q, *_pass_on(static, (grad_k, grad_v)))), None

    # Gradients of keys travel in float32: each device adds to them.
    zeros = tuple(
        jnp.zeros(x.shape, jnp.float32) for x in (rows.q_xbkgch, columns.k_ybksh, columns.v_ybksv)
    )
    last = static.plan.hops - 1
    carry, _ = lax.scan(step, (columns, zeros), jnp.arange(last, dtype=jnp.int32))
    grad_q, grad_k, grad_v = see(carry[0], last, carry[1])
    grad_k, grad_v = _pass_on(static, (grad_k, grad_v), -last)  # home
    return (
        _Rows(grad_q.astype(rows.q_xbkgch.dtype), None, None),  # pyright: ignore[reportArgumentType]
        _Columns(
            grad_k.astype(columns.k_ybksh.dtype),
            grad_v.astype(columns.v_ybksv.dtype),
            None,
            None,
            None,
        ),
        _Everywhere(None, None, grad_sinks),
    )


_ring.defvjp(_forward, _backward)


def _nothing_seen(rows: _Rows, columns: _Columns, everywhere: _Everywhere) -> _Running:
    """The softmax of no keys: of the sinks alone, if there are."""
    shape = (*rows.q_xbkgch.shape[:-1], 1)
    values = jnp.zeros((*shape[:-1], columns.v_ybksv.shape[-1]), jnp.float32)
    if everywhere.sinks_kg is None:
        return _Running(jnp.full(shape, -jnp.inf), jnp.zeros(shape), values)
    sinks = everywhere.sinks_kg[None, None, :, :, None, None]
    return _Running(jnp.broadcast_to(sinks, shape), jnp.ones(shape), values)


def _add(
    static: _Static, row: _Rows, column: _Columns, everywhere: _Everywhere, running: _Running
) -> _Running:
    """The softmax of a chunk of queries after a chunk of keys."""
    logits, seen, _ = _logits(static, row, column, everywhere)
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)
    peak = jnp.maximum(running.peak, jnp.max(logits, axis=-1, keepdims=True))
    weights = jnp.exp(logits - _finite(peak))
    shrunk = jnp.exp(running.peak - _finite(peak))
    values = lax.dot_general(
        weights.astype(column.v_ybksv.dtype),
        column.v_ybksv,
        (((4,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    total = running.total * shrunk + jnp.sum(weights, axis=-1, keepdims=True)
    return _Running(peak, total, running.values * shrunk + values)


def _add_gradients(
    static: _Static,
    row: _Rows,
    column: _Columns,
    everywhere: _Everywhere,
    terms: tuple[jax.Array, jax.Array, jax.Array],
    grads_kv: tuple[jax.Array, jax.Array],
    grad_q: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Adds what a chunk of queries and one of keys owe each other (arXiv:2205.14135, app. B)."""
    grad, log_total, delta = terms
    q, k, v = row.q_xbkgch, column.k_ybksh, column.v_ybksv
    logits, seen, slope = _logits(static, row, column, everywhere)
    weights = jnp.exp(logits - log_total)
    if seen is not None:
        weights = jnp.where(seen, weights, 0.0)
    over_queries = (((2, 3), (2, 3)), ((0, 1), (0, 1)))  # (b, k, s, h)
    grad_v = lax.dot_general(
        weights.astype(grad.dtype), grad, over_queries, preferred_element_type=jnp.float32
    )
    grad_weights = lax.dot_general(
        grad,
        v.astype(grad.dtype),
        (((4,), (3,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    grad_logits = weights * (grad_weights - delta) * static.scale
    if slope is not None:
        grad_logits = grad_logits * slope
    grad_logits = grad_logits.astype(q.dtype)
    grad_k = lax.dot_general(grad_logits, q, over_queries, preferred_element_type=jnp.float32)
    added_q = lax.dot_general(
        grad_logits,
        k.astype(q.dtype),
        (((4,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    return (grads_kv[0] + grad_k, grads_kv[1] + grad_v), grad_q + added_q


def _logits(
    static: _Static, row: _Rows, column: _Columns, everywhere: _Everywhere
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Logits (b, k, g, c, s) float32, what is seen of them, and the slope of the soft cap."""
    logits = lax.dot_general(
        row.q_xbkgch,
        column.k_ybksh.astype(row.q_xbkgch.dtype),
        (((4,), (3,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    logits = logits * static.scale
    slope = None
    if static.logit_cap is not None:
        bounded = jnp.tanh(logits / static.logit_cap)
        logits, slope = static.logit_cap * bounded, 1.0 - jnp.square(bounded)
    seen = None
    if not isinstance(static.mask, Full):
        assert column.positions_ybs is not None
        seen = static.mask.dense(
            row.positions_xbc, column.positions_ybs, _arrays(row, column, everywhere)
        )[:, None, None]
    if column.valid_ybs is not None:
        valid = column.valid_ybs[:, None, None, None, :]
        seen = valid if seen is None else seen & valid
    return logits, seen, slope


def _reaches(static: _Static, row: _Rows, column: _Columns, everywhere: _Everywhere) -> Any:
    """Whether any of these queries may see any of these keys: True, or () bool."""
    assert column.positions_ybs is not None
    q, kv = ((jnp.min(p), jnp.max(p)) for p in (row.positions_xbc, column.positions_ybs))
    return static.mask.reaches(q, kv, _arrays(row, column, everywhere))


def _arrays(row: _Rows, column: _Columns, everywhere: _Everywhere) -> MaskArrays:
    return MaskArrays(
        row.segment_ids_xbc,
        column.segment_ids_ybs,
        everywhere.prefix_lengths,
        everywhere.window,
    )


def _when(reaches: Any, then: Any, otherwise: Any) -> Any:
    return then() if reaches is True else lax.cond(reaches, then, otherwise)


def _finite(peak: jax.Array) -> jax.Array:
    """0 for rows that have seen nothing: exp(-inf - 0) is 0, and exp(-inf + inf) is not."""
    return jnp.where(peak == -jnp.inf, 0.0, peak)


def _placed(static: _Static, columns: _Columns, source: jax.Array) -> _Columns:
    """The keys of device ``source`` with their positions."""
    if columns.positions_ybs is not None:
        return columns
    y, _, _, s, _ = columns.k_ybksh.shape
    positions = _positions(static, source, y * s).reshape(y, 1, s)
    return columns._replace(positions_ybs=positions)


def _positions(static: _Static, device: jax.Array, num_local: int) -> jax.Array:
    """(t,) int32: the positions that a device holds."""
    offsets = jnp.arange(num_local, dtype=jnp.int32)
    device = device.astype(jnp.int32)
    if not static.plan.zigzag:
        return device * num_local + offsets
    half = num_local // 2
    first, second = device * half, (2 * static.num_devices - 1 - device) * half
    return jnp.where(offsets < half, first + offsets, second + offsets - half)


def _pass_on(static: _Static, tree: Any, places: int = 1) -> Any:
    n = static.num_devices
    moves = [(i, (i + places) % n) for i in range(n)]
    return jax.tree.map(lambda x: lax.ppermute(x, static.axes, moves), tree)


def _zigzag(static: _Static, x: jax.Array, *, back: bool = False) -> jax.Array:
    """Exchanges halves of (b, t, ...): device i gets pieces i and 2 n - 1 - i of the sequence.

    Of each device's two pieces, 2 i and 2 i + 1, one kind is exchanged by one permutation. A device
    ends with one even and one odd piece.
    """
    n = static.num_devices
    even_is_first = lax.axis_index(static.axes) % 2 == 0

    def moves(kind: int) -> list[tuple[int, int]]:
        pieces = [2 * i + kind for i in range(n)]
        pairs = [(i, min(piece, 2 * n - 1 - piece)) for i, piece in enumerate(pieces)]
        return [(b, a) for a, b in pairs] if back else pairs

    first, second = jnp.split(x, 2, axis=1)
    if back:
        first, second = _swap(even_is_first, first, second)
    first, second = (
        lax.ppermute(half, static.axes, moves(kind)) for kind, half in enumerate((first, second))
    )
    if not back:
        first, second = _swap(even_is_first, first, second)
    return jnp.concatenate([first, second], axis=1)


def _swap(keep: jax.Array, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.where(keep, a, b), jnp.where(keep, b, a)


def _chunks(x: jax.Array, size: int) -> jax.Array:
    """(b, t, ...) -> (chunks, b, size, ...)."""
    b, t = x.shape[:2]
    return jnp.moveaxis(x.reshape(b, t // size, size, *x.shape[2:]), 1, 0)


def _divisor(size: int, limit: int) -> int:
    """The largest divisor up to ``limit``, or ``size`` where all are so small that loops cost."""
    best = next(d for d in range(min(size, limit), 0, -1) if size % d == 0)
    return best if 8 * best >= min(size, limit) else size
