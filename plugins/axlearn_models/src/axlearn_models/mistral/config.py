"""The members of Mistral.

Sizes: Mistral 7B (arXiv:2310.06825, table 1) and the ``config.json`` published with the weights.
Nothing is published of the training: tokens, rates and batches are Llama 2's here. The counts are
exact and tested.
"""

from __future__ import annotations

from axcore import experiments
from axcore.train import Trainer
from axlearn_models._llama_like import (
    attention_of,
    llama_like,
    pretraining,
    resized,
    rope_of,
    shrunk,
)
from axlearn_models._windows import causal


def mistral_7b_v0_1() -> Trainer.Config:
    """Mistral 7B v0.1: 7,241,732,096 parameters; a token sees the last 4,096."""
    model = llama_like(
        vocab_size=32_000,
        model_dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        hidden_dim=14_336,
    )
    cfg = pretraining(model, tokens=2.0e12, batch_size=512, seq_len=8192, peak=3e-4)
    attention_of(cfg).set(mask=causal(4096))
    return cfg


def mistral_7b_v0_3() -> Trainer.Config:
    """Mistral 7B v0.3: 7,248,023,552 parameters, no window, base 1,000,000."""
    cfg = experiments.get("mistral-7B-v0.1")
    attention_of(cfg).set(mask=causal(None))
    rope_of(cfg).set(base=1_000_000.0)
    return resized(cfg, vocab_size=32_768)


def mistral_nemo_12b() -> Trainer.Config:
    """Mistral Nemo 12B: 12,247,782,400 parameters, heads narrower than the model's share."""
    cfg = experiments.get("mistral-7B-v0.3")
    return resized(cfg, vocab_size=131_072, model_dim=5120, num_layers=40, head_dim=128)


def mistral_test() -> Trainer.Config:
    """Mistral 7B v0.1's structure (window, grouped queries) with 0.1M parameters, on bytes."""
    cfg = shrunk(experiments.get("mistral-7B-v0.1"), num_kv_heads=2)
    attention_of(cfg).set(mask=causal(16))
    return cfg
