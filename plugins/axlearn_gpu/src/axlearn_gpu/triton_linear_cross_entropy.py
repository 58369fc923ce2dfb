"""Linear cross-entropy whose forward pass keeps logits on chip: Triton kernels.

Forward, a program multiplies a block of tokens with its part of the vocabulary and keeps running
sums only; XLA joins the parts. Backward, chunks of logits come from XLA's matmuls (which are tuned,
as are the two products that follow), and one kernel turns them into their gradient.

Shape legend: m tokens, d hidden dim, v vocabulary, p parts of the vocabulary, c tokens of a chunk.

References:
    Cut cross-entropy, arXiv:2411.09009.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from jax import lax

from axcore.ops import LinearCrossEntropy
from axlearn_gpu._capability import current_capability
from axlearn_gpu._triton import inlined, power_of_two, triton_call

__all__ = ["linear_cross_entropy_triton"]

# Logits of one chunk of the backward pass (64 MiB of float32), as in the reference.
_CHUNK_LOGITS = 2**24
_TOKENS, _WORDS, _DIMS = 64, 128, 32  # block of the forward product
_PARTS = 8  # of the vocabulary, so that few tokens too keep all multiprocessors busy
_COLUMNS = 1024  # block of the gradient kernel


@inlined
def _capped(logits, cap: tl.constexpr):
    # cap * tanh(x / cap); tanh(z) = 2 sigmoid(2z) - 1
    return cap * (2.0 * tl.sigmoid(2.0 * logits / cap) - 1.0)


@triton.jit
def _forward_kernel(
    hidden_ptr,
    weight_ptr,
    target_ptr,
    peak_ptr,
    sum_ptr,
    picked_ptr,
    total_ptr,
    tokens: tl.constexpr,
    dim: tl.constexpr,
    words: tl.constexpr,
    word_stride: tl.constexpr,
    dim_stride: tl.constexpr,
    part_words: tl.constexpr,
    cap: tl.constexpr,
    precision: tl.constexpr,
    block_tokens: tl.constexpr,
    block_words: tl.constexpr,
    block_dims: tl.constexpr,
):
    token = tl.program_id(0) * block_tokens + tl.arange(0, block_tokens)
    part = tl.program_id(1)
    real = token < tokens
    target = tl.load(target_ptr + token, mask=real, other=-1)
    peak = tl.full((block_tokens,), -1e30, dtype=tl.float32)
    total_weight = tl.zeros((block_tokens,), dtype=tl.float32)
    picked = tl.zeros((block_tokens,), dtype=tl.float32)
    total = tl.zeros((block_tokens,), dtype=tl.float32)
    for start in range(0, part_words, block_words):
        word = part * part_words + start + tl.arange(0, block_words)
        known = word < words
        logits = tl.zeros((block_tokens, block_words), dtype=tl.float32)
        for d in range(0, dim, block_dims):
            here = d + tl.arange(0, block_dims)
            hidden = tl.load(
                hidden_ptr + token.to(tl.int64)[:, None] * dim + here[None, :],
                mask=real[:, None] & (here < dim)[None, :],
                other=0.0,
            )
            weight = tl.load(
                weight_ptr
                + word.to(tl.int64)[None, :] * word_stride
                + here.to(tl.int64)[:, None] * dim_stride,
                mask=known[None, :] & (here < dim)[:, None],
                other=0.0,
            ).to(hidden.dtype)
            logits = tl.dot(hidden, weight, acc=logits, input_precision=precision)
        if cap > 0:
            logits = _capped(logits, cap)
        shown = tl.where(known[None, :], logits, -1e30)
        higher = tl.maximum(peak, tl.max(shown, axis=1))
        weights = tl.where(known[None, :], tl.exp(shown - higher[:, None]), 0.0)
        total_weight = total_weight * tl.exp(peak - higher) + tl.sum(weights, axis=1)
        peak = higher
        chosen = word[None, :] == target[:, None]
        picked += tl.sum(tl.where(chosen, logits, 0.0), axis=1)
        total += tl.sum(tl.where(known[None, :], logits, 0.0), axis=1)
    at = part * tokens + token
    tl.store(peak_ptr + at, peak, mask=real)
    tl.store(sum_ptr + at, total_weight, mask=real)
    tl.store(picked_ptr + at, picked, mask=real)
    tl.store(total_ptr + at, total, mask=real)


@triton.jit
def _gradient_kernel(
    logits_ptr,
    target_ptr,
    log_z_ptr,
    grad_log_z_ptr,
    grad_picked_ptr,
    grad_total_ptr,
    out_ptr,
    words: tl.constexpr,
    valid: tl.constexpr,
    cap: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * block + tl.arange(0, block)
    inside = word < words
    logits = tl.load(logits_ptr + token * words + word, mask=inside, other=0.0)
    slope = tl.full((block,), 1.0, dtype=tl.float32)
    if cap > 0:
        logits = _capped(logits, cap)
        slope = 1.0 - (logits / cap) * (logits / cap)
    grad = tl.exp(logits - tl.load(log_z_ptr + token)) * tl.load(grad_log_z_ptr + token)
    grad += tl.load(grad_total_ptr + token)
    chosen = word == tl.load(target_ptr + token)
    grad += tl.where(chosen, tl.load(grad_picked_ptr + token), 0.0)
    grad = tl.where(word < valid, grad * slope, 0.0)
    tl.store(out_ptr + token * words + word, grad.to(out_ptr.dtype.element_ty), mask=inside)


class _Static(NamedTuple):
    """Hashable facts of a call."""

    layout: str
    cap: float
    valid: int
    chunk: int
    capability: int


def linear_cross_entropy_triton(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None = None,
    *,
    layout: str = "vd",
    logit_cap: float | None = None,
    label_smoothing: float = 0.0,
    valid_vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    dot_general: object | None = None,
) -> LinearCrossEntropy:
    """Cross-entropy per token; arguments as for :func:`axcore.ops.linear_cross_entropy`.

    Args:
        hidden: (..., D) float.
        weight: (V, D) or (D, V) float.
        targets: (...) int; negative ones are masked.
        mask: (...) or None.
        layout: ``vd`` or ``dv``.
        logit_cap: Soft cap, or None.
        label_smoothing: Share of the uniform distribution.
        valid_vocab_size: Words that count, or None for all.
        chunk_tokens: Tokens of one chunk of the backward pass.
        dot_general: None; see :func:`axlearn_gpu.supports.triton_linear_cross_entropy`.

    Returns:
        Loss, z-loss and correctness, (...) each.
    """
    del dot_general
    words = weight.shape[0 if layout == "vd" else 1]
    static = _Static(
        layout,
        0.0 if logit_cap is None else float(logit_cap),
        valid_vocab_size or words,
        max(1, min(targets.size, chunk_tokens or _CHUNK_LOGITS // words)),
        current_capability(),
    )
    seen = targets >= 0
    if mask is not None:
        seen = seen & mask.astype(bool)
    ids = jnp.maximum(targets, 0).reshape(-1).astype(jnp.int32)
    results: Any = _statistics(static, hidden.reshape(-1, hidden.shape[-1]), weight, ids)
    log_z, picked, total, peak = (x.reshape(targets.shape) for x in results)
    loss = log_z - (1.0 - label_smoothing) * picked
    if label_smoothing:
        loss = loss - (label_smoothing / static.valid) * total
    return LinearCrossEntropy(
        jnp.where(seen, loss, 0.0), jnp.where(seen, jnp.square(log_z), 0.0), seen & (picked >= peak)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _statistics(
    static: _Static, hidden: jax.Array, weight: jax.Array, ids: jax.Array
) -> tuple[jax.Array, ...]:
    """Log-partition, the target's logit, the sum of logits and the largest, (m,) float32 each."""
    tokens, dim = hidden.shape
    words = static.valid
    by_word = static.layout == "vd"
    parts = min(_PARTS, -(-words // _WORDS))
    part_words = -(-words // (parts * _WORDS)) * _WORDS
    block_tokens = min(_TOKENS, max(16, power_of_two(tokens)))
    shape = jax.ShapeDtypeStruct((parts, tokens), jnp.float32)
    peaks, sums, picked, total = triton_call(
        _forward_kernel,
        hidden,
        weight,
        ids,
        out_shape=(shape, shape, shape, shape),
        grid=(-(-tokens // block_tokens), parts),
        capability=static.capability,
        num_warps=4,
        num_stages=3 if hidden.dtype.itemsize == 2 else 2,
        tokens=tokens,
        dim=dim,
        words=words,
        word_stride=dim if by_word else 1,
        dim_stride=1 if by_word else weight.shape[1],
        part_words=part_words,
        cap=static.cap,
        precision="ieee" if hidden.dtype == jnp.float32 else "tf32",
        block_tokens=block_tokens,
        block_words=_WORDS,
        block_dims=_DIMS,
    )
    peak = jnp.max(peaks, axis=0)
    log_z = peak + jnp.log(jnp.sum(sums * jnp.exp(peaks - peak[None, :]), axis=0))
    return log_z, jnp.sum(picked, axis=0), jnp.sum(total, axis=0), peak


def _statistics_fwd(
    static: _Static, hidden: jax.Array, weight: jax.Array, ids: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    results: Any = _statistics(static, hidden, weight, ids)
    return results, (hidden, weight, ids, results[0])


def _statistics_bwd(
    static: _Static, saved: tuple[jax.Array, ...], grads: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, None]:
    hidden, weight, ids, log_z = saved
    per_token = (ids, log_z, *grads[:3])  # the largest logit is only compared with
    tokens = ids.size
    num_chunks = -(-tokens // static.chunk)
    padding = num_chunks * static.chunk - tokens

    def cut(x: jax.Array) -> jax.Array:  # padding has gradients of zero
        x = jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(num_chunks, static.chunk, *x.shape[1:])

    cast = weight.astype(hidden.dtype)

    def body(grad_weight: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        grad_hidden, more = _chunk_gradients(static, xs[0], cast, *xs[1:])
        return grad_weight + more, grad_hidden

    zeros = jnp.zeros(weight.shape, jnp.float32)
    xs = (cut(hidden), *(cut(x) for x in per_token))
    grad_weight, grad_hidden = lax.scan(body, zeros, xs)
    grad_hidden = grad_hidden.reshape(-1, hidden.shape[-1])[:tokens]
    return grad_hidden.astype(hidden.dtype), grad_weight.astype(weight.dtype), None


_statistics.defvjp(_statistics_fwd, _statistics_bwd)


def _chunk_gradients(
    static: _Static, hidden: jax.Array, weight: jax.Array, ids: jax.Array, *per_token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients (c, d) of a chunk's hidden states and (v, d) or (d, v) of the weight, float32."""
    word_dim = 0 if static.layout == "vd" else 1

    def product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
        return lax.dot_general(
            a,
            b,
            (((contract[0],), (contract[1],)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    logits = product(hidden, weight, (1, 1 - word_dim))
    words = logits.shape[1]
    (grad,) = triton_call(
        _gradient_kernel,
        logits,
        ids,
        *per_token,
        out_shape=(jax.ShapeDtypeStruct(logits.shape, hidden.dtype),),
        grid=(logits.shape[0], -(-words // _COLUMNS)),
        capability=static.capability,
        words=words,
        valid=static.valid,
        cap=static.cap,
        block=_COLUMNS,
    )
    grad_hidden = product(grad, weight, (1, word_dim))
    lhs, rhs = (grad, hidden) if word_dim == 0 else (hidden, grad)
    return grad_hidden, product(lhs, rhs, (0, 0))
