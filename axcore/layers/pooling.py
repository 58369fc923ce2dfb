"""One vector of a sequence: its first token's, or the mean."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore import ops
from axcore.layers.linear import Linear
from axcore.layers.roles import BasePooler

__all__ = ["FirstTokenPooler", "MeanPooler"]


class FirstTokenPooler(BasePooler):
    """The first token's vector, if ``dense`` is set through ``activation(dense(x))`` (BERT)."""

    class Config(BasePooler.Config):
        """``dense=Linear.Config()`` with ``tanh`` is BERT's."""

        dense: Linear.Config | None = None
        activation: str = "tanh"

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self.dense: Linear | None = None
        if cfg.dense is not None:
            self.dense = self._add_child(
                "dense",
                cfg.dense,
                Linear,
                input_dim=cfg.input_dim,
                output_dim=cfg.input_dim,
                axes=("embed", None),
            )
        self._activation = ops.activation(cfg.activation)

    def forward(self, hidden: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, input_dim)."""
        del valid
        first = hidden[:, 0]
        return first if self.dense is None else self._activation(self.dense(first))


class MeanPooler(BasePooler):
    """The mean over tokens that are not padding, computed in ``reduce_dtype``."""

    class Config(BasePooler.Config):
        """``normalize`` scales the result to length 1, as sentence embeddings often are."""

        normalize: bool = False

    def forward(self, hidden: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, input_dim); zeros for a row of padding."""
        x = hidden.astype(self.reduce_dtype)
        weights = jnp.ones(x.shape[:2], x.dtype) if valid is None else valid.astype(x.dtype)
        mean = jnp.sum(x * weights[..., None], axis=1)
        mean = mean / jnp.maximum(jnp.sum(weights, axis=1), 1.0)[:, None]
        if self.cfg.normalize:
            square = jnp.sum(jnp.square(mean), axis=-1, keepdims=True)
            mean = mean * jax.lax.rsqrt(jnp.maximum(square, 1e-24))
        return mean.astype(hidden.dtype)
