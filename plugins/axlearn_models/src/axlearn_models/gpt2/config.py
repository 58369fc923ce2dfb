"""The members of GPT-2.

Sizes: Language Models are Unsupervised Multitask Learners (Radford et al., 2019, table 2; its first
counts are wrong and were corrected with the weights). It gives a vocabulary of 50,257, rows of
1,024 tokens and batches of 512, dropout as GPT-1's (0.1), and a smaller initial deviation of what
is added to the residual stream. Neither rate nor number of tokens is published: those are GPT-3's
of the nearest size (arXiv:2005.14165, table 2.1). The counts are exact and tested.

Dropout of the attention weights, 0.1 there, is not a part of the attention here.
"""

from __future__ import annotations

import math
from typing import Any

from axcore import experiments
from axcore.layers import (
    QKV,
    Attention,
    CausalLM,
    Decoder,
    Dropout,
    FeedForward,
    LayerNorm,
    LearnedPositions,
    Linear,
    Normal,
    TransformerLayer,
)
from axcore.train import Trainer
from axlearn_models._llama_like import learning_rate, pretraining, resized, shrunk

__all__ = ["residual_deviation"]

_STDDEV = 0.02


def gpt2_124m() -> Trainer.Config:
    """GPT-2 124M: 124,439,808 parameters, 300B tokens."""
    linear = Linear.Config(bias=True, weight_init=Normal(stddev=_STDDEV))
    layer = TransformerLayer.Config(
        attention_norm=LayerNorm.Config(eps=1e-5),
        attention=Attention.Config(
            num_heads=12, qkv=QKV.Config(query=linear, key=linear, value=linear), output=linear
        ),
        feed_forward_norm=LayerNorm.Config(eps=1e-5),
        feed_forward=FeedForward.Config(activation="gelu_tanh", up=linear, down=linear),
        dropout=Dropout.Config(rate=0.1),
    )
    model = CausalLM.Config(
        vocab_size=50_257,
        model_dim=768,
        max_seq_len=1024,
        position=LearnedPositions.Config(weight_init=Normal(stddev=_STDDEV)),
        dropout=Dropout.Config(rate=0.1),
        decoder=Decoder.Config(num_layers=12, layer=layer, final_norm=LayerNorm.Config(eps=1e-5)),
    )
    cfg = pretraining(
        model, tokens=300e9, batch_size=512, seq_len=1024, peak=6e-4, warmup_steps=715
    )
    return residual_deviation(cfg, stddev=_STDDEV)


def gpt2_355m() -> Trainer.Config:
    """GPT-2 355M: 354,823,168 parameters."""
    return _sized("gpt2-124M", 1024, 24, 16, peak=3e-4)


def gpt2_774m() -> Trainer.Config:
    """GPT-2 774M: 774,030,080 parameters."""
    return _sized("gpt2-124M", 1280, 36, 20, peak=2.5e-4)


def gpt2_1_5b() -> Trainer.Config:
    """GPT-2 1.5B: 1,557,611,200 parameters."""
    return _sized("gpt2-124M", 1600, 48, 25, peak=2e-4)


def gpt2_test() -> Trainer.Config:
    """GPT-2's structure with 0.1M parameters, on bytes."""
    cfg = shrunk(experiments.get("gpt2-124M"))
    cfg.model.set(max_seq_len=64)
    return residual_deviation(cfg, stddev=_STDDEV)


def residual_deviation(cfg: Trainer.Config, *, stddev: float) -> Trainer.Config:
    """Divides the deviation of what feeds the residual stream by the root of its length.

    There are two branches a layer, so the divisor is ``sqrt(2 * num_layers)``.
    """
    model: Any = cfg.model
    init = Normal(stddev=stddev / math.sqrt(2 * model.decoder.num_layers))
    model.decoder.layer.attention.output.set(weight_init=init)
    model.decoder.layer.feed_forward.down.set(weight_init=init)
    return cfg


def _sized(
    parent: str, model_dim: int, num_layers: int, num_heads: int, *, peak: float
) -> Trainer.Config:
    cfg = experiments.get(parent)
    learning_rate(cfg).set(peak=peak)
    resized(cfg, model_dim=model_dim, num_layers=num_layers, num_heads=num_heads)
    return residual_deviation(cfg, stddev=_STDDEV)
