"""Linear cross-entropy in plain XLA: a scan over chunks of tokens, each rematerialized.

Shape legend: b leading dims of a chunk, d hidden dim, v vocabulary, n chunks.

The leading dims are flattened and cut into consecutive chunks: of all tokens without a mesh, of
each device's where they are sharded. Where that cannot be (a replaced product, dims that do not
divide), chunks are cut along positions with a stride, so that each device's tokens stay where they
are, and the compiler communicates in each of them. The weight enters the scan in float32 and is
cast inside, so that its gradient adds up over chunks in float32 whatever the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from axcore.ops._linear_cross_entropy._contract import LinearCrossEntropy
from axcore.ops._linear_cross_entropy._token_shards import token_shards
from axcore.ops._select import ambient_target, sharded_axes
from axcore.transforms import remat, scan

__all__ = ["CHUNK_LOGITS", "CHUNK_TOKENS", "linear_cross_entropy_xla"]

#: Logits of one chunk on one device (64 MiB of float32); inputs up to this are not chunked.
CHUNK_LOGITS = 2**24
#: Tokens that a chunk has at least: each chunk reads the weight three times and its gradient once,
#: and accelerators multiply 200 to 600 numbers in the time that one is read in.
CHUNK_TOKENS = 512


class _Static(NamedTuple):
    """Hashable facts of a call."""

    layout: str
    logit_cap: float | None
    label_smoothing: float
    valid_vocab_size: int | None
    vocab_sharded: bool


def linear_cross_entropy_xla(
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
    dot_general: Callable[..., jax.Array] | None = None,
) -> LinearCrossEntropy:
    """Reference of :func:`axcore.ops.linear_cross_entropy`."""
    seen = targets >= 0
    if mask is not None:
        seen = seen & mask.astype(bool)
    vocab_shards = _shards("vocab")
    static = _Static(layout, logit_cap, label_smoothing, valid_vocab_size, vocab_shards > 1)
    if chunk_tokens is None:
        vocab_size = weight.shape[0 if layout == "vd" else 1]
        chunk_tokens = max(CHUNK_TOKENS, CHUNK_LOGITS * vocab_shards // vocab_size)
    in_chunks = partial(_in_chunks, static, dot_general, chunk_tokens)
    arrays = (hidden, weight.astype(jnp.float32), targets, seen)
    # A replaced product may be a child, which has no context on a shard.
    shards = None if dot_general else token_shards(targets.shape, weight.shape, layout)
    if shards is None or _num_chunks(targets, chunk_tokens) == 1:
        return in_chunks(*arrays)
    return shards.run(in_chunks, *arrays)


def _num_chunks(targets: jax.Array, chunk_tokens: int) -> int:
    """Chunks of one device's tokens."""
    local_tokens = max(1, targets.size // (_shards("batch") * _shards("seq")))
    return -(-local_tokens // chunk_tokens)


def _in_chunks(
    static: _Static,
    dot_general: Callable[..., jax.Array] | None,
    chunk_tokens: int,
    hidden: jax.Array,
    weight_f32: jax.Array,
    targets: jax.Array,
    seen: jax.Array,
) -> LinearCrossEntropy:
    """Losses of all tokens, in as many chunks as it takes."""
    over = {a: _shards(a) for a in ("batch", "seq")}
    num_chunks = _num_chunks(targets, chunk_tokens)
    one_chunk = partial(_chunk, static, dot_general)
    if num_chunks == 1:
        return one_chunk(hidden, weight_f32, targets, seen)

    shape = targets.shape
    if targets.ndim == 2 and over["batch"] * over["seq"] > 1:
        num_chunks = _fitting(num_chunks, shape[1], over["seq"])

        def cut(x: jax.Array) -> jax.Array:  # (b, t, ...) -> (n, b, t / n, ...), strided
            x = x.reshape(shape[0], shape[1] // num_chunks, num_chunks, *x.shape[2:])
            return jnp.moveaxis(x, 2, 0)

        def join(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x, 0, 2).reshape(shape)
    else:
        num_tokens = targets.size
        size = -(-num_tokens // num_chunks)
        padding = num_chunks * size - num_tokens

        def cut(x: jax.Array) -> jax.Array:  # (..., d) -> (n, tokens, d); the padding is masked
            x = x.reshape(num_tokens, *x.shape[len(shape) :])
            x = jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)))
            return x.reshape(num_chunks, size, *x.shape[1:])

        def join(x: jax.Array) -> jax.Array:
            return x.reshape(-1)[:num_tokens].reshape(shape)

    def body(carry: None, xs: tuple[jax.Array, ...]) -> tuple[None, LinearCrossEntropy]:
        hidden_c, targets_c, seen_c = xs
        return carry, remat(one_chunk, prevent_cse=False)(hidden_c, weight_f32, targets_c, seen_c)

    _, out = scan(body, None, (cut(hidden), cut(targets), cut(seen)))
    return jax.tree.map(join, out)


def _fitting(num_chunks: int, length: int, shards: int) -> int:
    """The least number of chunks, at least ``num_chunks``, that cuts each shard evenly."""
    local = length // shards if length % shards == 0 else length
    return next((n for n in range(num_chunks, local) if local % n == 0), local)


def _shards(logical_axis: str) -> int:
    """Over how many devices the running call splits an axis."""
    target = ambient_target()
    if target is None or target.mesh is None:
        return 1
    return math.prod(target.mesh.shape[a] for a in sharded_axes(target, logical_axis))


def _chunk(
    static: _Static,
    dot_general: Callable[..., jax.Array] | None,
    hidden: jax.Array,
    weight_f32: jax.Array,
    targets: jax.Array,
    seen: jax.Array,
) -> LinearCrossEntropy:
    """Losses of one chunk; its logits live only here."""
    if dot_general is None:
        logits: jax.Array = cast("jax.Array", _project(static.layout, hidden, weight_f32))
    else:
        contract = ((hidden.ndim - 1,), (1 if static.layout == "vd" else 0,))
        logits = dot_general(
            hidden,
            weight_f32.astype(hidden.dtype),
            (contract, ((), ())),
            preferred_element_type=jnp.float32,
        )
    if static.logit_cap is not None:
        logits = static.logit_cap * jnp.tanh(logits / static.logit_cap)
    outputs: Any = _softmax_loss(static, logits, jnp.maximum(targets, 0))
    loss, log_z, correct = outputs
    return LinearCrossEntropy(
        jnp.where(seen, loss, 0.0), jnp.where(seen, jnp.square(log_z), 0.0), seen & correct
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _project(layout: str, hidden: jax.Array, weight_f32: jax.Array) -> jax.Array:
    """float32 logits (b, v) from one matmul in hidden's dtype, forward and backward."""
    contract = ((hidden.ndim - 1,), (1 if layout == "vd" else 0,))
    return lax.dot_general(
        hidden,
        weight_f32.astype(hidden.dtype),
        (contract, ((), ())),
        preferred_element_type=jnp.float32,
    )


def _project_fwd(
    layout: str, hidden: jax.Array, weight_f32: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _project(layout, hidden, weight_f32), (hidden, weight_f32)


def _project_bwd(
    layout: str, saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    hidden, weight_f32 = saved
    grad = grad.astype(hidden.dtype)
    vocab_dim = 0 if layout == "vd" else 1
    grad_hidden = lax.dot_general(
        grad,
        weight_f32.astype(hidden.dtype),
        (((grad.ndim - 1,), (vocab_dim,)), ((), ())),
        preferred_element_type=jnp.float32,
    ).astype(hidden.dtype)
    lead = tuple(range(hidden.ndim - 1))
    lhs, rhs = (grad, hidden) if layout == "vd" else (hidden, grad)
    grad_weight = lax.dot_general(
        lhs, rhs, ((lead, lead), ((), ())), preferred_element_type=jnp.float32
    )
    return grad_hidden, grad_weight


_project.defvjp(_project_fwd, _project_bwd)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax_loss(
    static: _Static, logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(loss, log-partition, correct) of float32 logits (b, v).

    The gradient is one fused expression over the logits; derived automatically it would scatter the
    targets into a second array of their size.
    """
    return _softmax_loss_fwd(static, logits, targets)[0]


def _softmax_loss_fwd(
    static: _Static, logits: jax.Array, targets: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    valid = _valid(static, logits)
    shown = logits if valid is None else jnp.where(valid, logits, -jnp.inf)
    peak = jnp.max(shown, axis=-1)
    log_z = peak + jnp.log(jnp.sum(jnp.exp(shown - peak[..., None]), axis=-1))
    if static.vocab_sharded:  # a gather along a sharded dim would collect the logits
        is_target = _vocab_iota(logits) == targets[..., None]
        target_logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    else:
        target_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    smoothing = static.label_smoothing
    loss = log_z - target_logit
    if smoothing:
        total = jnp.sum(logits if valid is None else jnp.where(valid, logits, 0.0), axis=-1)
        mean = total / (static.valid_vocab_size or logits.shape[-1])
        loss = log_z - (1.0 - smoothing) * target_logit - smoothing * mean
    return (loss, log_z, target_logit >= peak), (logits, log_z, targets)


def _softmax_loss_bwd(
    static: _Static,
    saved: tuple[jax.Array, jax.Array, jax.Array],
    grads: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, None]:
    logits, log_z, targets = saved
    grad_loss, grad_log_z, _ = grads
    smoothing = static.label_smoothing
    is_target = _vocab_iota(logits) == targets[..., None]
    wanted = jnp.where(is_target, (1.0 - smoothing) * grad_loss[..., None], 0.0)
    if smoothing:
        size = static.valid_vocab_size or logits.shape[-1]
        wanted = wanted + (smoothing / size) * grad_loss[..., None]
    probability = jnp.exp(logits - log_z[..., None])
    grad = probability * (grad_loss + grad_log_z)[..., None] - wanted
    valid = _valid(static, logits)
    return (grad if valid is None else jnp.where(valid, grad, 0.0)), None


_softmax_loss.defvjp(_softmax_loss_fwd, _softmax_loss_bwd)


def _vocab_iota(logits: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)


def _valid(static: _Static, logits: jax.Array) -> jax.Array | None:
    """Where the vocabulary is not padding, or None when none of it is."""
    if static.valid_vocab_size is None:
        return None
    return _vocab_iota(logits) < static.valid_vocab_size
