"""The members of fuji. The number after ``v`` is Llama's; each docstring names the release.

Sizes and recipes: LLaMA (arXiv:2302.13971, table 2 and section 2.3), Llama 2 (arXiv:2307.09288,
table 1 and section 2.2), The Llama 3 Herd of Models (arXiv:2407.21783, table 3 and section 3.4),
and the ``config.json`` published with each release's weights. The counts are exact and tested.
"""

from __future__ import annotations

from axcore import experiments
from axcore.train import Trainer
from axlearn_models._llama_like import (
    learning_rate,
    llama_like,
    normalized,
    pretraining,
    resized,
    rope_of,
    shrunk,
    trained_on,
)
from axlearn_rope import Llama3Scaling

# -- v1: Llama 1. 2,048 tokens, 32,000 sentencepiece tokens, batches of 4M tokens ------------------


def fuji_7b_v1() -> Trainer.Config:
    """Llama 1 7B: 6,738,415,616 parameters, 1.0T tokens."""
    model = llama_like(
        vocab_size=32_000,
        model_dim=4096,
        num_layers=32,
        num_heads=32,
        hidden_dim=11_008,
        norm_eps=1e-6,
    )
    return pretraining(model, tokens=1.0e12, batch_size=2048, seq_len=2048, peak=3e-4)


def fuji_13b_v1() -> Trainer.Config:
    """Llama 1 13B: 13,015,864,320 parameters, 1.0T tokens."""
    cfg = experiments.get("fuji-7B-v1")
    return resized(cfg, model_dim=5120, num_layers=40, num_heads=40, hidden_dim=13_824)


def fuji_33b_v1() -> Trainer.Config:
    """Llama 1 33B: 32,528,943,616 parameters, 1.4T tokens at half the rate."""
    cfg = experiments.get("fuji-7B-v1")
    learning_rate(cfg).set(peak=1.5e-4)
    trained_on(cfg, tokens=1.4e12, warmup_steps=2000)
    return resized(cfg, model_dim=6656, num_layers=60, num_heads=52, hidden_dim=17_920)


def fuji_65b_v1() -> Trainer.Config:
    """Llama 1 65B: 65,285,660,672 parameters, 1.4T tokens."""
    cfg = experiments.get("fuji-33B-v1")
    normalized(cfg, eps=1e-5)
    return resized(cfg, model_dim=8192, num_layers=80, num_heads=64, hidden_dim=22_016)


def fuji_test_v1() -> Trainer.Config:
    """Llama 1's structure with 0.1M parameters, on bytes."""
    return shrunk(experiments.get("fuji-7B-v1"))


# -- v2: Llama 2. 4,096 tokens, 2.0T tokens; the 70B model groups its queries ----------------------


def fuji_7b_v2() -> Trainer.Config:
    """Llama 2 7B: 6,738,415,616 parameters, 2.0T tokens."""
    cfg = experiments.get("fuji-7B-v1")
    normalized(cfg, eps=1e-5)
    cfg.learner.optimizer.set(eps=1e-5)
    cfg.set(seq_len=4096, batch_size=1024)
    return trained_on(cfg, tokens=2.0e12, warmup_steps=2000)


def fuji_13b_v2() -> Trainer.Config:
    """Llama 2 13B: 13,015,864,320 parameters, 2.0T tokens."""
    cfg = experiments.get("fuji-7B-v2")
    return resized(cfg, model_dim=5120, num_layers=40, num_heads=40, hidden_dim=13_824)


def fuji_70b_v2() -> Trainer.Config:
    """Llama 2 70B: 68,976,648,192 parameters, 2.0T tokens at half the rate."""
    cfg = experiments.get("fuji-7B-v2")
    learning_rate(cfg).set(peak=1.5e-4)
    return resized(
        cfg, model_dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden_dim=28_672
    )


def fuji_test_v2() -> Trainer.Config:
    """Llama 2's structure (grouped queries) with 0.1M parameters, on bytes."""
    return shrunk(experiments.get("fuji-7B-v2"), num_kv_heads=2)


# -- v3: Llama 3, 3.1 and 3.2. 128,256 tiktoken tokens, grouped queries, base 500,000 --------------
# The batch is the 16M tokens that the report gives for the last and longest part of the 405B run;
# it gives none for the other sizes.


def fuji_8b_v3() -> Trainer.Config:
    """Llama 3 8B: 8,030,261,248 parameters, 15T tokens."""
    cfg = experiments.get("fuji-7B-v2")
    resized(cfg, vocab_size=128_256, hidden_dim=14_336, num_kv_heads=8)
    rope_of(cfg).set(base=500_000.0)
    cfg.learner.optimizer.set(eps=1e-8)
    learning_rate(cfg).set(end_ratio=0.01)
    cfg.set(seq_len=8192, batch_size=2048)
    return trained_on(cfg, tokens=15e12, warmup_steps=8000)


def fuji_70b_v3() -> Trainer.Config:
    """Llama 3 70B: 70,553,706,496 parameters, 15T tokens at half the rate."""
    cfg = experiments.get("fuji-8B-v3")
    learning_rate(cfg).set(peak=1.5e-4)
    return resized(cfg, model_dim=8192, num_layers=80, num_heads=64, hidden_dim=28_672)


def fuji_8b_v3_1() -> Trainer.Config:
    """Llama 3.1 8B: Llama 3's with rotary frequencies for 131,072 positions."""
    return _long_context(experiments.get("fuji-8B-v3"), factor=8.0)


def fuji_70b_v3_1() -> Trainer.Config:
    """Llama 3.1 70B: Llama 3's with rotary frequencies for 131,072 positions."""
    return _long_context(experiments.get("fuji-70B-v3"), factor=8.0)


def fuji_405b_v3() -> Trainer.Config:
    """Llama 3.1 405B (there is no 3.0): 405,853,388,800 parameters, 15.6T tokens."""
    cfg = experiments.get("fuji-70B-v3.1")
    learning_rate(cfg).set(peak=8e-5)
    trained_on(cfg, tokens=15.6e12, warmup_steps=8000)
    return resized(cfg, model_dim=16_384, num_layers=126, num_heads=128, hidden_dim=53_248)


def fuji_3b_v3() -> Trainer.Config:
    """Llama 3.2 3B: 3,212,749,824 parameters, tied head, 9T tokens.

    Published as pruned from 3.1 8B and distilled; here its structure with the 8B recipe.
    """
    cfg = _long_context(experiments.get("fuji-8B-v3"), factor=32.0)
    cfg.model.set(lm_head=None)
    trained_on(cfg, tokens=9e12)
    return resized(cfg, model_dim=3072, num_layers=28, num_heads=24, hidden_dim=8192)


def fuji_1b_v3() -> Trainer.Config:
    """Llama 3.2 1B: 1,235,814,400 parameters, tied head, 9T tokens; see ``fuji_3b_v3``."""
    cfg = experiments.get("fuji-3B-v3")
    return resized(cfg, model_dim=2048, num_layers=16, num_heads=32)


def fuji_test_v3() -> Trainer.Config:
    """Llama 3.1's structure (grouped queries, scaled frequencies), 0.1M parameters, on bytes."""
    return shrunk(experiments.get("fuji-8B-v3.1"), num_kv_heads=2)


def _long_context(cfg: Trainer.Config, *, factor: float) -> Trainer.Config:
    """Scales the rotary frequencies as the 3.1 and 3.2 releases do."""
    scaling = Llama3Scaling(
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_seq_len=8192,
    )
    rope_of(cfg).set(scaling=scaling)
    return cfg
