"""The contract of attention: arguments, checks, and the call that kernels are asked about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from axcore.errors import OpError
from axcore.ops._select import Operand, dispatch, kv_repeats
from axcore.ops.masks import Causal, Mask, MaskArrays

__all__ = ["DenseKV", "KVView", "attention"]

DotGeneralFn = Callable[..., jax.Array]
BiasFn = Callable[[jax.Array, jax.Array], jax.Array]
_CAUSAL = Causal()


class DenseKV(NamedTuple):
    """Keys and values of a cache as whole arrays.

    Attributes:
        k: (B, S, K, H).
        v: (B, S, K, V).
        positions: (S,) or (B, S) int position of each slot, or None when slot = position.
        valid: (B, S) bool, False for empty slots, or None when all are filled.
        segment_ids: (B, S) int or None.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array | None = None
    valid: jax.Array | None = None
    segment_ids: jax.Array | None = None


@runtime_checkable
class KVView(Protocol):
    """What a KV cache hands to attention. Kernels match on ``kind``."""

    @property
    def kind(self) -> str:
        """Name of the storage, such as ``dense``, ``paged`` or ``latent``."""
        ...

    def dense(self) -> DenseKV:
        """Keys and values as whole arrays, in position order or with positions."""
        ...


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"] | None = None,
    v: Float[Array, "B S K V"] | None = None,
    *,
    mask: Mask = _CAUSAL,
    view: KVView | None = None,
    q_positions: Int[Array, "*B T"] | None = None,
    kv_positions: Int[Array, "*B S"] | None = None,
    kv_valid: Bool[Array, "B S"] | None = None,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    prefix_lengths: Int[Array, " B"] | None = None,
    window: Int[Array, ""] | int | None = None,
    bias: Float[Array, "#B #N #T S"] | BiasFn | None = None,
    logit_scale: float | Float[Array, ""] | None = None,
    logit_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    qk_dot_general: DotGeneralFn | None = None,
    pv_dot_general: DotGeneralFn | None = None,
    purpose: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N V"]:
    r"""Attention of queries over keys and values, with grouped heads.

    .. math::
        o_i = \sum_j p_{ij} v_j, \qquad
        p_{ij} = \frac{m_{ij}\, e^{l_{ij}}}{\sum_{j'} m_{ij'}\, e^{l_{ij'}} + e^{\mathrm{sink}}},
        \qquad l_{ij} = \mathrm{cap}(\mathrm{scale}\; q_i \cdot k_j) + \mathrm{bias}_{ij}

    Query head ``n`` reads key/value head ``n // (N / K)`` (MHA: K = N, MQA: K = 1). Logits, softmax
    and sums are float32 whatever the inputs. A row that sees no key gives zeros, never NaN.

    Positions default to indices, so training on packed sequences needs only segment ids. When T
    differs from S, as in decoding, give ``q_positions`` (and ``kv_positions``, unless slot =
    position).

    Args:
        q: Queries, (B, T, N, H).
        k: Keys, (B, S, K, H), or None with ``view``.
        v: Values, (B, S, K, V), or None with ``view``.
        mask: Structure that kernels can inspect; see :mod:`axcore.ops.masks`.
        view: A KV cache's opaque view instead of ``k``, ``v`` and what belongs to them.
        q_positions: (T,) or (B, T) int position of each query, in tokens.
        kv_positions: (S,) or (B, S) int position of each key, in tokens.
        kv_valid: (B, S) bool; False hides a key from all queries (empty cache slots).
        q_segment_ids: (B, T) int, 0 = padding; for ``SegmentIds``.
        kv_segment_ids: (B, S) int; defaults to ``q_segment_ids`` when T = S and there is no view.
        prefix_lengths: (B,) int; for ``PrefixLM(None)``.
        window: () int, may be traced; for ``TracedWindow``.
        bias: Broadcastable to (B, N, T, S), added to the scaled and capped logits; or a function
            ``(q_positions, kv_positions) -> bias`` that is called once with the positions in use,
            (T,) or (B, T) and (S,) or (B, S), whether they were given, come from the view or are
            indices.
        logit_scale: Defaults to ``H ** -0.5``.
        logit_cap: Soft cap on scaled logits: ``cap * tanh(logit / cap)`` (Gemma 2).
        sinks: (N,) logit per head that joins the denominator only (gpt-oss).
        qk_dot_general: Replaces ``jax.lax.dot_general`` in q · k and is called like it; a function,
            or a child such as :class:`DotGeneral` (quantization).
        pv_dot_general: The same for probabilities · v.
        purpose: ``train``, ``prefill`` or ``decode``; by default ``train`` when training or outside
            a module call, else ``prefill``.
        implementation: Forces a kernel by name; it is an error if that cannot serve the call.

    Returns:
        (B, T, N, V) in q's dtype.

    Raises:
        OpError: Shapes do not fit, the mask lacks its arrays, or no kernel serves the call.

    References:
        Attention: arXiv:1706.03762; grouped queries: arXiv:2305.13245; sinks: arXiv:2309.17453.
    """
    kv_kind = None
    if view is not None:
        if k is not None or v is not None:
            raise OpError("attention got both k, v and a view", code="AX402", hint="give one")
        kv_kind = view.kind
        dense = view.dense()
        k, v = dense.k, dense.v
        kv_positions, kv_valid = dense.positions, dense.valid
        if dense.segment_ids is not None:
            kv_segment_ids = dense.segment_ids
    elif k is None or v is None:
        raise OpError("attention needs k and v, or a view", code="AX402")
    if kv_segment_ids is None and view is None and q.shape[1] == k.shape[1]:
        kv_segment_ids = q_segment_ids
    if callable(bias):
        bias = bias(_or_indices(q_positions, q.shape[1]), _or_indices(kv_positions, k.shape[1]))
    arrays = MaskArrays(q_segment_ids, kv_segment_ids, prefix_lengths, window)
    _check(q, k, v, mask, arrays, q_positions, bias, sinks)
    if logit_scale is None:
        logit_scale = float(q.shape[-1]) ** -0.5
    traced_scale = None if isinstance(logit_scale, int | float) else logit_scale
    if view is None and (times := kv_repeats(q.shape[2], k.shape[2])) > 1:
        k, v = (jnp.repeat(x, times, axis=2) for x in (k, v))
    # Kernels get keys whole, unless they communicate along seq: then as they lie, like queries.
    keys = "seq" if view is None and q.shape[1] == k.shape[1] else None
    kv_axes = ("batch", None, "kv_heads", "head_dim")
    kv_placed = ("batch", keys, "kv_heads", "head_dim")
    operands = {
        "q": Operand(q, ("batch", "seq", "heads", "head_dim")),
        "k": Operand(k, kv_axes, kv_placed),
        "v": Operand(v, kv_axes, kv_placed),
        "bias": Operand(bias, ("batch", "heads", "seq", None)),
        "sinks": Operand(sinks, ("heads",)),
        "q_positions": Operand(q_positions, _position_axes(q_positions, "seq")),
        "kv_positions": Operand(
            kv_positions, _position_axes(kv_positions, None), _position_axes(kv_positions, keys)
        ),
        "kv_valid": Operand(kv_valid, ("batch", None), ("batch", keys)),
        "q_segment_ids": Operand(q_segment_ids, ("batch", "seq")),
        "kv_segment_ids": Operand(kv_segment_ids, ("batch", None), ("batch", keys)),
        "prefix_lengths": Operand(prefix_lengths, ("batch",)),
        "window": Operand(window, ()),
        "logit_scale": Operand(traced_scale, ()),
    }
    static: dict[str, Any] = {
        "mask": mask,
        "logit_cap": logit_cap,
        "qk_dot_general": qk_dot_general,
        "pv_dot_general": pv_dot_general,
        "view": view,
    }
    if traced_scale is None:
        static["logit_scale"] = logit_scale
    return dispatch(
        "attention",
        operands,
        output_axes=("batch", "seq", "heads", "head_dim"),
        static=static,
        mask=mask,
        view=kv_kind,
        options={
            "logit_cap": logit_cap,
            "dot_general": "replaced" if qk_dot_general or pv_dot_general else "default",
        },
        purpose=purpose,
        implementation=implementation,
    )


