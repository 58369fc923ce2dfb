"""What Gemma 2 and Gemma 3 share: the block, and the period of local and global layers.

Embeddings are multiplied by the root of their width, norms stand before and after each branch and
store their distance from one, the feed-forward network is gated by GELU, the head is the embedding.
Local layers see a window, global ones everything.
"""

from __future__ import annotations

import math
from typing import Any

from axcore.layers import BaseQueryKeyTransform, CausalLM, RMSNorm
from axcore.train import Trainer
from axlearn_models._llama_like import layers_of, llama_like, resized, shrunk
from axlearn_rope import RoPE

__all__ = [
    "gemma_like",
    "resized_gemma",
    "rope_of_layer",
    "shrunk_gemma",
]


def gemma_like(
    *,
    vocab_size: int,
    model_dim: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    hidden_dim: int,
    query_scale: float,
    query_key_transform: BaseQueryKeyTransform.Config,
) -> CausalLM.Config:
    """Returns a decoder of Gemma's blocks, all of them global.

    Args:
        vocab_size: Rows of the embedding.
        model_dim: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        hidden_dim: Width inside the feed-forward network.
        query_scale: The attention logits are divided by its root (``query_pre_attn_scalar``).
        query_key_transform: Rotary embeddings.
    """
    model = llama_like(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        hidden_dim=hidden_dim,
        query_key_transform=query_key_transform,
        norm_eps=1e-6,
        tied=True,
    )
    norm = RMSNorm.Config(eps=1e-6, unit_offset=True)
    model.set_path("embedding.embedding_scale", math.sqrt(model_dim))
    model.set_path("decoder.final_norm", norm)
    layer: Any = model.get_path("decoder.layer")
    layer.set(
        attention_norm=norm,
        attention_out_norm=norm,
        feed_forward_norm=norm,
        feed_forward_out_norm=norm,
    )
    layer.attention.set(head_dim=head_dim, logit_scale=query_scale**-0.5)
    layer.feed_forward.set(activation="gelu_tanh")
    return model


def rope_of_layer(layer: Any) -> RoPE.Config:
    """Returns the node of a layer's rotary embedding."""
    (rope,) = layer.find(RoPE.Config).values()
    return rope


def resized_gemma(
    cfg: Trainer.Config, *, query_scale: float | None = None, **dims: int | None
) -> Trainer.Config:
    """Changes the dims that are given and what follows from them, and returns the config.

    Args:
        cfg: A config of Gemma.
        query_scale: See :func:`gemma_like`.
        **dims: As of ``resized``.
    """
    resized(cfg, **dims)
    return _derived(cfg, query_scale)


def shrunk_gemma(cfg: Trainer.Config, *, num_layers: int) -> Trainer.Config:
    """Makes a test member as ``shrunk`` does: wide heads, one key and value head for two."""
    shrunk(cfg, num_kv_heads=2)
    resized(cfg, num_layers=num_layers, head_dim=32)
    return _derived(cfg, query_scale=24)


def _derived(cfg: Trainer.Config, query_scale: float | None) -> Trainer.Config:
    model: Any = cfg.model
    model.embedding.set(embedding_scale=math.sqrt(model.model_dim))
    if query_scale is not None:
        for layer in layers_of(cfg):
            layer.attention.set(logit_scale=query_scale**-0.5)
    return cfg
