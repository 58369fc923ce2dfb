"""The dense members of Qwen3.

Sizes: Qwen3 Technical Report (arXiv:2505.09388, table 1) and the ``config.json`` published with the
weights. The report gives 36T tokens, all but the last stage of 4,096 positions, and scaling laws in
place of rates and batches: those are Llama 2's here. The counts are exact and tested.
"""

from __future__ import annotations

from axcore import experiments
from axcore.layers import LMHead, Normal, RMSNorm
from axcore.train import Trainer
from axlearn_models._llama_like import (
    attention_of,
    llama_like,
    pretraining,
    resized,
    shrunk,
    with_qk_norm,
)
from axlearn_rope import RoPE


def qwen3_0_6b() -> Trainer.Config:
    """Qwen3 0.6B: 596,049,920 parameters, tied head."""
    model = llama_like(
        vocab_size=151_936,
        model_dim=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        hidden_dim=3072,
        query_key_transform=RoPE.Config(base=1_000_000.0),
        norm_eps=1e-6,
        tied=True,
    )
    cfg = pretraining(model, tokens=36e12, batch_size=1024, seq_len=4096, peak=3e-4)
    attention_of(cfg).set(head_dim=128)
    return with_qk_norm(cfg, RMSNorm.Config(eps=1e-6), over="head_dim")


def qwen3_1_7b() -> Trainer.Config:
    """Qwen3 1.7B: 1,720,574,976 parameters, tied head."""
    return resized(experiments.get("qwen3-0.6B"), model_dim=2048, hidden_dim=6144)


def qwen3_4b() -> Trainer.Config:
    """Qwen3 4B: 4,022,468,096 parameters, tied head."""
    cfg = experiments.get("qwen3-0.6B")
    return resized(cfg, model_dim=2560, num_layers=36, num_heads=32, hidden_dim=9728)


def qwen3_8b() -> Trainer.Config:
    """Qwen3 8B: 8,190,735,360 parameters, a head of its own from here on."""
    cfg = experiments.get("qwen3-4B")
    cfg.model.set(lm_head=LMHead.Config(weight_init=Normal(stddev=0.02)))
    return resized(cfg, model_dim=4096, hidden_dim=12_288)


def qwen3_14b() -> Trainer.Config:
    """Qwen3 14B: 14,768,307,200 parameters."""
    cfg = experiments.get("qwen3-8B")
    return resized(cfg, model_dim=5120, num_layers=40, num_heads=40, hidden_dim=17_408)


def qwen3_32b() -> Trainer.Config:
    """Qwen3 32B: 32,762,123,264 parameters."""
    cfg = experiments.get("qwen3-14B")
    return resized(cfg, num_layers=64, num_heads=64, hidden_dim=25_600)


def qwen3_test() -> Trainer.Config:
    """Qwen3's structure (norms on queries and keys, wide heads), 0.1M parameters, on bytes."""
    cfg = shrunk(experiments.get("qwen3-0.6B"), num_kv_heads=2)
    return resized(cfg, head_dim=32)
