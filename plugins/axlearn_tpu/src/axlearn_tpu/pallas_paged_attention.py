"""Decoding by JAX's paged attention for TPU: pages are copied from HBM while others are computed.

``jax.experimental.pallas.ops.tpu.paged_attention`` reads whole pages of blocks of the page table up
to a row's length. Entries past the length are replaced first, since they may point anywhere. Pages
must hold finite numbers even where nothing was written (a cache starts as zeros): the kernel weighs
what lies past the length with zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

__all__ = ["paged_attention_pallas"]

#: Tokens in a block of pages; two blocks of keys and of values are in VMEM at a time.
_BLOCK_TOKENS = 512


def paged_attention_pallas(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    page_table: jax.Array,
    *,
    logit_scale: float,
    logit_cap: float | None = None,
    window: None = None,
) -> jax.Array:
    """Computes attention of one query a row; arguments as in :func:`axcore.ops.paged_attention`.

    Args:
        q: (B, N, H), bfloat16 or float32.
        k_pages: (K, P, page_size, H), bfloat16, to which the kernel would round others.
        v_pages: (K, P, page_size, H), bfloat16.
        lengths: (B,) int32.
        page_table: (B, M) int32.
        logit_scale: Applied to the queries, in float32.
        logit_cap: Soft cap.
        window: ``supports`` refuses one.

    Returns:
        (B, N, H) in q's dtype.
    """
    assert window is None
    page_size, num_pages = k_pages.shape[2], page_table.shape[1]
    block = min(max(_BLOCK_TOKENS // page_size, 1), num_pages)
    used = jnp.arange(num_pages, dtype=jnp.int32) * page_size < lengths[:, None]
    table = jnp.where(used, page_table, 0).astype(jnp.int32)
    table = jnp.pad(table, ((0, 0), (0, -num_pages % block)))
    out = paged_attention(
        q.astype(jnp.float32) * logit_scale,  # its dtype is that of the running result
        k_pages,
        v_pages,
        # The kernel starts the copies of a row while it computes the one before: every row has one.
        jnp.maximum(lengths, 1).astype(jnp.int32),
        table,
        attn_logits_soft_cap=logit_cap,
        pages_per_compute_block=block,
    )
    return jnp.where((lengths > 0)[:, None, None], out, 0.0).astype(q.dtype)
