"""Softmax over keys and the sum of values in one differentiable step.

With p the unnormalized weights and z their sum, o = p v / z. Derived automatically, the backward
pass keeps several (t, s) arrays and reduces over s again; here it keeps p only and uses

    dl = p (do / z · v - delta),    delta = sum(do / z * o)     (arXiv:2205.14135, appendix B),

so that a scan over layers stacks one such array. Masked places need no mask: p is 0 there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["softmax_values", "weigh"]

Residuals = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None]


def weigh(
    logits: jax.Array, seen: jax.Array | None, sinks: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Unnormalized float32 weights, their sum, and the sink's share of it.

    Args:
        logits: (..., t, s) float32.
        seen: Broadcastable to logits, bool, or None.
        sinks: Broadcastable to (..., t, 1) float32, or None.

    Returns:
        Weights (..., t, s), 0 where not seen; sum (..., t, 1), 1 for rows that see nothing; sink
        weights (..., t, 1) or None.
    """
    if seen is not None:
        logits = jnp.where(seen, logits, -jnp.inf)
    peak = jnp.max(lax.stop_gradient(logits), axis=-1, keepdims=True)
    if sinks is not None:
        peak = jnp.maximum(peak, lax.stop_gradient(sinks))
    peak = jnp.where(peak == -jnp.inf, 0.0, peak)  # rows that see nothing: exp(-inf - 0) = 0
    weights = jnp.exp(logits - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is None:
        return weights, jnp.where(total == 0.0, 1.0, total), None
    sink = jnp.exp(sinks - peak)
    return weights, total + sink, sink


@jax.custom_vjp
def softmax_values(
    logits: jax.Array, seen: jax.Array | None, v: jax.Array, sinks: jax.Array | None
) -> jax.Array:
    """Values weighed by the softmax of logits over keys.

    Args:
        logits: (b, k, g, t, s) float32.
        seen: Broadcastable to logits, bool, or None.
        v: (b, k, s, v).
        sinks: (1, k, g, 1, 1) float32, or None.

    Returns:
        (b, k, g, t, v) float32; zeros in rows that see nothing.
    """
    return _forward(logits, seen, v, sinks)[0]


def _forward(
    logits: jax.Array, seen: jax.Array | None, v: jax.Array, sinks: jax.Array | None
) -> tuple[jax.Array, Residuals]:
    weights, total, sink = weigh(logits, seen, sinks)
    weights = weights.astype(v.dtype)
    out = lax.dot_general(
        weights,
        v,
        (((4,), (2,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    out = out / total
    return out, (weights, total, v, out, sink)


def _backward(
    residuals: Residuals, grad: jax.Array
) -> tuple[jax.Array, None, jax.Array, jax.Array | None]:
    weights, total, v, out, sink = residuals
    grad = grad / total
    delta = jnp.sum(grad * out, axis=-1, keepdims=True)
    grad_sinks = None
    if sink is not None:
        grad_sinks = -jnp.sum(sink * delta, axis=(0, 3, 4), keepdims=True)
    grad = grad.astype(v.dtype)
    grad_weights = lax.dot_general(
        grad,
        v,
        (((4,), (3,)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    grad_v = lax.dot_general(
        weights,
        grad,
        (((2, 3), (2, 3)), ((0, 1), (0, 1))),
        preferred_element_type=jnp.float32,
    )
    grad_logits = weights.astype(jnp.float32) * (grad_weights - delta)
    return grad_logits, None, grad_v.astype(v.dtype), grad_sinks


softmax_values.defvjp(_forward, _backward)
