"""Attention by JAX's splash attention for TPU: blockwise, masks computed in the kernel, no (t, s).

Splash attention (``jax.experimental.pallas.ops.tpu.splash_attention``) skips blocks that a static
mask hides, and keeps the logarithm of each row's sum for a backward pass of two further kernels:
one for the queries' gradients, one for the keys' and values'.

Shape legend: b batch, t queries, s keys, n heads, k key/value heads, h head dim, v value dim.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from axcore.ops.masks import Causal, Full, Mask, PrefixLM, SlidingWindow
from axlearn_tpu._block_sizes import LANES, attention_tiles, tile
from axlearn_tpu._target import instance_name

__all__ = ["RESIDUALS", "attention_splash", "visited_pairs"]

#: Remat site of what the backward kernels need: with it saved, the forward kernel runs once.
RESIDUALS = "attn_context"

# A logit that no real one is below: it takes no weight, and all of it in a row that sees no key,
# whose result is then zero as the contract wants. (Hidden logits are about -2.4e38.)
_NO_KEY = -1e30
# Segments of queries and keys that are padding: no other's, nor each other's.
_NO_QUERY_SEGMENT, _NO_KEY_SEGMENT = -1, -2


def attention_splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mask: Mask,
    logit_scale: float | jax.Array,
    kv_valid: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    kv_segment_ids: jax.Array | None = None,
    logit_cap: float | None = None,
    sinks: jax.Array | None = None,
    interpret: bool = False,
    **unused: Any,
) -> jax.Array:
    """Computes attention of one device; arguments as in :func:`axcore.ops.attention`, resolved.

    Sequences that tiles do not divide are padded, and what is added is hidden by the mask. The
    scale is applied to the queries, in float32, before they are rounded to their dtype again.

    Args:
        q: (B, T, N, H), bfloat16 or float32.
        k: (B, S, K, H).
        v: (B, S, K, V).
        mask: Of static parts and ``SegmentIds``.
        logit_scale: May be traced.
        kv_valid: (B, S) bool.
        q_segment_ids: (B, T) int, 0 = padding.
        kv_segment_ids: (B, S) int.
        logit_cap: Soft cap.
        sinks: (N,).
        interpret: Runs the kernel step by step on any device, for tests.
        **unused: What ``supports`` has found not to matter here (positions, where the mask reads
            none) or to be absent.

    Returns:
        (B, T, N, V) in q's dtype; zeros in rows that see no key.
    """
    del unused
    num_q, num_kv, heads = q.shape[1], k.shape[1], q.shape[2]
    segmented = "q_segment_ids" in mask.needs
    plan = _plan(_static(mask), num_q, num_kv, heads, logit_cap, instance_name(), interpret)
    q = (q.astype(jnp.float32) * logit_scale).astype(q.dtype)
    q_bnth, k_bksh, v_bksv = (
        _pad(jnp.transpose(x, (0, 2, 1, 3)), 2, length)
        for x, length in ((q, plan.q_length), (k, plan.kv_length), (v, plan.kv_length))
    )
    segments = None
    if segmented or kv_valid is not None:
        segments = _segments(
            q.shape[0],
            plan,
            q_segment_ids if segmented else None,
            kv_segment_ids if segmented else None,
            kv_valid,
        )
        if sinks is None:
            sinks = jnp.full((heads,), _NO_KEY, jnp.float32)

    def row(q_nth: jax.Array, k_ksh: jax.Array, v_ksv: jax.Array, ids: Any) -> jax.Array:
        return plan.kernel()(q_nth, k_ksh, v_ksv, ids, sinks)

    out_bntv = jax.vmap(row)(q_bnth, k_bksh, v_bksv, segments)
    return jnp.transpose(out_bntv[:, :, :num_q], (0, 2, 1, 3))


@dataclass(frozen=True)
class _Structure(splash.Mask):
    """The static part of a mask, as splash attention asks for it.

    The same operators decide on numpy arrays here, which blocks to skip, and inside the kernel,
    which pairs of a block to hide.
    """

    parts: tuple[Mask, ...]
    lengths: tuple[int, int]
    num_kv: int  # keys after these are padding

    @property
    def shape(self) -> tuple[int, int]:
        return self.lengths

    @property
    def q_sequence(self) -> np.ndarray:
        return np.arange(self.lengths[0], dtype=np.int32)

    @property
    def mask_function(self) -> Any:
        return _mask_function(self)

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        """Returns the mask of a block, or one element where the block is all alike.

        Only ``any()`` and ``all()`` are asked of such blocks, and a long sequence has many.
        """
        (a, b, _), (c, d, _) = (s.indices(n) for s, n in zip(idx, self.lengths, strict=True))
        # Every part is monotone in the distance or in the key, so the corners speak for all.
        corners = self.seen(np.array([[a], [b - 1]]), np.array([[c, d - 1]]))
        if corners.all():
            return np.ones((1, 1), bool)
        ranges = [part.kv_range(a, b, self.num_kv) for part in self.parts]
        low = max((r[0] for r in ranges), default=0)
        high = min((r[1] for r in ranges), default=self.num_kv)
        if d <= low or c >= high:
            return np.zeros((1, 1), bool)
        block = self.seen(np.arange(a, b)[:, None], np.arange(c, d)[None, :])
        return np.broadcast_to(block, (b - a, d - c))

    def seen(self, q: Any, kv: Any) -> Any:
        """Returns which keys are seen, for positions that broadcast."""
        seen = None if self.parts and self.num_kv == self.lengths[1] else kv < self.num_kv
        for part in self.parts:
            here = _seen(part, q, kv)
            seen = here if seen is None else seen & here
        return seen


@functools.lru_cache(maxsize=64)
def _mask_function(structure: _Structure) -> Any:
    """One function for equal masks: JAX keeps traces by it."""
    return structure.seen


def _seen(part: Mask, q: Any, kv: Any) -> Any:
    if isinstance(part, Causal):
        return q >= kv
    if isinstance(part, PrefixLM):
        return (kv <= q) | (kv < part.length)
    assert isinstance(part, SlidingWindow)
    seen = None
    if part.left is not None:
        seen = q - kv <= part.left
    if part.right is not None:
        right = kv - q <= part.right
        seen = right if seen is None else seen & right
    return q == q if seen is None else seen


@dataclass(frozen=True)
class _Plan:
    """A kernel and the lengths that it is for."""

    structure: _Structure | None
    heads: int
    q_length: int
    kv_length: int
    block_sizes: splash.BlockSizes
    logit_cap: float | None
    interpret: bool

    def kernel(self) -> Any:
        """Returns the kernel; its mask's tables are constants of the program being traced."""
        mask = self.structure
        if mask is None:
            mask = splash.FullMask((self.q_length, self.kv_length))
        return splash.make_splash_mha(
            mask=splash.MultiHeadMask([mask] * self.heads),
            block_sizes=self.block_sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=self.logit_cap,
            residual_checkpoint_name=RESIDUALS,
            interpret=self.interpret,
        )


