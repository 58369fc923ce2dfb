"""Dropout."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore.errors import ModuleError
from axcore.layers.roles import BaseDropout

__all__ = ["Dropout"]


class Dropout(BaseDropout):
    """Zeroes each element with probability ``rate`` in training and scales the rest by 1/(1-rate).

    Srivastava et al., JMLR 15 (2014). Rate 0 draws no key.
    """

    class Config(BaseDropout.Config):
        """``rate`` is a probability in [0, 1)."""

        rate: float = 0.0

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        if not 0.0 <= cfg.rate < 1.0:
            raise ModuleError(
                f"dropout rate {cfg.rate} is not in [0, 1)",
                code="AX341",
                where=f"{self.config_path}.rate",
            )

    def forward(self, x: jax.Array) -> jax.Array:
        """Returns ``x``, or in training its dropped and scaled form; same shape and dtype."""
        rate, ctx = self.cfg.rate, self._context
        if rate == 0.0 or not ctx.is_training:
            return x
        keep = jax.random.bernoulli(ctx.key(), 1.0 - rate, x.shape)
        return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
