"""The members of BERT.

Sizes and recipe: BERT (Devlin et al., arXiv:1810.04805, sections 3 and 3.1, appendix A.2), the
uncased vocabulary of 30,522 pieces. Training masks 15 % of the tokens. The paper's second task,
whether two sentences follow one another, is not a part here (later work leaves it out: RoBERTa,
arXiv:1907.11692), so neither is the pooler that served it; the counts are of the encoder with the
head for hidden tokens, as ``BertForMaskedLM`` has them. They are exact and tested.

The input's tokenizer must be set to one that has the token ``[MASK]``. Dropout of the attention
weights, 0.1 there, is not a part of the attention here.
"""

from __future__ import annotations

from typing import Any

from axcore import experiments
from axcore.config import config_for, scaled
from axcore.data import MaskedTokens, TransformedTextInput
from axcore.layers import (
    QKV,
    Attention,
    Dropout,
    Embedding,
    Encoder,
    EncoderModel,
    FeedForward,
    HeadTransform,
    LayerNorm,
    LearnedPositions,
    Linear,
    Normal,
    PostNormTransformerLayer,
)
from axcore.ops.masks import Full
from axcore.train import Learner, Trainer, optimizers, schedules
from axlearn_models._encoders import shrunk_encoder, sized

__all__ = ["bert_base", "bert_large", "bert_test"]


def bert_base() -> Trainer.Config:
    """BERT base, uncased: 109,514,298 parameters, a million steps of 256 rows."""
    init = Normal(stddev=0.02)
    linear = Linear.Config(bias=True, weight_init=init)
    norm = LayerNorm.Config(eps=1e-12)
    dropout = Dropout.Config(rate=0.1)
    layer = PostNormTransformerLayer.Config(
        attention=Attention.Config(
            num_heads=12,
            qkv=QKV.Config(query=linear, key=linear, value=linear),
            output=linear,
            mask=Full(),
        ),
        attention_norm=norm,
        feed_forward=FeedForward.Config(hidden_dim=3072, activation="gelu", up=linear, down=linear),
        feed_forward_norm=norm,
        dropout=dropout,
    )
    model = EncoderModel.Config(
        vocab_size=30_522,
        model_dim=768,
        max_seq_len=512,
        compute_dtype="bfloat16",
        embedding=Embedding.Config(weight_init=init, head_bias=True),
        num_token_types=2,
        token_type_init=init,
        position=LearnedPositions.Config(weight_init=init),
        embedding_norm=norm,
        dropout=dropout,
        encoder=Encoder.Config(num_layers=12, layer=layer, final_norm=None),
        head_transform=HeadTransform.Config(dense=linear, activation="gelu", norm=norm),
    )
    learning_rate = config_for(
        schedules.linear,
        peak=1e-4,
        warmup_steps=scaled(0.01, of="max_step", minimum=0),
        total_steps=scaled(1, of="max_step"),
    )
    adamw = config_for(
        optimizers.adamw, learning_rate=learning_rate, b2=0.999, eps=1e-6, weight_decay=0.01
    )
    return Trainer.Config(
        model=model,
        learner=Learner.Config(optimizer=adamw, clip_global_norm=1.0),
        input=TransformedTextInput.Config(transform=MaskedTokens.Config(mask_token="[MASK]")),
        max_step=1_000_000,
        batch_size=256,
        seq_len=512,
    )


def bert_large() -> Trainer.Config:
    """BERT large, uncased: 335,174,458 parameters."""
    return sized(
        experiments.get("bert-base"), model_dim=1024, num_layers=24, num_heads=16, hidden_dim=4096
    )


def bert_test() -> Trainer.Config:
    """BERT's structure with 0.1M parameters, on bytes; the id 263 is the mask."""
    cfg = shrunk_encoder(experiments.get("bert-base"))
    model: Any = cfg.model
    model.set(vocab_size=264, max_seq_len=64)
    cfg.set_path("input.transform.mask_token", 263)
    return cfg
