"""cuDNN's fused attention, through JAX's public interface to it.

The library finds its algorithm when the program is compiled, so that needs cuDNN and a GPU; the
deviceless compiler takes :mod:`axlearn_gpu.pallas_attention` in its place. Grouped heads are the
library's own, without copies of keys and values.

References:
    "Attention" in NVIDIA's cuDNN frontend documentation; ``jax.nn.dot_product_attention``.
"""

from __future__ import annotations

import jax

from axcore.ops.masks import Mask
from axlearn_gpu.supports import structure

__all__ = ["attention_cudnn"]


def attention_cudnn(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    logit_scale: float,
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    **unused: object,
) -> jax.Array:
    """Attention by cuDNN; see :func:`axlearn_gpu.supports.cudnn` for what it serves.

    Args:
        q: (B, T, N, H) bfloat16 or float16.
        k: (B, S, K, H) of that dtype.
        v: (B, S, K, H) of that dtype.
        mask: Full or causal, the latter with a window to the left.
        logit_scale: Factor of the logits.
        q_positions: Not needed: a mask that reads positions takes indices.
        kv_positions: Likewise.
        unused: What ``supports`` has found to be absent.

    Returns:
        (B, T, N, H) in q's dtype.
    """
    del q_positions, kv_positions, unused
    seen = structure(mask)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=logit_scale,
        is_causal=seen.right == 0,
        local_window_size=None if seen.left is None else (seen.left, 0),
        implementation="cudnn",
    )
