"""The members of Gemma 3, as text models: what reads images is not a part of them.

Sizes: Gemma 3 Technical Report (arXiv:2503.19786, tables 1 and 2) and the ``config.json`` published
with the weights; the 270M model came later. The report gives the tokens and neither rates nor
batches: those are Llama 2's here. The models are published as distilled; here they train like any
other. The counts are exact and tested.
"""

from __future__ import annotations

from axcore import experiments
from axcore.layers import RMSNorm
from axcore.train import Trainer
from axlearn_models._gemma import (
    gemma_like,
    resized_gemma,
    rope_of_layer,
    shrunk_gemma,
)
from axlearn_models._llama_like import pretraining, trained_on, with_qk_norm
from axlearn_models._windows import alternating, split_layers
from axlearn_rope import LinearScaling, RoPE

_PERIOD = (True, True, True, True, True, False)


def gemma3_1b() -> Trainer.Config:
    """Gemma 3 1B: 999,885,952 parameters, 2T tokens; local layers see 512 tokens."""
    model = gemma_like(
        vocab_size=262_144,
        model_dim=1152,
        num_layers=26,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        hidden_dim=6912,
        query_scale=256,
        query_key_transform=RoPE.Config(base=1_000_000.0),
    )
    cfg = pretraining(model, tokens=2e12, batch_size=128, seq_len=32_768, peak=3e-4)
    with_qk_norm(cfg, RMSNorm.Config(eps=1e-6, unit_offset=True), over="head_dim")
    alternating(cfg, local=_PERIOD, window=512)
    for layer in split_layers(cfg)[0]:
        rope_of_layer(layer).set(base=10_000.0)
    return cfg


def gemma3_270m() -> Trainer.Config:
    """Gemma 3 270M: 268,098,176 parameters, 6T tokens."""
    cfg = experiments.get("gemma3-1B")
    trained_on(cfg, tokens=6e12)
    return resized_gemma(cfg, model_dim=640, num_layers=18, hidden_dim=2048)


def gemma3_4b() -> Trainer.Config:
    """Gemma 3 4B: 3,880,263,168 parameters without images, 4T tokens.

    From here on local layers see 1,024 tokens, and global ones 131,072 positions, eight times those
    of the first training.
    """
    cfg = experiments.get("gemma3-1B")
    trained_on(cfg, tokens=4e12)
    resized_gemma(
        cfg,
        vocab_size=262_208,
        model_dim=2560,
        num_layers=34,
        num_heads=8,
        num_kv_heads=4,
        hidden_dim=10_240,
    )
    alternating(cfg, local=_PERIOD, window=1024)
    for layer in split_layers(cfg)[1]:
        rope_of_layer(layer).set(scaling=LinearScaling(factor=8.0))
    return cfg


def gemma3_12b() -> Trainer.Config:
    """Gemma 3 12B: 11,766,034,176 parameters without images, 12T tokens."""
    cfg = experiments.get("gemma3-4B")
    trained_on(cfg, tokens=12e12)
    return resized_gemma(
        cfg, model_dim=3840, num_layers=48, num_heads=16, num_kv_heads=8, hidden_dim=15_360
    )


def gemma3_27b() -> Trainer.Config:
    """Gemma 3 27B: 27,009,346,304 parameters without images, 14T tokens."""
    cfg = experiments.get("gemma3-4B")
    trained_on(cfg, tokens=14e12)
    return resized_gemma(
        cfg,
        model_dim=5376,
        num_layers=62,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        hidden_dim=21_504,
        query_scale=5376 / 32,
    )


def gemma3_test() -> Trainer.Config:
    """Gemma 3's structure with 0.2M parameters, windows of 16 and a period of three, on bytes."""
    cfg = shrunk_gemma(experiments.get("gemma3-1B"), num_layers=4)
    return alternating(cfg, local=(True, True, False), window=16)
