"""What every model that scores tokens adds to its collection."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore.context import InvocationContext
from axcore.ops import LinearCrossEntropy

__all__ = ["add_token_losses"]


def add_token_losses(
    ctx: InvocationContext,
    result: LinearCrossEntropy,
    target_mask: jax.Array,
    z_loss_weight: float,
) -> None:
    """Adds ``cross_entropy``, ``z_loss`` if it has a weight, ``accuracy`` and ``num_tokens``.

    Args:
        ctx: The model's running context.
        result: Per-token results, (batch, seq), zero where the mask is.
        target_mask: (batch, seq), 0 or False where a target does not count.
        z_loss_weight: Coefficient of the z-loss; 0 leaves it out.
    """
    weights = (target_mask != 0).astype(jnp.float32)
    num_tokens = jnp.sum(weights)
    count = jnp.maximum(num_tokens, 1.0)
    ctx.add_loss("cross_entropy", jnp.sum(result.loss) / count, num_items=num_tokens)
    if z_loss_weight:
        ctx.add_loss(
            "z_loss",
            jnp.sum(result.z_loss) / count,
            weight=z_loss_weight,
            num_items=num_tokens,
        )
    accuracy = jnp.sum(result.correct * weights) / count
    ctx.add_summary("accuracy", accuracy, reduction="weighted_mean", weight=num_tokens)
    ctx.add_summary("num_tokens", num_tokens, reduction="sum")
