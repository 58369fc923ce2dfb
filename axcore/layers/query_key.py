"""Transforms of queries and keys before attention: normalization, and several in a row."""

from __future__ import annotations

from typing import Literal

import jax

from axcore.layers.norm import RMSNorm
from axcore.layers.roles import BaseNorm, BaseQueryKeyTransform, SequenceInfo

__all__ = ["QKNorm", "QueryKeyChain"]


class QKNorm(BaseQueryKeyTransform):
    """Normalizes queries and keys, each with parameters of its own.

    It bounds the attention logits (Dehghani et al., arXiv:2302.05442). ``over="head_dim"``
    normalizes each head alone with one scale for all heads; ``over="heads"`` all heads of a token
    together.
    """

    class Config(BaseQueryKeyTransform.Config):
        """``norm`` is made twice: ``query_norm`` and ``key_norm``."""

        norm: BaseNorm.Config = RMSNorm.Config()
        over: Literal["head_dim", "heads"] = "head_dim"

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        together = cfg.over == "heads"

        def norm(name: str, num_heads: int, axis: str) -> BaseNorm:
            return self._add_child(
                name,
                cfg.norm,
                BaseNorm,
                config_path=f"{self.config_path}.norm",
                input_dim=num_heads * cfg.head_dim if together else cfg.head_dim,
                axis=axis if together else "head_dim",
            )

        self.query_norm = norm("query_norm", cfg.num_heads, "heads")
        self.key_norm = norm("key_norm", cfg.num_kv_heads, "kv_heads")

    def forward(
        self, q: jax.Array, k: jax.Array, info: SequenceInfo
    ) -> tuple[jax.Array, jax.Array]:
        """Normalizes q (batch, seq, heads, head_dim) and k (batch, seq, kv_heads, head_dim)."""
        del info
        return self._normalized(self.query_norm, q), self._normalized(self.key_norm, k)

    def _normalized(self, norm: BaseNorm, x: jax.Array) -> jax.Array:
        if self.cfg.over == "head_dim":
            return norm(x)
        return norm(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)


class QueryKeyChain(BaseQueryKeyTransform):
    """Applies several transforms in order, such as a norm and then a rotary embedding."""

    class Config(BaseQueryKeyTransform.Config):
        """``transforms[i]`` is the child ``transform_i``."""

        transforms: tuple[BaseQueryKeyTransform.Config, ...] = ()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._transforms = [
            self._add_child(
                f"transform_{i}",
                transform,
                BaseQueryKeyTransform,
                config_path=f"{self.config_path}.transforms.{i}",
                num_heads=cfg.num_heads,
                num_kv_heads=cfg.num_kv_heads,
                head_dim=cfg.head_dim,
            )
            for i, transform in enumerate(cfg.transforms)
        ]

    def forward(
        self, q: jax.Array, k: jax.Array, info: SequenceInfo
    ) -> tuple[jax.Array, jax.Array]:
        """Transforms q (batch, seq, heads, head_dim) and k (batch, seq, kv_heads, head_dim)."""
        for transform in self._transforms:
            q, k = transform(q, k, info)
        return q, k
