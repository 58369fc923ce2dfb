"""The members of T5.

Sizes and recipe: Raffel et al., arXiv:1910.10683 (sections 2.1, 3.1 and 3.7: 2^35 tokens in rows of
512, 128 at a time, Adafactor with a rate of 1 / sqrt(max(n, 10^4)), spans of 3 tokens that cover
15 %), and the ``config.json`` published with each release's weights, 32,128 ids. Version 1.1
(Shazeer, arXiv:2002.05202) has gated networks, no dropout while pretraining, and a head of its own.
The counts are exact and tested.

Initial deviations are those of the released code: as the fan-in says, queries smaller by the root
of a head's width since logits are not scaled. Dropout inside the feed-forward network and after the
last norm, 0.1 there as everywhere, is not a part here.
"""

from __future__ import annotations

from typing import Any

from axcore import experiments
from axcore.config import config_for, scaled
from axcore.data import ByteTokenizer, SpanCorruption, TransformedTextInput
from axcore.layers import (
    QKV,
    Attention,
    CrossAttention,
    CrossTransformerLayer,
    Decoder,
    Dropout,
    Embedding,
    Encoder,
    EncoderDecoder,
    FeedForward,
    Linear,
    LMHead,
    Normal,
    RelativePositionBias,
    RelativePositionTable,
    RMSNorm,
    TransformerLayer,
    VarianceScaling,
)
from axcore.ops.masks import Causal, Full
from axcore.train import Learner, Trainer, optimizers, schedules
from axlearn_models._encoders import shrunk_encoder, sized

__all__ = ["resized"]

_BY_FAN_IN = VarianceScaling(distribution="normal")
_HEAD_DIM = 64


def t5_small() -> Trainer.Config:
    """T5 small: 60,506,624 parameters."""
    linear = Linear.Config(bias=False, weight_init=_BY_FAN_IN)
    init = VarianceScaling(scale=1 / _HEAD_DIM, distribution="normal")
    query = Linear.Config(bias=False, weight_init=init)
    norm = RMSNorm.Config(eps=1e-6)
    dropout = Dropout.Config(rate=0.1)
    feed_forward = FeedForward.Config(activation="relu", up=linear, down=linear)
    table = "relative_position"

    def attention(mask: Causal | Full, *, bidirectional: bool) -> Attention.Config:
        return Attention.Config(
            qkv=QKV.Config(query=query, key=linear, value=linear),
            output=linear,
            mask=mask,
            bias=RelativePositionBias.Config(bidirectional=bidirectional, table=table),
            logit_scale=1.0,
        )

    encoder = Encoder.Config(
        num_layers=6,
        layer=TransformerLayer.Config(
            attention_norm=norm,
            attention=attention(Full(), bidirectional=True),
            feed_forward_norm=norm,
            feed_forward=feed_forward,
            dropout=dropout,
        ),
        shared=RelativePositionTable.Config(num_heads=8, table=table),
        final_norm=norm,
    )
    cross = CrossAttention.Config(
        query=query, key=linear, value=linear, output=linear, logit_scale=1.0
    )
    decoder = Decoder.Config(
        num_layers=6,
        layer=CrossTransformerLayer.Config(
            attention_norm=norm,
            attention=attention(Causal(), bidirectional=False),
            cross_attention_norm=norm,
            cross_attention=cross,
            feed_forward_norm=norm,
            feed_forward=feed_forward,
            dropout=dropout,
        ),
        shared=RelativePositionTable.Config(num_heads=8, table=table),
        final_norm=norm,
    )
    model = EncoderDecoder.Config(
        vocab_size=32_128,
        model_dim=512,
        compute_dtype="bfloat16",
        embedding=Embedding.Config(weight_init=Normal(stddev=1.0)),
        encoder_position=None,
        decoder_position=None,
        dropout=dropout,
        encoder=encoder,
        decoder=decoder,
    )
    learning_rate = config_for(
        schedules.held_inverse_sqrt,
        peak=0.01,
        hold_steps=scaled(10_000 / 2**19, of="max_step", minimum=0),
    )
    cfg = Trainer.Config(
        model=model,
        learner=Learner.Config(
            optimizer=config_for(optimizers.adafactor, learning_rate=learning_rate)
        ),
        # Its sentinels, 32,099 downwards, are the last of the published vocabulary's 32,100 ids.
        input=TransformedTextInput.Config(
            transform=SpanCorruption.Config(first_sentinel_id=32_099, num_sentinels=100)
        ),
        max_step=2**19,
        batch_size=128,
        seq_len=512,
    )
    return resized(cfg, model_dim=512, num_layers=6, num_heads=8, hidden_dim=2048)


def t5_base() -> Trainer.Config:
    """T5 base: 222,903,552 parameters."""
    cfg = experiments.get("t5-small")
    return resized(cfg, model_dim=768, num_layers=12, num_heads=12, hidden_dim=3072)


