"""What the Pallas attention's kernels share: blocks, logits of a block, what a mask hides.

Shape legend as in :mod:`axlearn_gpu.pallas_attention`; inside kernels t and s are those of one
block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

__all__ = [
    "HIDDEN",
    "LOG2_E",
    "MIN_DOT",
    "Blocks",
    "OfKeys",
    "OfQueries",
    "Static",
    "backward_blocks",
    "block_logits",
    "dot",
    "forward_blocks",
    "keys_of",
    "num_pairs",
    "queries_of",
    "seen_pairs",
]

LOG2_E = 1.4426950408889634
#: Below every logit, and finite: the difference of two of them is a number.
HIDDEN = -1e30
#: Triton's smallest dim of a product.
MIN_DOT = 16


class Static(NamedTuple):
    """Hashable facts of a call.

    Attributes:
        scale: Factor of the logits.
        left: Earlier positions seen, or None.
        right: Later positions seen, or None.
        cap: Soft cap of the logits, or None.
        num_keys: Keys that are not padding.
        with_ids: Whether ids restrict who sees whom.
        interpret: Whether the kernel is interpreted instead of compiled.
    """

    scale: float
    left: int | None
    right: int | None
    cap: float | None
    num_keys: int
    with_ids: bool
    interpret: bool


class Blocks(NamedTuple):
    """How much of a sequence is worked on at a time.

    Attributes:
        q: Queries.
        kv: Keys.
        num_warps: Warps of a thread block.
        num_stages: How far loads run ahead.
    """

    q: int
    kv: int
    num_warps: int
    num_stages: int


def forward_blocks(dim: int, dtype: Any) -> Blocks:
    """Block sizes of the forward kernel by the larger head dim; chosen to fit, not measured."""
    wide = jnp.dtype(dtype).itemsize > 2
    if dim <= 64:
        return Blocks(64, 32, 4, 2) if wide else Blocks(128, 64, 4, 3)
    if dim <= 128:
        return Blocks(32, 32, 4, 1) if wide else Blocks(128, 64, 8, 2)
    return Blocks(32, 16, 4, 1) if wide else Blocks(64, 32, 4, 2)


def backward_blocks(dim: int, dtype: Any) -> Blocks:
    """Block sizes of the backward kernels: five products keep more on chip than two."""
    wide = jnp.dtype(dtype).itemsize > 2
    if dim <= 64:
        return Blocks(32, 32, 4, 1) if wide else Blocks(64, 64, 4, 2)
    if dim <= 128:
        return Blocks(16, 16, 4, 1) if wide else Blocks(64, 64, 8, 1)
    return Blocks(16, 16, 4, 1) if wide else Blocks(32, 32, 4, 1)


class OfQueries(NamedTuple):
    """What a program for a block of one query head sees; its grid is (block, head, row).

    Attributes:
        block: Queries of a block.
        num_keys: Keys in all.
        group: Query heads of a key/value head.
    """

    block: int
    num_keys: int
    group: int

    def rows(self, dim: int) -> pl.BlockSpec:
        """The block of an array (b, t, n, dim)."""
        return pl.BlockSpec((None, self.block, None, dim), lambda i, head, row: (row, i, head, 0))

    def numbers(self) -> pl.BlockSpec:
        """The block of an array (b, n, t)."""
        return pl.BlockSpec((None, None, self.block), lambda i, head, row: (row, head, i))

    def keys(self, dim: int) -> pl.BlockSpec:
        """All of the head's keys in an array (b, s, k, dim)."""
        return pl.BlockSpec(
            (None, self.num_keys, None, dim), lambda i, head, row: (row, 0, head // self.group, 0)
        )

    def ids(self) -> list[pl.BlockSpec]:
        """Ids of the block's queries (b, t), and of all keys (b, s)."""
        return [
            pl.BlockSpec((None, self.block), lambda i, head, row: (row, i)),
            pl.BlockSpec((None, self.num_keys), lambda i, head, row: (row, 0)),
        ]


class OfKeys(NamedTuple):
    """What a program for a block of one key/value head sees; its grid is (block, head, row).

    Attributes:
        block: Keys of a block.
        num_queries: Queries in all.
        group: Query heads of a key/value head.
    """

    block: int
    num_queries: int
    group: int

    def rows(self, dim: int) -> pl.BlockSpec:
        """All queries of the group in an array (b, t, n, dim)."""
        return pl.BlockSpec(
            (None, self.num_queries, self.group, dim), lambda j, head, row: (row, 0, head, 0)
        )

    def numbers(self) -> pl.BlockSpec:
        """All of the group in an array (b, n, t)."""
        return pl.BlockSpec(
            (None, self.group, self.num_queries), lambda j, head, row: (row, head, 0)
        )

    def keys(self, dim: int) -> pl.BlockSpec:
        """The block of an array (b, s, k, dim)."""
        return pl.BlockSpec((None, self.block, None, dim), lambda j, head, row: (row, j, head, 0))

    def ids(self) -> list[pl.BlockSpec]:
        """Ids of all queries (b, t), and of the block's keys (b, s)."""
        return [
            pl.BlockSpec((None, self.num_queries), lambda j, head, row: (row, 0)),
            pl.BlockSpec((None, self.block), lambda j, head, row: (row, j)),
        ]


def block_logits(static: Static, q: jax.Array, k: jax.Array) -> jax.Array:
    """Scaled and capped logits times log2(e), (t, s) float32: exponentials have base 2."""
    logits = dot(q, k, (1, 1))
    if static.cap is None:
        return logits * (static.scale * LOG2_E)
    # tanh by the exponential that there is in hardware; the argument's sign keeps it from overflow.
    twice = logits * (2.0 * static.scale / static.cap)
    small = jnp.exp2(-jnp.abs(twice) * LOG2_E)
    size = (1.0 - small) / (1.0 + small)
    return jnp.where(twice < 0.0, -size, size) * (static.cap * LOG2_E)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product over dim ``contract[0]`` of a and ``contract[1]`` of b, in float32."""
    return lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def seen_pairs(
    static: Static,
    queries: tuple[Any, int],
    keys: tuple[Any, int],
    q_ids: jax.Array | None,
    kv_ids: jax.Array | None,
) -> jax.Array | None:
    """Which keys of a block the queries of a block see, (t, s) bool; None for all.

    Args:
        static: Facts of the call.
        queries: Index of the first one and their number.
        keys: Likewise.
        q_ids: (t,) or None.
        kv_ids: (s,) or None.
    """
    shape = (queries[1], keys[1])
    conditions: list[jax.Array] = []
    key = keys[0] + lax.broadcasted_iota(jnp.int32, shape, 1)
    if static.left is not None or static.right is not None:
        ahead = key - queries[0] - lax.broadcasted_iota(jnp.int32, shape, 0)
        if static.right is not None:
            conditions.append(ahead <= static.right)
        if static.left is not None:
            conditions.append(ahead >= -static.left)
    if q_ids is not None and kv_ids is not None:
        conditions += [q_ids[:, None] == kv_ids[None, :], (kv_ids != 0)[None, :]]
    elif static.num_keys % keys[1]:
        conditions.append(key < static.num_keys)
    if not conditions:
        return None
    return functools.reduce(jnp.logical_and, (jnp.broadcast_to(c, shape) for c in conditions))


def keys_of(static: Static, i: Any, blocks: Blocks, num_keys: int) -> tuple[Any, Any]:
    """First and last (exclusive) block of keys that a block of queries may see."""
    first: Any = 0
    last: Any = -(-min(num_keys, static.num_keys) // blocks.kv)
    if static.right is not None:
        reach = (i + 1) * blocks.q - 1 + static.right
        last = jnp.minimum(last, lax.div(reach, blocks.kv) + 1)
    if static.left is not None:
        first = lax.div(jnp.maximum(i * blocks.q - static.left, 0), blocks.kv)
    return first, last


def queries_of(static: Static, j: Any, blocks: Blocks, num_queries: int) -> tuple[Any, Any]:
    """First and last (exclusive) block of queries that may see a block of keys."""
    first: Any = 0
    last: Any = num_queries // blocks.q
    if static.right is not None:
        first = lax.div(jnp.maximum(j * blocks.kv - static.right, 0), blocks.q)
    if static.left is not None:
        reach = (j + 1) * blocks.kv - 1 + static.left
        last = jnp.minimum(last, lax.div(reach, blocks.q) + 1)
    return first, last


def num_pairs(static: Static, num_queries: int) -> int:
    """How many keys all queries of a head see together, as the band alone tells.

    Example:
        >>> causal = Static(1.0, None, 0, None, num_keys=4, with_ids=False, interpret=False)
        >>> num_pairs(causal, 4)
        10
    """
    query = np.arange(num_queries)
    last = static.num_keys if static.right is None else query + static.right + 1
    first = 0 if static.left is None else query - static.left
    seen = np.minimum(last, static.num_keys) - np.maximum(first, 0)
    return int(np.sum(np.broadcast_to(np.maximum(seen, 0), query.shape)))
