"""The dense members of Qwen2.5.

Sizes: Qwen2.5 Technical Report (arXiv:2412.15115, table 1) and the ``config.json`` published with
the base models. The report gives 18T tokens of 4,096 positions and scaling laws in place of rates
and batches: those are Llama 2's here. The counts are exact and tested.
"""

from __future__ import annotations

from typing import Any

from axcore import experiments
from axcore.layers import LMHead, Normal
from axcore.train import Trainer
from axlearn_models._llama_like import llama_like, normalized, pretraining, resized, shrunk
from axlearn_rope import RoPE


def qwen2_5_0_5b() -> Trainer.Config:
    """Qwen2.5 0.5B: 494,032,768 parameters, tied head."""
    model = llama_like(
        vocab_size=151_936,
        model_dim=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        hidden_dim=4864,
        query_key_transform=RoPE.Config(base=1_000_000.0),
        norm_eps=1e-6,
        tied=True,
    )
    qkv: Any = model.get_path("decoder.layer.attention.qkv")
    for projection in (qkv.query, qkv.key, qkv.value):
        projection.set(bias=True)
    return pretraining(model, tokens=18e12, batch_size=1024, seq_len=4096, peak=3e-4)


def qwen2_5_1_5b() -> Trainer.Config:
    """Qwen2.5 1.5B: 1,543,714,304 parameters, tied head."""
    cfg = experiments.get("qwen2.5-0.5B")
    return resized(cfg, model_dim=1536, num_layers=28, num_heads=12, hidden_dim=8960)


def qwen2_5_3b() -> Trainer.Config:
    """Qwen2.5 3B: 3,085,938,688 parameters, tied head."""
    cfg = experiments.get("qwen2.5-0.5B")
    return resized(cfg, model_dim=2048, num_layers=36, num_heads=16, hidden_dim=11_008)


def qwen2_5_7b() -> Trainer.Config:
    """Qwen2.5 7B: 7,615,616,512 parameters, a head of its own from here on."""
    cfg = experiments.get("qwen2.5-0.5B")
    cfg.model.set(lm_head=LMHead.Config(weight_init=Normal(stddev=0.02)))
    return resized(
        cfg,
        vocab_size=152_064,
        model_dim=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        hidden_dim=18_944,
    )


def qwen2_5_14b() -> Trainer.Config:
    """Qwen2.5 14B: 14,770,033,664 parameters, norms with 1e-5 from here on."""
    cfg = experiments.get("qwen2.5-7B")
    normalized(cfg, eps=1e-5)
    return resized(
        cfg, model_dim=5120, num_layers=48, num_heads=40, num_kv_heads=8, hidden_dim=13_824
    )


def qwen2_5_32b() -> Trainer.Config:
    """Qwen2.5 32B: 32,763,876,352 parameters."""
    return resized(experiments.get("qwen2.5-14B"), num_layers=64, hidden_dim=27_648)


def qwen2_5_72b() -> Trainer.Config:
    """Qwen2.5 72B: 72,706,203,648 parameters."""
    cfg = experiments.get("qwen2.5-14B")
    return resized(cfg, model_dim=8192, num_layers=80, num_heads=64, hidden_dim=29_568)


def qwen2_5_test() -> Trainer.Config:
    """Qwen2.5's structure (biases, grouped queries, tied head), 0.1M parameters, on bytes."""
    return shrunk(experiments.get("qwen2.5-0.5B"), num_kv_heads=2)