def _or_indices(positions: jax.Array | None, num: int) -> jax.Array:
    return jnp.arange(num, dtype=jnp.int32) if positions is None else positions


def _position_axes(positions: jax.Array | None, axis: str | None) -> tuple[str | None, ...]:
    """Logical axes of (T,) or (B, T) positions."""
    return ("batch", axis) if positions is not None and positions.ndim == 2 else (axis,)


def _check(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Mask,
    arrays: MaskArrays,
    q_positions: jax.Array | None,
    bias: jax.Array | None,
    sinks: jax.Array | None,
) -> None:
    """Raises OpError unless shapes fit and the mask has what it needs."""
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise OpError(
            f"attention got q {q.shape}, k {k.shape}, v {v.shape}: expected rank 4,"
            " q (batch, positions, heads, head_dim)",
            code="AX402",
        )
    b, t, n, h = q.shape
    num_kv = k.shape[2]
    if k.shape[:3] != v.shape[:3] or k.shape[0] != b or k.shape[3] != h or n % num_kv:
        raise OpError(
            f"attention got q {q.shape}, k {k.shape}, v {v.shape}: expected k (B, S, K, H) and"
            " v (B, S, K, V) with q's B and H, and a number of query heads divisible by K",
            code="AX402",
        )
    missing = [name for name in mask.needs if getattr(arrays, name) is None]
    if missing:
        raise OpError(
            f"attention got mask {mask} without {', '.join(missing)}",
            code="AX403",
            hint="pass them to ops.attention beside the mask",
        )
    if q_positions is None and t != k.shape[1] and mask.uses_positions:
        raise OpError(
            f"attention got {t} queries and {k.shape[1]} keys with mask {mask} but no q_positions",
            code="AX403",
            hint="say where the queries are: q_positions=(T,) or (B, T), in tokens",
        )
    if sinks is not None and sinks.shape != (n,):
        raise OpError(f"attention got sinks {sinks.shape}: expected ({n},)", code="AX402")
    if bias is not None:
        full = (b, n, t, k.shape[1])
        fits = bias.ndim == 4 and all(
            got in (want, 1) for got, want in zip(bias.shape, full, strict=True)
        )
        if not fits:
            raise OpError(
                f"attention got bias {bias.shape}: expected rank 4, broadcastable to {full}",
                code="AX402",
            )