def t5_large() -> Trainer.Config:
    """T5 large: 737,668,096 parameters."""
    cfg = experiments.get("t5-small")
    return resized(cfg, model_dim=1024, num_layers=24, num_heads=16, hidden_dim=4096)


def t5_3b() -> Trainer.Config:
    """T5 3B: 2,851,598,336 parameters, with heads of 128."""
    cfg = experiments.get("t5-large")
    return resized(
        cfg, model_dim=1024, num_layers=24, num_heads=32, hidden_dim=16_384, head_dim=128
    )


def t5_11b() -> Trainer.Config:
    """T5 11B: 11,307,321,344 parameters, with heads of 128."""
    cfg = experiments.get("t5-3B")
    return resized(
        cfg, model_dim=1024, num_layers=24, num_heads=128, hidden_dim=65_536, head_dim=128
    )


def t5_test() -> Trainer.Config:
    """T5's structure with 0.2M parameters, on bytes; the ids from 287 down are the sentinels."""
    cfg = shrunk_encoder(experiments.get("t5-small"), head_dim=16)
    cfg.model.set(vocab_size=288)
    cfg.input.set(
        tokenizer=ByteTokenizer.Config(multiple_of=32),
        transform=SpanCorruption.Config(num_sentinels=29),
    )
    return resized(cfg, model_dim=64, num_layers=2, num_heads=4, hidden_dim=176, head_dim=16)


# -- version 1.1: gated networks, an untied head ---------------------------------------------------


def t5_v1_1_small() -> Trainer.Config:
    """T5 1.1 small: 76,961,152 parameters."""
    return _gated(experiments.get("t5-small"), num_layers=8, num_heads=6, hidden_dim=1024)


def t5_v1_1_base() -> Trainer.Config:
    """T5 1.1 base: 247,577,856 parameters."""
    cfg = experiments.get("t5-v1.1-small")
    return resized(cfg, model_dim=768, num_layers=12, num_heads=12, hidden_dim=2048)


def t5_v1_1_large() -> Trainer.Config:
    """T5 1.1 large: 783,150,080 parameters."""
    cfg = experiments.get("t5-v1.1-small")
    return resized(cfg, model_dim=1024, num_layers=24, num_heads=16, hidden_dim=2816)


def t5_v1_1_xl() -> Trainer.Config:
    """T5 1.1 XL: 2,849,757,184 parameters."""
    cfg = experiments.get("t5-v1.1-small")
    return resized(cfg, model_dim=2048, num_layers=24, num_heads=32, hidden_dim=5120)


def t5_v1_1_xxl() -> Trainer.Config:
    """T5 1.1 XXL: 11,135,332,352 parameters."""
    cfg = experiments.get("t5-v1.1-small")
    return resized(cfg, model_dim=4096, num_layers=24, num_heads=64, hidden_dim=10_240)


def t5_v1_1_test() -> Trainer.Config:
    """T5 1.1's structure with 0.2M parameters, on bytes."""
    return _gated(
        experiments.get("t5-test"), num_layers=2, num_heads=4, hidden_dim=176, head_dim=16
    )


def _gated(cfg: Trainer.Config, *, num_layers: int, **dims: int) -> Trainer.Config:
    """Gives the networks gates, the model a head of its own, and no dropout."""
    model: Any = cfg.model
    linear = Linear.Config(bias=False, weight_init=_BY_FAN_IN)
    for network in model.find(FeedForward.Config).values():
        network.set(activation="gelu_tanh", gate=linear)
    for dropout in model.find(Dropout.Config).values():
        dropout.set(rate=0.0)
    model.set(lm_head=LMHead.Config(weight_init=_BY_FAN_IN))
    return resized(cfg, model_dim=model.model_dim, num_layers=num_layers, **dims)


def resized(
    cfg: Trainer.Config,
    *,
    model_dim: int,
    num_layers: int,
    num_heads: int,
    hidden_dim: int,
    head_dim: int = _HEAD_DIM,
) -> Trainer.Config:
    """Changes the dims, and what follows from them, and returns the config.

    A tied head reads hidden states times ``model_dim ** -0.5``; a head of its own reads them as
    they are. The relative biases start with that deviation.
    """
    model: Any = cfg.model
    sized(
        cfg,
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        hidden_dim=hidden_dim,
        head_dim=head_dim,
    )
    init = VarianceScaling(scale=1 / head_dim, distribution="normal")
    for layer in (model.encoder.layer, model.decoder.layer):
        layer.attention.qkv.query.set(weight_init=init)
    model.decoder.layer.cross_attention.query.set(weight_init=init)
    for stack in (model.encoder, model.decoder):
        stack.shared.set(weight_init=Normal(stddev=model_dim**-0.5))
    model.embedding.set(head_scale=model_dim**-0.5 if model.lm_head is None else 1.0)
    return cfg
