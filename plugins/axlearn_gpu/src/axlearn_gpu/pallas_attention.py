"""Attention in blocks that stay on chip: a Pallas kernel, lowered through Triton.

Shape legend: b batch, t queries, s keys, n query heads, k key/value heads, g = n / k, h head dim,
v value dim. Lengths are padded to blocks and dims to powers of two, as Triton wants them.

Grouped heads read their key/value head in place. Blocks that the band of a mask (causal, window)
hides are never read. Segment ids, validity of keys and padding are one integer per position: a
query sees keys of its own, nonzero id. Float32 is multiplied in full precision.

JAX ships a kernel of this kind (``jax.experimental.pallas.ops.gpu.attention``); it repeats keys for
grouped heads, has neither windows nor soft caps, takes no other lengths than multiples of its
blocks, and averages the values where a row sees no key, which the contract wants to be zeros.

References:
    FlashAttention-2, arXiv:2307.08691.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from axcore.ops.masks import Mask
from axlearn_gpu._pallas_blocks import (
    HIDDEN,
    LOG2_E,
    MIN_DOT,
    Blocks,
    OfKeys,
    OfQueries,
    Static,
    backward_blocks,
    block_logits,
    dot,
    forward_blocks,
    keys_of,
    num_pairs,
    queries_of,
    seen_pairs,
)
from axlearn_gpu.supports import structure

__all__ = ["attention_pallas"]


def attention_pallas(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    logit_scale: float,
    logit_cap: float | None = None,
    kv_valid: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    interpret: bool = False,
    **unused: object,
) -> jax.Array:
    """Attention in blocks; see :func:`axlearn_gpu.supports.pallas_triton` for what it serves.

    Args:
        q: (B, T, N, H).
        k: (B, S, K, H) in q's dtype.
        v: (B, S, K, V) in q's dtype.
        mask: Of full, causal, window and segment parts; positions are indices.
        logit_scale: Factor of the logits.
        logit_cap: Soft cap of the logits.
        kv_valid: (B, S) bool, or None.
        q_segment_ids: (B, T) int, or None.
        kv_segment_ids: (B, S) int, or None.
        interpret: Runs the kernel's code as JAX operations, on any platform.
        unused: What ``supports`` has found to be absent or without effect.

    Returns:
        (B, T, N, V) in q's dtype.
    """
    del unused
    seen = structure(mask)
    b, t, s = q.shape[0], q.shape[1], k.shape[1]
    q_ids: jax.Array | None = None
    kv_ids: jax.Array | None = None
    if seen.segments:
        assert q_segment_ids is not None and kv_segment_ids is not None
        q_ids = q_segment_ids.astype(jnp.int32)
        kv_ids = kv_segment_ids.astype(jnp.int32)
    if kv_valid is not None:
        q_ids = jnp.ones((b, t), jnp.int32) if q_ids is None else q_ids
        kv_ids = jnp.where(kv_valid, 1 if kv_ids is None else kv_ids, 0)
    static = Static(
        scale=float(logit_scale),
        left=seen.left,
        right=seen.right,
        cap=logit_cap,
        num_keys=s,
        with_ids=q_ids is not None,
        interpret=interpret,
    )
    # Both directions share the padding: the largest of their blocks is a multiple of the others.
    dim = max(_padded_dim(x.shape[-1]) for x in (q, v))
    both = (forward_blocks(dim, q.dtype), backward_blocks(dim, q.dtype))
    q_len, kv_len = (
        -(-n // block) * block
        for n, block in ((t, max(x.q for x in both)), (s, max(x.kv for x in both)))
    )
    ids = () if q_ids is None or kv_ids is None else (_pad(q_ids, q_len), _pad(kv_ids, kv_len))
    q, k, values = _pad(_pad_dim(q), q_len), _pad(_pad_dim(k), kv_len), _pad(_pad_dim(v), kv_len)
    out: Any = _attention(static, q, k, values, ids)
    return out[:, :t, :, : v.shape[-1]]


def _padded_dim(dim: int) -> int:
    return max(MIN_DOT, 1 << (dim - 1).bit_length())


def _pad_dim(x: jax.Array) -> jax.Array:
    extra = _padded_dim(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, extra))) if extra else x


def _pad(x: jax.Array, length: int) -> jax.Array:
    """Pads dim 1 with zeros; an id of zero hides the position."""
    extra = length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, extra), *((0, 0),) * (x.ndim - 2))) if extra else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    static: Static, q: jax.Array, k: jax.Array, v: jax.Array, ids: tuple[jax.Array, ...]
) -> jax.Array:
    return _forward(static, q, k, v, ids)[0]


def _attention_fwd(
    static: Static, q: jax.Array, k: jax.Array, v: jax.Array, ids: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[Any, ...]]:
    out, lse = _forward(static, q, k, v, ids)
    return out, (q, k, v, ids, out, lse)


def _attention_bwd(
    static: Static, saved: tuple[Any, ...], grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, ids, out, lse = saved
    return (*_backward(static, q, k, v, ids, out, lse, grad), None)


_attention.defvjp(_attention_fwd, _attention_bwd)


def _forward(
    static: Static, q: jax.Array, k: jax.Array, v: jax.Array, ids: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """Output (b, t, n, v) and base-2 log-partition (b, n, t) float32; zeros if a row sees none."""
    b, t, n, h = q.shape
    s, num_kv, dim = k.shape[1], k.shape[2], v.shape[3]
    blocks = forward_blocks(max(h, dim), q.dtype)
    of = OfQueries(blocks.q, s, n // num_kv)
    return pl.pallas_call(
        functools.partial(_forward_kernel, static=static, blocks=blocks),
        grid=(t // blocks.q, n, b),
        in_specs=[of.rows(h), of.keys(h), of.keys(dim), *of.ids()[: len(ids)]],
        out_specs=[of.rows(dim), of.numbers()],
        out_shape=[
            jax.ShapeDtypeStruct((b, t, n, dim), q.dtype),
            jax.ShapeDtypeStruct((b, n, t), jnp.float32),
        ],
        **_call_options(static, blocks, "attention_forward", queries=(b, t, n), dims=h + dim),
    )(q, k, v, *ids)


def _call_options(
    static: Static, blocks: Blocks, name: str, *, queries: tuple[int, int, int], dims: int
) -> dict[str, Any]:
    """What all kernels are called with.

    Args:
        static: Facts of the call.
        blocks: Of the kernel.
        name: Of the kernel.
        queries: Rows of the batch, queries and heads.
        dims: Dims that the kernel's products sum over or make for each query and key.
    """
    b, t, n = queries
    pairs = b * n * num_pairs(static, t)
    return {
        # Loops over the blocks that a mask leaves have no length that could be read off.
        "cost_estimate": pl.CostEstimate(
            flops=2 * pairs * dims, transcendentals=pairs, bytes_accessed=0
        ),
        # Says which backend, too: without parameters JAX 0.10 would take Mosaic, 0.12 Triton.
        "compiler_params": plgpu.CompilerParams(
            num_warps=blocks.num_warps, num_stages=blocks.num_stages
        ),
        "interpret": static.interpret,
        "name": name,
    }


def _forward_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any, static: Static, blocks: Blocks
) -> None:
    *id_refs, out_ref, lse_ref = refs
    start_q = pl.program_id(0) * blocks.q
    q = q_ref[...]
    q_ids = id_refs[0][...] if static.with_ids else None

    def body(j: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        acc, peak, total = carry
        keys = pl.ds(j * blocks.kv, blocks.kv)
        logits = block_logits(static, q, k_ref[keys, :])
        seen = seen_pairs(
            static,
            (start_q, blocks.q),
            (j * blocks.kv, blocks.kv),
            q_ids,
            id_refs[1][keys] if static.with_ids else None,
        )
        logits = logits if seen is None else jnp.where(seen, logits, HIDDEN)
        higher = jnp.maximum(peak, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - higher[:, None])
        weights = weights if seen is None else jnp.where(seen, weights, 0.0)
        shrink = jnp.exp2(peak - higher)
        values = v_ref[keys, :]
        acc = acc * shrink[:, None] + dot(weights.astype(values.dtype), values, (1, 0))
        return acc, higher, total * shrink + jnp.sum(weights, axis=1)

    first, last = keys_of(static, pl.program_id(0), blocks, k_ref.shape[0])
    acc, peak, total = lax.fori_loop(
        first,
        last,
        body,
        (
            jnp.zeros((blocks.q, v_ref.shape[-1]), jnp.float32),
            jnp.full((blocks.q,), HIDDEN, jnp.float32),
            jnp.zeros((blocks.q,), jnp.float32),
        ),
    )
    some = jnp.where(total > 0.0, total, 1.0)
    out_ref[...] = (acc / some[:, None]).astype(out_ref.dtype)
    lse_ref[...] = jnp.where(total > 0.0, peak + jnp.log2(some), 0.0)


def _backward(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: tuple[jax.Array, ...],
    out: jax.Array,
    lse: jax.Array,
    grad: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k and v; each block's logits are computed once more, in two kernels."""
    b, t, n, h = q.shape
    s, num_kv, dim = k.shape[1], k.shape[2], v.shape[3]
    blocks = backward_blocks(max(h, dim), q.dtype)
    delta = jnp.einsum(
        "btnv,btnv->bnt", out.astype(jnp.float32), grad.astype(jnp.float32), precision="highest"
    )
    arrays = (q, k, v, grad, lse, delta, *ids)

    def in_specs(of: OfQueries | OfKeys) -> list[pl.BlockSpec]:
        pairs = (of.rows(h), of.keys(h), of.keys(dim), of.rows(dim))
        return [*pairs, of.numbers(), of.numbers(), *of.ids()[: len(ids)]]

    of = OfQueries(blocks.q, s, n // num_kv)
    grad_q = pl.pallas_call(
        functools.partial(_queries_kernel, static=static, blocks=blocks),
        grid=(t // blocks.q, n, b),
        in_specs=in_specs(of),
        out_specs=of.rows(h),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        **_call_options(
            static, blocks, "attention_backward_queries", queries=(b, t, n), dims=2 * h + dim
        ),
    )(*arrays)
    of = OfKeys(blocks.kv, t, n // num_kv)
    grad_k, grad_v = pl.pallas_call(
        functools.partial(_keys_kernel, static=static, blocks=blocks),
        grid=(s // blocks.kv, num_kv, b),
        in_specs=in_specs(of),
        out_specs=[of.keys(h), of.keys(dim)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v)],
        **_call_options(
            static, blocks, "attention_backward_keys", queries=(b, t, n), dims=2 * (h + dim)
        ),
    )(*arrays)
    return grad_q, grad_k, grad_v


def _queries_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    grad_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    *refs: Any,
    static: Static,
    blocks: Blocks,
) -> None:
    """Gradient of one block of queries."""
    *id_refs, out_ref = refs
    start_q = pl.program_id(0) * blocks.q
    q, grad, lse, delta = q_ref[...], grad_ref[...], lse_ref[...], delta_ref[...]
    q_ids = id_refs[0][...] if static.with_ids else None

    def body(j: Any, acc: jax.Array) -> jax.Array:
        here = pl.ds(j * blocks.kv, blocks.kv)
        k = k_ref[here, :]
        kv_ids = id_refs[1][here] if static.with_ids else None
        seen = seen_pairs(static, (start_q, blocks.q), (j * blocks.kv, blocks.kv), q_ids, kv_ids)
        _, grad_logits = _weights(static, q, k, v_ref[here, :], grad, lse, delta, seen)
        return acc + dot(grad_logits.astype(k.dtype), k, (1, 0))

    first, last = keys_of(static, pl.program_id(0), blocks, k_ref.shape[0])
    acc = lax.fori_loop(first, last, body, jnp.zeros(q.shape, jnp.float32))
    out_ref[...] = (acc * static.scale).astype(out_ref.dtype)


def _keys_kernel(
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    grad_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    *refs: Any,
    static: Static,
    blocks: Blocks,
) -> None:
    """Gradients of one block of keys and values, summed over the query heads that read them."""
    *id_refs, grad_k_ref, grad_v_ref = refs
    j = pl.program_id(0)
    k, v = k_ref[...], v_ref[...]
    kv_ids = id_refs[1][...] if static.with_ids else None
    first, last = queries_of(static, j, blocks, q_ref.shape[0])

    def of_head(head: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        def body(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            grad_k, grad_v = sums
            here = pl.ds(i * blocks.q, blocks.q)
            q, grad = q_ref[here, head, :], grad_ref[here, head, :]
            q_ids = id_refs[0][here] if static.with_ids else None
            seen = seen_pairs(
                static, (i * blocks.q, blocks.q), (j * blocks.kv, blocks.kv), q_ids, kv_ids
            )
            weights, grad_logits = _weights(
                static, q, k, v, grad, lse_ref[head, here], delta_ref[head, here], seen
            )
            grad_v = grad_v + dot(weights.astype(grad.dtype), grad, (0, 0))
            return grad_k + dot(grad_logits.astype(q.dtype), q, (0, 0)), grad_v

        return lax.fori_loop(first, last, body, carry)

    zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    grad_k, grad_v = lax.fori_loop(0, q_ref.shape[1], of_head, zeros)
    grad_k_ref[...] = (grad_k * static.scale).astype(grad_k_ref.dtype)
    grad_v_ref[...] = grad_v.astype(grad_v_ref.dtype)


def _weights(
    static: Static,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    seen: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Probabilities of a block and the gradient of its scaled logits, (t, s) float32."""
    logits = block_logits(static, q, k)
    weights = jnp.exp2(logits - lse[:, None])
    weights = weights if seen is None else jnp.where(seen, weights, 0.0)
    grad_logits = weights * (dot(grad, v, (1, 1)) - delta[:, None])
    if static.cap is not None:
        share = logits * (1.0 / (LOG2_E * static.cap))
        grad_logits = grad_logits * (1.0 - share * share)
    return weights, grad_logits
