"""The member of glassllm: version 0.1.0's ``Config`` and training script. The count is tested."""

from __future__ import annotations

from axcore.train import Trainer
from axlearn_models._llama_like import llama_like, pretraining


def glassllm() -> Trainer.Config:
    """Portuguese and English alike: 852,608 parameters, 3,000 steps of 16 rows of 128 tokens."""
    model = llama_like(
        vocab_size=1024,
        model_dim=128,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=341,
        norm_eps=1e-6,
        tied=True,
    )
    cfg = pretraining(
        model,
        tokens=3000 * 16 * 128,
        batch_size=16,
        seq_len=128,
        peak=3e-3,
        warmup_steps=100,
    )
    cfg.model.set(compute_dtype=None)
    return cfg
