"""Flash attention by the vendor's NKI kernels, forward and backward.

``flash_fwd`` and ``flash_attn_bwd`` of ``neuronxcc.nki.kernels.attention`` (those that return their
results) are instantiated for each sequence and key/value head; jax-neuronx lowers them. Forward,
grouped heads share keys and values; the backward kernel knows no groups, so there keys and values
are repeated and their gradients summed. They know no segment ids: a row that has some is a call of
its own with a bias, (1, 1, T, T) float32, of which one exists at a time.

Importing this module needs the vendor's packages.

References:
    FlashAttention-2: arXiv:2307.08691; the kernels: https://github.com/aws-neuron/nki-samples
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from axcore.ops.masks import Causal, Mask, SegmentIds
from axcore.remat import site
from axlearn_neuron._layouts import (
    from_columns,
    from_rows,
    key_tile,
    repeat_heads,
    sum_heads,
    to_columns,
    to_rows,
)
from axlearn_neuron._presence import nki_attention, nki_call, vendor_module
from axlearn_neuron._target import cores_per_device

__all__ = ["attention_nki"]

_HIDDEN = -1e30  # finite: the difference of two is no NaN

nki_call()  # the bridge: without it the kernels below are no part of a JAX program
_flash_fwd, _flash_attn_bwd, _FlashConfig = nki_attention()
_nl: Any = vendor_module("neuronxcc.nki.language", "neuronx-cc")


def attention_nki(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    logit_scale: float,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    **unused: object,
) -> jax.Array:
    """Attention by NKI; see :func:`axlearn_neuron.supports.nki_flash` for what it serves.

    Args:
        q: (B, T, N, H) bfloat16, multiplied as such, or float32.
        k: (B, T, K, H) of that dtype.
        v: (B, T, K, H) of that dtype.
        mask: Full or causal, with segment ids or without.
        logit_scale: Factor of the logits.
        q_segment_ids: (B, T) int, 0 = padding, whose rows are zero.
        kv_segment_ids: (B, T) int.
        unused: What ``supports`` has found to be absent or without effect.

    Returns:
        (B, T, N, H) in q's dtype.
    """
    del unused
    causal = any(isinstance(part, Causal) for part in mask.parts())
    call = _Call(causal, logit_scale, cores_per_device())
    if not any(isinstance(part, SegmentIds) for part in mask.parts()):
        return _attention(call, q, k, v, None)
    assert q_segment_ids is not None and kv_segment_ids is not None
    rows: list[Any] = [
        _attention(call, *(x[i : i + 1] for x in (q, k, v)), (q_segment_ids[i], kv_segment_ids[i]))
        for i in range(q.shape[0])
    ]
    # The kernel has an average for a query that sees nothing; its gradient is zero with this too.
    return jnp.where((q_segment_ids != 0)[:, :, None, None], jnp.concatenate(rows), 0)


class _Call(NamedTuple):
    """What is static: the mask, the factor of the logits, cores of a device."""

    causal: bool
    scale: float
    cores: int


_Segments = tuple[jax.Array, jax.Array] | None  # of queries (T,) and of keys (T,)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: _Segments
) -> jax.Array:
    return from_rows(_run_forward(call, q, k, v, segments, training=False))


def _forward(
    call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, segments: _Segments
) -> tuple[jax.Array, Any]:
    out, log_sums = _run_forward(call, q, k, v, segments, training=True)
    # Who saves attention's values spares a second run of the kernel: these are of the same site.
    out, log_sums = (site(x, "attn_context") for x in (from_rows(out), log_sums))
    return out, (q, k, v, segments, out, log_sums)


def _backward(
    call: _Call, saved: Any, grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, segments, out, log_sums = saved
    times = q.shape[2] // k.shape[2]
    kernel: Any = _flash_attn_bwd
    grads = kernel[_grid(q.shape[0], q.shape[2], call.cores)](
        to_columns(q),
        repeat_heads(to_columns(k), times),
        repeat_heads(to_columns(v), times),
        to_columns(out),
        to_columns(grad),
        log_sums,
        _seed(),
        use_causal_mask=call.causal,
        mixed_precision=_mixed(q),
        dropout_p=0.0,
        softmax_scale=call.scale,
        **_bias(segments),
    )
    q_grad, k_grad, v_grad = grads
    return (
        from_columns(q_grad),
        from_columns(sum_heads(k_grad, times)),
        from_columns(sum_heads(v_grad, times)),
        None,
    )


_attention.defvjp(_forward, _backward)


def _run_forward(
    call: _Call,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments: _Segments,
    *,
    training: bool,
) -> Any:
    """Returns (B, N, T, H) and, in training, the logarithms of the sums, (B, N, 128, T / 128)."""
    kernel: Any = _flash_fwd
    return kernel[_grid(k.shape[0], k.shape[2], call.cores)](
        to_columns(q),
        to_columns(k),
        to_rows(v),
        _seed() if training else None,
        softmax_scale=call.scale,
        use_causal_mask=call.causal,
        mixed_precision=_mixed(q),
        dropout_p=0.0,
        config=_FlashConfig(seq_tile_size=key_tile(k.shape[1]), training=training),
        **_bias(segments),
    )


def _bias(segments: _Segments) -> dict[str, jax.Array]:
    """Returns the argument that hides other segments, (1, 1, T, T); none where there are none."""
    if segments is None:
        return {}
    of_queries, of_keys = segments
    seen = (of_queries[:, None] == of_keys[None, :]) & (of_keys != 0)[None, :]
    return {"logit_bias": jnp.where(seen, 0.0, _HIDDEN).astype(jnp.float32)[None, None]}


def _grid(batch: int, heads: int, cores: int) -> tuple[Any, Any]:
    """One instance for each sequence and head; heads are shared out among a device's cores."""
    if cores > 1 and heads % cores == 0:
        return batch, _nl.nc(cores) * (heads // cores)
    return batch, heads


def _seed() -> jax.Array:
    """The argument of dropout, which is not used."""
    return jnp.zeros((1,), jnp.int32)


def _mixed(q: jax.Array) -> bool:
    """Whether to multiply in bfloat16 and sum in float32; float32 stays float32 throughout."""
    return q.dtype == jnp.bfloat16
