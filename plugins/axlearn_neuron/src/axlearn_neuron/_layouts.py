"""How the vendor's attention kernels want their arrays: heads before positions.

Letters: B batch, T positions, N heads, H head dim; "columns" has a column for each position, as the
tensor engine takes what it multiplies.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = [
    "PARTITIONS",
    "from_columns",
    "from_rows",
    "key_tile",
    "repeat_heads",
    "sum_heads",
    "to_columns",
    "to_rows",
]

#: Rows of the on-chip memory: ``nki.language.tile_size.pmax``.
PARTITIONS = 128
_KEY_TILES = (2048, 1024, 512)


def to_columns(x: jax.Array) -> jax.Array:
    """Returns (B, T, N, H) as (B, N, H, T)."""
    return jnp.transpose(x, (0, 2, 3, 1))


def from_columns(x: jax.Array) -> jax.Array:
    """Returns (B, N, H, T) as (B, T, N, H)."""
    return jnp.transpose(x, (0, 3, 1, 2))


def to_rows(x: jax.Array) -> jax.Array:
    """Returns (B, T, N, H) as (B, N, T, H)."""
    return jnp.transpose(x, (0, 2, 1, 3))


def from_rows(x: jax.Array) -> jax.Array:
    """Returns (B, N, T, H) as (B, T, N, H)."""
    return jnp.transpose(x, (0, 2, 1, 3))


def repeat_heads(x: jax.Array, times: int) -> jax.Array:
    """Returns (B, K, ...) as (B, K * times, ...), each head ``times`` times in a row."""
    return x if times == 1 else jnp.repeat(x, times, axis=1)


def sum_heads(x: jax.Array, times: int) -> jax.Array:
    """Returns (B, K * times, ...) as (B, K, ...), summed in float32: what repeating pulls back."""
    if times == 1:
        return x
    grouped = x.reshape(x.shape[0], -1, times, *x.shape[2:])
    return jnp.sum(grouped.astype(jnp.float32), axis=2).astype(x.dtype)


def key_tile(num_keys: int) -> int:
    """Returns the keys that the forward kernel holds on chip at a time.

    Example:
        >>> key_tile(4096), key_tile(1536)
        (2048, 512)
    """
    return next(tile for tile in _KEY_TILES if num_keys % tile == 0)
