"""The pre-norm transformer layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from axcore.errors import ModuleError
from axcore.layers.attention import Attention
from axcore.layers.dropout import Dropout
from axcore.layers.feed_forward import FeedForward
from axcore.layers.norm import LayerNorm
from axcore.layers.roles import (
    BaseAttention,
    BaseFeedForward,
    BaseNorm,
    BaseTransformerLayer,
    SequenceInfo,
)
from axcore.module import Module
from axcore.remat import site

__all__ = ["TransformerLayer"]


class TransformerLayer(BaseTransformerLayer):
    """``h = x + attention(norm(x)); y = h + feed_forward(norm(h))``.

    The pre-norm form of GPT-2 and of Xiong et al., arXiv:2002.04745. Dropout applies to the output
    of each branch.
    """

    class Config(BaseTransformerLayer.Config):
        """Every slot takes any implementation of its role."""

        attention_norm: BaseNorm.Config = LayerNorm.Config()
        attention: BaseAttention.Config = Attention.Config()
        feed_forward_norm: BaseNorm.Config = LayerNorm.Config()
        feed_forward: BaseFeedForward.Config = FeedForward.Config()
        dropout: Dropout.Config = Dropout.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        dim = cfg.input_dim
        self.attention_norm = self._add_child(
            "attention_norm", cfg.attention_norm, BaseNorm, input_dim=dim
        )
        self.attention = self._add_child("attention", cfg.attention, BaseAttention, input_dim=dim)
        self.feed_forward_norm = self._add_child(
            "feed_forward_norm", cfg.feed_forward_norm, BaseNorm, input_dim=dim
        )
        self.feed_forward = self._add_child(
            "feed_forward", cfg.feed_forward, BaseFeedForward, input_dim=dim
        )
        self.dropout = self._add_child("dropout", cfg.dropout, Dropout)

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        x = self._constrain(site(x, "block_in"), "batch", "seq", "embed")
        out = _like(x, self.attention(self.attention_norm(x), info), self.attention)
        h = x + self.dropout(out)
        out = _like(x, self.feed_forward(self.feed_forward_norm(h), info), self.feed_forward)
        out = site(out, "ffn_out")
        return self._constrain(h + self.dropout(out), "batch", "seq", "embed")


def _like(x: jax.Array, out: Any, branch: Module) -> jax.Array:
    """Returns what a branch made; raises ModuleError unless it can be added to ``x``."""
    if getattr(out, "shape", None) != x.shape or not jnp.issubdtype(out.dtype, jnp.floating):
        made = f"{out.dtype}{list(out.shape)}" if hasattr(out, "dtype") else type(out).__name__
        raise ModuleError(
            f"{type(branch).__name__} returned {made}, expected {x.dtype}{list(x.shape)}",
            code="AX349",
            where=branch.path,
            hint=f"its forward must return an array like its input; see {branch.config_path}",
        )
    return out
