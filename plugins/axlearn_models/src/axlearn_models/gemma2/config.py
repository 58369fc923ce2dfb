"""The members of Gemma 2.

Sizes: Gemma 2 (arXiv:2408.00118, tables 1 and 2) and the ``config.json`` published with the
weights. The report gives the tokens and neither rates nor batches: those are Llama 2's here. The 2B
and 9B models are published as distilled; here they train like any other. The counts are exact and
tested.
"""

from __future__ import annotations

from axcore import experiments
from axcore.train import Trainer
from axlearn_models._gemma import gemma_like, resized_gemma, shrunk_gemma
from axlearn_models._llama_like import pretraining, trained_on
from axlearn_models._windows import alternating
from axlearn_rope import RoPE

_PERIOD = (True, False)


def gemma2_2b() -> Trainer.Config:
    """Gemma 2 2B: 2,614,341,888 parameters, 2T tokens; every other layer sees 4,096 tokens."""
    model = gemma_like(
        vocab_size=256_000,
        model_dim=2304,
        num_layers=26,
        num_heads=8,
        num_kv_heads=4,
        head_dim=256,
        hidden_dim=9216,
        query_scale=256,
        query_key_transform=RoPE.Config(base=10_000.0),
    )
    model.set_path("embedding.logit_cap", 30.0)
    model.set_path("decoder.layer.attention.logit_cap", 50.0)
    cfg = pretraining(model, tokens=2e12, batch_size=512, seq_len=8192, peak=3e-4)
    return alternating(cfg, local=_PERIOD, window=4096)


def gemma2_9b() -> Trainer.Config:
    """Gemma 2 9B: 9,241,705,984 parameters, 8T tokens."""
    cfg = experiments.get("gemma2-2B")
    trained_on(cfg, tokens=8e12)
    return resized_gemma(
        cfg, model_dim=3584, num_layers=42, num_heads=16, num_kv_heads=8, hidden_dim=14_336
    )


def gemma2_27b() -> Trainer.Config:
    """Gemma 2 27B: 27,227,128,320 parameters, 13T tokens; logits scaled by the model's width."""
    cfg = experiments.get("gemma2-2B")
    trained_on(cfg, tokens=13e12)
    return resized_gemma(
        cfg,
        model_dim=4608,
        num_layers=46,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        hidden_dim=36_864,
        query_scale=4608 / 32,
    )


def gemma2_test() -> Trainer.Config:
    """Gemma 2's structure with 0.2M parameters and windows of 16, on bytes."""
    cfg = shrunk_gemma(experiments.get("gemma2-2B"), num_layers=3)
    return alternating(cfg, local=_PERIOD, window=16)
