"""Projections to queries, keys and values: one weight each, or one for all."""

from __future__ import annotations

import jax

from axcore.layers.linear import Linear
from axcore.layers.roles import BaseQKV

__all__ = ["QKV", "FusedQKV"]


class QKV(BaseQKV):
    """Separate projections for queries, keys and values."""

    class Config(BaseQKV.Config):
        """``bias`` belongs to each projection's own config."""

        query: Linear.Config = Linear.Config()
        key: Linear.Config = Linear.Config()
        value: Linear.Config = Linear.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)

        def projection(name: str, num_heads: int, axis: str) -> Linear:
            return self._add_child(
                name,
                getattr(cfg, name),
                Linear,
                input_dim=cfg.input_dim,
                output_dim=(num_heads, cfg.head_dim),
                axes=("embed", axis, "head_dim"),
            )

        self.query = projection("query", cfg.num_heads, "heads")
        self.key = projection("key", cfg.num_kv_heads, "kv_heads")
        self.value = projection("value", cfg.num_kv_heads, "kv_heads")

    def forward(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(batch, seq, input_dim) -> q, k, v of (batch, seq, heads or kv_heads, head_dim)."""
        return self.query(x), self.key(x), self.value(x)


class FusedQKV(BaseQKV):
    """One projection for queries, keys and values: one larger product.

    The weight is (input_dim, num_kv_heads, g + 2, head_dim) with g = num_heads / num_kv_heads: each
    key/value head keeps its g query heads, its key and its value together, so that sharding over
    ``kv_heads`` leaves all of them on one device (Megatron-LM, arXiv:1909.08053).
    """

    class Config(BaseQKV.Config):
        """``projection.bias`` says whether all three have a bias."""

        projection: Linear.Config = Linear.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        group = cfg.num_heads // cfg.num_kv_heads
        self.projection = self._add_child(
            "projection",
            cfg.projection,
            Linear,
            input_dim=cfg.input_dim,
            output_dim=(cfg.num_kv_heads, group + 2, cfg.head_dim),
            axes=("embed", "kv_heads", None, "head_dim"),
        )

    def forward(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(batch, seq, input_dim) -> q, k, v of (batch, seq, heads or kv_heads, head_dim)."""
        qkv = self.projection(x)  # (batch, seq, kv_heads, g + 2, head_dim)
        # Query head n reads key/value head n // g, so flattening keeps the heads' order.
        q = qkv[..., :-2, :].reshape(*x.shape[:2], self.cfg.num_heads, self.cfg.head_dim)
        return q, qkv[..., -2, :], qkv[..., -1, :]
