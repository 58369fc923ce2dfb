"""Mosaic-GPU attention of tokamax, for Hopper and Blackwell; tokamax is optional.

For calls without gradient only: tokamax 0.0.17 differentiates this kernel through logits of
(queries x keys). JAX's own Mosaic-GPU attention
(``jax.experimental.pallas.ops.gpu.attention_mgpu``) is an example rather than a library: it imports
JAX's test utilities, and knows neither windows, segments nor soft caps.

References:
    https://github.com/openxla/tokamax
"""

from __future__ import annotations

import jax
from jax.extend.backend import get_default_device

from axcore.errors import OpError
from axcore.ops.masks import Mask
from axlearn_gpu.supports import structure

__all__ = ["attention_tokamax"]


def attention_tokamax(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    logit_scale: float,
    logit_cap: float | None = None,
    **unused: object,
) -> jax.Array:
    """Attention by tokamax; see :func:`axlearn_gpu.supports.tokamax_mosaic` for what it serves.

    Args:
        q: (B, T, N, H) bfloat16 or float16.
        k: (B, S, K, H) of that dtype.
        v: (B, S, K, V) of that dtype.
        mask: Full, causal or a window.
        logit_scale: Factor of the logits.
        logit_cap: Soft cap of the logits.
        unused: What ``supports`` has found to be absent or without effect.

    Returns:
        (B, T, N, V) in q's dtype.

    Raises:
        OpError: The device of this process, by which tokamax chooses, is no GPU (AX418).
    """
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # tokamax would parse this process's command line

    del unused
    kind = get_default_device().device_kind
    if "NVIDIA" not in kind:  # its test, after which "mosaic" means the kernel for TPU
        raise OpError(
            f"tokamax chooses a kernel by the device of this process, {kind!r}, not by the target",
            code="AX418",
            where="attention.tokamax_mosaic",
            hint="run it on the GPU, or trace inside jax.default_device(...) of one",
        )
    seen = structure(mask)
    far = max(q.shape[1], k.shape[1])
    window = None
    if seen.left is not None or seen.right not in (None, 0):
        window = (
            far if seen.left is None else seen.left,
            far if seen.right is None else seen.right,
        )
    return tokamax.dot_product_attention(
        q,
        k,
        v,
        scale=logit_scale,
        is_causal=seen.right == 0,
        local_window_size=window,
        logits_soft_cap=logit_cap,
        implementation="mosaic",
    )
