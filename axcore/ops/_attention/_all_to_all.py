"""Attention over a split sequence by exchange: positions become whole, heads are split instead.

Each of n devices sends (n - 1) / n of its queries, keys and values, computes all positions of a
n-th of the heads with whatever implementation serves such a call on one device, and sends the
outputs back (Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from axcore.ops._attention._contract import attention
from axcore.ops._select import local_implementation

__all__ = ["attention_all_to_all"]


def attention_all_to_all(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mesh_axes: dict[str, tuple[str, ...]],
    q_positions: jax.Array | None = None,
    kv_positions: jax.Array | None = None,
    kv_valid: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    view: None = None,
    **rest: Any,
) -> jax.Array:
    """Computes attention inside ``shard_map``; arguments as in :func:`axcore.ops.attention`.

    Args:
        q: (B, T, N, H) of this device; keys and all that has positions likewise.
        k: (B, T, K, H).
        v: (B, T, K, V).
        mesh_axes: ``{"seq": mesh axes that split the positions}``.
        q_positions: (T,) or (B, T), or None when positions are indices.
        kv_positions: (T,) or (B, T), or None when positions are indices.
        kv_valid: (B, T) bool.
        q_segment_ids: (B, T) int.
        kv_segment_ids: (B, T) int.
        sinks: (N,).
        view: No cache is served.
        **rest: Handed on.

    Returns:
        (B, T, N, V) in q's dtype.
    """
    assert view is None
    axes = tuple(mesh_axes["seq"])
    num_devices = math.prod(lax.axis_size(a) for a in axes)
    missing = num_devices // math.gcd(num_devices, k.shape[2])
    if missing > 1:  # fewer key/value heads than devices: some hold the same one
        k, v = (jnp.repeat(x, missing, axis=2) for x in (k, v))

    def whole(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)

    def gathered(x: jax.Array | None) -> jax.Array | None:
        """Of integers per position: a thousandth of the heads' bytes."""
        return None if x is None else lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True)

    if sinks is not None:
        local = sinks.shape[0] // num_devices
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(axes) * local, local)
    out = attention(
        whole(q),
        whole(k),
        whole(v),
        q_positions=gathered(q_positions),
        kv_positions=gathered(kv_positions),
        kv_valid=gathered(kv_valid),
        q_segment_ids=gathered(q_segment_ids),
        kv_segment_ids=gathered(kv_segment_ids),
        sinks=sinks,
        implementation=local_implementation("attention"),
        **rest,
    )
    return lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)
