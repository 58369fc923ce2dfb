"""Biases of attention logits that depend on the distance of query and key."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.layers.initializers import Normal
from axcore.layers.roles import BaseAttentionBias, BaseSharedValues, SequenceInfo
from axcore.module import Initializer, no_context

__all__ = [
    "ALiBi",
    "RelativePositionBias",
    "RelativePositionTable",
    "alibi_slopes",
    "relative_position_buckets",
]

_AXES = (None, "heads")


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Returns the slope of each head, as in the code of arXiv:2108.12409.

    For n heads, a power of two, they are 2^(-8/n), 2^(-16/n), ..., 2^-8. For other numbers those of
    the next smaller power, then every other one of its double's.

    Example:
        >>> alibi_slopes(4)
        (0.25, 0.0625, 0.015625, 0.00390625)
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    slopes += [2.0 ** (-4.0 * (i + 1) / power) for i in range(0, 2 * (num_heads - power), 2)]
    return tuple(slopes)


class ALiBi(BaseAttentionBias):
    """Attention with linear biases: ``-slope_n |i - j|`` (Press et al., arXiv:2108.12409).

    No parameters. Symmetric, so that it serves encoders too.
    """

    class Config(BaseAttentionBias.Config):
        """``slopes`` of the heads; None for those of the paper."""

        slopes: tuple[float, ...] | None = None

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        if cfg.slopes is not None and len(cfg.slopes) != cfg.num_heads:
            raise ModuleError(
                f"got {len(cfg.slopes)} slopes for {cfg.num_heads} heads",
                code="AX351",
                where=f"{self.config_path}.slopes",
                hint="give one for each head, or None for those of the paper",
            )

    def forward(
        self, q_positions: jax.Array, kv_positions: jax.Array, info: SequenceInfo
    ) -> jax.Array:
        """Returns float32 (1 or batch, num_heads, seq, keys)."""
        del info
        slopes = self.cfg.slopes or alibi_slopes(self.cfg.num_heads)
        distance = jnp.abs(_relative(q_positions, kv_positions)).astype(jnp.float32)
        return -jnp.asarray(slopes, jnp.float32)[:, None, None] * distance[:, None]


def relative_position_buckets(
    num_buckets: int, max_distance: int, *, bidirectional: bool
) -> np.ndarray:
    """Returns the bucket of each distance ``key - query`` from -max_distance to max_distance.

    Half of a direction's buckets hold one distance each, the others ranges that grow by a constant
    factor up to ``max_distance``; all that is farther shares the last bucket (Raffel et al.,
    arXiv:1910.10683, section 2.1). The bounds are computed in integers, so they are exact.

    Args:
        num_buckets: In all; two-sided ones share them among both directions.
        max_distance: From here on distances are one bucket, in tokens.
        bidirectional: Whether later keys have buckets of their own; else they share bucket 0.

    Returns:
        (2 max_distance + 1,) int32.
    """
    one_way = num_buckets // 2 if bidirectional else num_buckets
    exact = one_way // 2
    steps = one_way - exact
    # distance >= exact (max / exact)^(k / steps), without roots.
    bounds = [exact ** (steps - k) * max_distance**k for k in range(1, steps)]
    buckets = np.arange(max_distance + 1, dtype=np.int32)
    for distance in range(exact, max_distance + 1):
        buckets[distance] = exact + sum(distance**steps >= bound for bound in bounds)
    later = buckets[1:] + one_way if bidirectional else np.zeros(max_distance, np.int32)
    return np.concatenate([buckets[:0:-1], buckets[:1], later]).astype(np.int32)


class RelativePositionTable(BaseSharedValues):
    """One table of relative position biases for all layers of a stack.

    The layers' ``RelativePositionBias.Config(table=...)`` names it.
    """

    class Config(BaseSharedValues.Config):
        """``num_heads`` and ``num_buckets`` as the layers have them."""

        num_heads: Required[int] = REQUIRED
        num_buckets: int = 32
        # The name under which layers read it.
        table: str = "relative_position"
        weight_init: Initializer = Normal(stddev=0.02)

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        shape = (cfg.num_buckets, cfg.num_heads)
        self._add_weight("weight", shape, _AXES, cfg.weight_init, weight_decay=False)

    def forward(self, info: SequenceInfo) -> Mapping[str, jax.Array]:
        """Returns the float32 (num_buckets, num_heads) table by its name."""
        del info
        return {self.cfg.table: self._param("weight", "float32")}


class RelativePositionBias(BaseAttentionBias):
    """A learned bias per head and bucket of distances (T5; Raffel et al., arXiv:1910.10683)."""

    class Config(BaseAttentionBias.Config):
        """The buckets are those of :func:`relative_position_buckets`."""

        num_buckets: int = 32
        max_distance: int = 128
        bidirectional: bool = False
        # Name in info.shared of a table that the stack owns; None: a table of this layer's own.
        table: str | None = None
        weight_init: Initializer = Normal(stddev=0.02)

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        least = 4 if cfg.bidirectional else 2
        exact = cfg.num_buckets // least
        if cfg.num_buckets % 2 or exact < 1 or cfg.max_distance <= exact:
            raise ModuleError(
                f"got {cfg.num_buckets} buckets and max_distance {cfg.max_distance}, expected an "
                f"even number of buckets from {least} on and a max_distance above {max(exact, 1)}",
                code="AX351",
                where=self.config_path,
            )
        if cfg.table is None:
            shape = (cfg.num_buckets, cfg.num_heads)
            self._add_weight("weight", shape, _AXES, cfg.weight_init, weight_decay=False)

    @no_context
    def buckets(self) -> np.ndarray:
        """Returns the bucket of each distance; see :func:`relative_position_buckets`."""
        cfg = self.cfg
        return relative_position_buckets(
            cfg.num_buckets, cfg.max_distance, bidirectional=cfg.bidirectional
        )

    def forward(
        self, q_positions: jax.Array, kv_positions: jax.Array, info: SequenceInfo
    ) -> jax.Array:
        """Returns float32 (1 or batch, num_heads, seq, keys)."""
        by_distance = self._table(info).T[:, self.buckets()]  # (num_heads, distances)
        farthest = self.cfg.max_distance
        distance = jnp.clip(_relative(q_positions, kv_positions), -farthest, farthest)
        bias = jnp.take(by_distance, distance + farthest, axis=1)  # (num_heads, 1 or b, t, s)
        return jnp.moveaxis(bias, 0, 1)

    def _table(self, info: SequenceInfo) -> jax.Array:
        name = self.cfg.table
        if name is None:
            return self._param("weight", "float32")
        shape = (self.cfg.num_buckets, self.cfg.num_heads)
        if name not in info.shared or info.shared[name].shape != shape:
            got = {n: x.shape for n, x in info.shared.items()} or "nothing"
            raise ModuleError(
                f"needs a shared table {name!r} of shape {shape}; the stack shares {got}",
                code="AX351",
                where=self.path,
                hint="set the decoder's shared=RelativePositionTable.Config(num_heads=..., "
                f"num_buckets={shape[0]}, table={name!r}), or table=None for one table a layer",
            )
        return info.shared[name]


def _relative(q_positions: jax.Array, kv_positions: jax.Array) -> jax.Array:
    """``key - query``, (1 or batch, seq, keys) int32."""
    relative = kv_positions[..., None, :] - q_positions[..., :, None]
    return (relative if relative.ndim == 3 else relative[None]).astype(jnp.int32)
