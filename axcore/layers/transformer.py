"""Transformer layers: pre-norm and sandwich norm, post-norm, parallel, with cross attention."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from axcore.errors import ModuleError
from axcore.layers.attention import Attention
from axcore.layers.base import BETWEEN_BRANCHES
from axcore.layers.cross_attention import CrossAttention
from axcore.layers.dropout import Dropout
from axcore.layers.feed_forward import FeedForward
from axcore.layers.norm import LayerNorm
from axcore.layers.roles import (
    BaseAttention,
    BaseDropout,
    BaseFeedForward,
    BaseNorm,
    BaseTransformerLayer,
    SequenceInfo,
)
from axcore.module import Module
from axcore.remat import site

__all__ = [
    "CrossTransformerLayer",
    "ParallelTransformerLayer",
    "PostNormTransformerLayer",
    "TransformerLayer",
]


class TransformerLayer(BaseTransformerLayer):
    """``h = x + attention(norm(x)); y = h + feed_forward(norm(h))``.

    The pre-norm form of GPT-2 and of Xiong et al., arXiv:2002.04745. A branch's output may be
    normalized too before it is added: with both norms this is the sandwich form (Ding et al.,
    arXiv:2105.13290), with ``*_norm=None`` and ``*_out_norm`` alone each branch ends in its norm.
    Dropout applies to what each branch adds.
    """

    class Config(BaseTransformerLayer.Config):
        """Every slot takes any implementation of its role; a norm of None is left out."""

        attention_norm: BaseNorm.Config | None = LayerNorm.Config()
        attention: BaseAttention.Config = Attention.Config()
        attention_out_norm: BaseNorm.Config | None = None
        feed_forward_norm: BaseNorm.Config | None = LayerNorm.Config()
        feed_forward: BaseFeedForward.Config = FeedForward.Config()
        feed_forward_out_norm: BaseNorm.Config | None = None
        dropout: BaseDropout.Config = Dropout.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self.attention_norm = _norm(self, "attention_norm")
        self.attention = self._add_child(
            "attention", cfg.attention, BaseAttention, input_dim=cfg.input_dim
        )
        self.attention_out_norm = _norm(self, "attention_out_norm")
        self.feed_forward_norm = _norm(self, "feed_forward_norm")
        self.feed_forward = self._add_child(
            "feed_forward", cfg.feed_forward, BaseFeedForward, input_dim=cfg.input_dim
        )
        self.feed_forward_out_norm = _norm(self, "feed_forward_out_norm")
        self.dropout = self._add_child("dropout", cfg.dropout, BaseDropout)

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        x = self._constrain(site(x, "block_in"), *BETWEEN_BRANCHES)
        out = self.attention(_normed(self, self.attention_norm, x), info)
        out = self._residual(_like(x, out, self.attention))
        h = x + self.dropout(_normed(self, self.attention_out_norm, out))
        out = self.feed_forward(_normed(self, self.feed_forward_norm, h), info)
        out = self._residual(site(_like(x, out, self.feed_forward), "ffn_out"))
        out = self.dropout(_normed(self, self.feed_forward_out_norm, out))
        return self._constrain(h + out, *BETWEEN_BRANCHES)


class PostNormTransformerLayer(BaseTransformerLayer):
    """``h = norm(x + attention(x)); y = norm(h + feed_forward(h))``.

    The form of Vaswani et al., arXiv:1706.03762, and of BERT.
    """

    class Config(BaseTransformerLayer.Config):
        """Every slot takes any implementation of its role."""

        attention: BaseAttention.Config = Attention.Config()
        attention_norm: BaseNorm.Config = LayerNorm.Config()
        feed_forward: BaseFeedForward.Config = FeedForward.Config()
        feed_forward_norm: BaseNorm.Config = LayerNorm.Config()
        dropout: BaseDropout.Config = Dropout.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        dim = cfg.input_dim
        self.attention = self._add_child("attention", cfg.attention, BaseAttention, input_dim=dim)
        self.attention_norm = self._add_child(
            "attention_norm", cfg.attention_norm, BaseNorm, input_dim=dim
        )
        self.feed_forward = self._add_child(
            "feed_forward", cfg.feed_forward, BaseFeedForward, input_dim=dim
        )
        self.feed_forward_norm = self._add_child(
            "feed_forward_norm", cfg.feed_forward_norm, BaseNorm, input_dim=dim
        )
        self.dropout = self._add_child("dropout", cfg.dropout, BaseDropout)

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        x = self._constrain(site(x, "block_in"), *BETWEEN_BRANCHES)
        out = self._residual(_like(x, self.attention(x, info), self.attention))
        h = _normed(self, self.attention_norm, x + self.dropout(out))
        out = site(_like(x, self.feed_forward(h, info), self.feed_forward), "ffn_out")
        out = self.feed_forward_norm(h + self.dropout(self._residual(out)))
        return self._constrain(out, *BETWEEN_BRANCHES)


class ParallelTransformerLayer(BaseTransformerLayer):
    """``y = x + attention(norm(x)) + feed_forward(norm(x))``: both branches read the same input.

    GPT-J and PaLM (arXiv:2204.02311, section 2) share one norm; with ``feed_forward_norm`` the
    branches have one each (GPT-NeoX, arXiv:2204.06745).
    """

    class Config(BaseTransformerLayer.Config):
        """``feed_forward_norm=None`` gives the feed-forward branch what the attention gets."""

        attention_norm: BaseNorm.Config = LayerNorm.Config()
        attention: BaseAttention.Config = Attention.Config()
        feed_forward_norm: BaseNorm.Config | None = None
        feed_forward: BaseFeedForward.Config = FeedForward.Config()
        dropout: BaseDropout.Config = Dropout.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        dim = cfg.input_dim
        self.attention_norm = self._add_child(
            "attention_norm", cfg.attention_norm, BaseNorm, input_dim=dim
        )
        self.attention = self._add_child("attention", cfg.attention, BaseAttention, input_dim=dim)
        self.feed_forward_norm = _norm(self, "feed_forward_norm")
        self.feed_forward = self._add_child(
            "feed_forward", cfg.feed_forward, BaseFeedForward, input_dim=dim
        )
        self.dropout = self._add_child("dropout", cfg.dropout, BaseDropout)

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        x = self._constrain(site(x, "block_in"), *BETWEEN_BRANCHES)
        normed = _normed(self, self.attention_norm, x)
        attended = self._residual(_like(x, self.attention(normed, info), self.attention))
        if self.feed_forward_norm is not None:
            normed = _normed(self, self.feed_forward_norm, x)
        out = site(_like(x, self.feed_forward(normed, info), self.feed_forward), "ffn_out")
        x = x + self.dropout(attended) + self.dropout(self._residual(out))
        return self._constrain(x, *BETWEEN_BRANCHES)


class CrossTransformerLayer(BaseTransformerLayer):
    """Pre-norm: self-attention, attention over the memory, feed-forward, each added to its input.

    The decoder layer of an encoder-decoder (Vaswani et al., arXiv:1706.03762) with the norms in
    front, as in T5.
    """

    class Config(BaseTransformerLayer.Config):
        """Every slot takes any implementation of its role."""

        attention_norm: BaseNorm.Config = LayerNorm.Config()
        attention: BaseAttention.Config = Attention.Config()
        cross_attention_norm: BaseNorm.Config = LayerNorm.Config()
        cross_attention: BaseAttention.Config = CrossAttention.Config()
        feed_forward_norm: BaseNorm.Config = LayerNorm.Config()
        feed_forward: BaseFeedForward.Config = FeedForward.Config()
        dropout: BaseDropout.Config = Dropout.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        dim = cfg.input_dim

        def norm(name: str) -> BaseNorm:
            return self._add_child(name, getattr(cfg, name), BaseNorm, input_dim=dim)

        self.attention_norm = norm("attention_norm")
        self.attention = self._add_child("attention", cfg.attention, BaseAttention, input_dim=dim)
        self.cross_attention_norm = norm("cross_attention_norm")
        self.cross_attention = self._add_child(
            "cross_attention", cfg.cross_attention, BaseAttention, input_dim=dim
        )
        self.feed_forward_norm = norm("feed_forward_norm")
        self.feed_forward = self._add_child(
            "feed_forward", cfg.feed_forward, BaseFeedForward, input_dim=dim
        )
        self.dropout = self._add_child("dropout", cfg.dropout, BaseDropout)

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim); reads ``info.memory``."""
        x = self._constrain(site(x, "block_in"), *BETWEEN_BRANCHES)
        out = self.attention(_normed(self, self.attention_norm, x), info)
        x = x + self.dropout(self._residual(_like(x, out, self.attention)))
        out = self.cross_attention(_normed(self, self.cross_attention_norm, x), info)
        x = x + self.dropout(self._residual(_like(x, out, self.cross_attention)))
        out = self.feed_forward(_normed(self, self.feed_forward_norm, x), info)
        out = self._residual(site(_like(x, out, self.feed_forward), "ffn_out"))
        return self._constrain(x + self.dropout(out), *BETWEEN_BRANCHES)


def _norm(layer: BaseTransformerLayer, name: str) -> BaseNorm | None:
    """Adds the norm in the config field ``name``, if there is one."""
    cfg: BaseNorm.Config | None = getattr(layer.cfg, name)
    if cfg is None:
        return None
    return layer._add_child(name, cfg, BaseNorm, input_dim=layer.cfg.input_dim)


def _normed(layer: BaseTransformerLayer, norm: BaseNorm | None, x: jax.Array) -> jax.Array:
    # What a branch reads is kept for the backward pass split like the residual; the branch gathers.
    return x if norm is None else layer._residual(norm(x))


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