@functools.lru_cache(maxsize=64)
def _plan(
    parts: tuple[Mask, ...],
    num_q: int,
    num_kv: int,
    heads: int,
    logit_cap: float | None,
    instance: str,
    interpret: bool,
) -> _Plan:
    """Returns tiles, padded lengths and the mask for a call."""
    tiles = attention_tiles(instance)
    q_length, block_q = tile(num_q, tiles.q)
    kv_length, block_kv = tile(num_kv, tiles.kv)
    # The backward tiles divide the forward ones, which divide what was padded.
    back_q, back_kv = (_divisor(b, tiles.backward) for b in (block_q, block_kv))
    sizes = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=_divisor(block_kv, 512),
        block_q_dkv=back_q,
        block_kv_dkv=back_kv,
        block_kv_dkv_compute=_divisor(back_kv, 512),
        block_q_dq=back_q,
        block_kv_dq=back_kv,
    )
    structure = None
    if parts or kv_length > num_kv:
        structure = _Structure(parts, (q_length, kv_length), num_kv)
    return _Plan(structure, heads, q_length, kv_length, sizes, logit_cap, interpret)


def visited_pairs(mask: Mask, num_q: int, num_kv: int, instance: str) -> tuple[int, int, int]:
    """Counts the pairs of positions in blocks that are computed, those of padding among them.

    Args:
        mask: What the kernel is called with.
        num_q: Queries.
        num_kv: Keys.
        instance: Name of the machine, which decides on tiles.

    Returns:
        Pairs in the forward kernel, in that of the queries' gradient, and in that of the keys' and
        values'.
    """
    plan = _plan(_static(mask), num_q, num_kv, 1, None, instance, False)
    sizes, structure = plan.block_sizes, plan.structure
    counts: list[int] = []
    for block_q, block_kv in (
        (sizes.block_q, sizes.block_kv),
        (sizes.block_q_dq, sizes.block_kv_dq),
        (sizes.block_q_dkv, sizes.block_kv_dkv),
    ):
        assert block_q is not None and block_kv is not None
        blocks = itertools.product(
            range(0, plan.q_length, block_q), range(0, plan.kv_length, block_kv)
        )
        seen = sum(
            structure is None or bool(structure[i : i + block_q, j : j + block_kv].any())
            for i, j in blocks
        )
        counts.append(seen * block_q * block_kv)
    return counts[0], counts[1], counts[2]


def _divisor(block: int, largest: int) -> int:
    """Returns the largest divisor of a tile, in whole lanes, that is at most ``largest``."""
    sizes = range(LANES, min(block, largest) + 1, LANES)
    return max(size for size in sizes if block % size == 0)


def _static(mask: Mask) -> tuple[Mask, ...]:
    """The parts that positions decide."""
    return tuple(p for p in mask.parts() if p.uses_positions and not isinstance(p, Full))


def _pad(x: jax.Array, axis: int, length: int, value: int = 0) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return x if length == x.shape[axis] else jnp.pad(x, widths, constant_values=value)


def _segments(
    batch: int,
    plan: _Plan,
    q_ids: jax.Array | None,
    kv_ids: jax.Array | None,
    kv_valid: jax.Array | None,
) -> splash.SegmentIds:
    """Segments in which padding and keys that are not valid belong to nobody."""
    q_bt = jnp.ones((batch, plan.q_length), jnp.int32)
    if q_ids is not None:
        q_bt = jnp.where(q_ids == 0, _NO_QUERY_SEGMENT, q_ids).astype(jnp.int32)
        q_bt = _pad(q_bt, 1, plan.q_length, _NO_QUERY_SEGMENT)
    kv_bs = jnp.ones((batch, plan.kv_length), jnp.int32)
    if kv_ids is not None:
        kv_bs = jnp.where(kv_ids == 0, _NO_KEY_SEGMENT, kv_ids).astype(jnp.int32)
        kv_bs = _pad(kv_bs, 1, plan.kv_length, _NO_KEY_SEGMENT)
    if kv_valid is not None:
        kv_bs = jnp.where(_pad(kv_valid, 1, plan.kv_length), kv_bs, _NO_KEY_SEGMENT)
    return splash.SegmentIds(q_bt, kv_bs)
