"""The members of ViT.

Sizes: Dosovitskiy et al., arXiv:2010.11929 (table 1), images of 224 pixels, 1,000 classes. Recipe:
table 3's row of ImageNet, 300 epochs of 1,281,167 images in batches of 4,096, AdamW with a rate of
3e-3 that falls as a cosine, decay 0.3, dropout 0.1; the paper does not give that row for H/14. The
counts are exact and tested. The norms' 1e-12 is what the published weights are converted with.

Images are not published with the models: until you say which, members read drawn numbers.
"""

from __future__ import annotations

from typing import Any

from axcore import experiments
from axcore.config import config_for, scaled
from axcore.data import DrawnNumbers, ImageInput
from axcore.layers import (
    QKV,
    Attention,
    Dropout,
    Encoder,
    FeedForward,
    LayerNorm,
    LearnedPositions,
    Linear,
    Normal,
    PatchEmbedding,
    TransformerLayer,
    VisionTransformer,
)
from axcore.ops.masks import Full
from axcore.train import Learner, Trainer, optimizers, schedules
from axlearn_models._encoders import shrunk_encoder, sized

__all__ = ["vit_b16", "vit_h14", "vit_l16", "vit_test"]


def vit_b16() -> Trainer.Config:
    """ViT-B/16: 86,567,656 parameters."""
    init = Normal(stddev=0.02)
    linear = Linear.Config(bias=True, weight_init=init)
    norm = LayerNorm.Config(eps=1e-12)
    dropout = Dropout.Config(rate=0.1)
    layer = TransformerLayer.Config(
        attention_norm=norm,
        attention=Attention.Config(
            num_heads=12,
            qkv=QKV.Config(query=linear, key=linear, value=linear),
            output=linear,
            mask=Full(),
        ),
        feed_forward_norm=norm,
        feed_forward=FeedForward.Config(hidden_dim=3072, activation="gelu", up=linear, down=linear),
        dropout=dropout,
    )
    model = VisionTransformer.Config(
        model_dim=768,
        image_size=224,
        patch_size=16,
        num_channels=3,
        num_classes=1000,
        compute_dtype="bfloat16",
        patches=PatchEmbedding.Config(projection=linear),
        class_token_init=init,
        position=LearnedPositions.Config(weight_init=init),
        dropout=dropout,
        encoder=Encoder.Config(num_layers=12, layer=layer, final_norm=norm),
        classifier=linear,
    )
    learning_rate = config_for(
        schedules.linear_warmup_cosine,
        peak=3e-3,
        warmup_steps=scaled(10_000 / 93_835, of="max_step", minimum=0),
        total_steps=scaled(1, of="max_step"),
        end_ratio=0.0,
    )
    adamw = config_for(optimizers.adamw, learning_rate=learning_rate, b2=0.999, weight_decay=0.3)
    source = DrawnNumbers.Config(
        image_size=224, num_channels=3, num_classes=1000, num_images=100_000
    )
    return Trainer.Config(
        model=model,
        learner=Learner.Config(optimizer=adamw, clip_global_norm=1.0),
        input=ImageInput.Config(source=source),
        max_step=300 * 1_281_167 // 4096,
        batch_size=4096,
        seq_len=197,  # 14 x 14 patches and the class token
    )


def vit_l16() -> Trainer.Config:
    """ViT-L/16: 304,326,632 parameters."""
    return sized(
        experiments.get("vit-B16"), model_dim=1024, num_layers=24, num_heads=16, hidden_dim=4096
    )


def vit_h14() -> Trainer.Config:
    """ViT-H/14: 632,045,800 parameters."""
    cfg = sized(
        experiments.get("vit-L16"), model_dim=1280, num_layers=32, num_heads=16, hidden_dim=5120
    )
    model: Any = cfg.model
    model.set(patch_size=14)
    return cfg.set(seq_len=257)


def vit_test() -> Trainer.Config:
    """ViT's structure with 0.1M parameters, on drawn digits of 16 pixels."""
    cfg = shrunk_encoder(experiments.get("vit-B16"))
    model: Any = cfg.model
    model.set(image_size=16, patch_size=4, num_channels=1, num_classes=10)
    cfg.input.set(source=DrawnNumbers.Config())
    cfg.set_path("evalers.heldout.max_documents", None)
    return cfg.set(batch_size=32, seq_len=17)
