"""The members of SmolLM2.

Sizes and recipes: SmolLM2 (arXiv:2502.02737, sections 4 and 5) and the ``config.json`` published
with the weights. The rotary bases are those of the published models, where the long-context stage
left them. The counts are exact and tested.
"""

from __future__ import annotations

from axcore import experiments
from axcore.config import config_for, scaled
from axcore.train import Trainer, schedules
from axlearn_models._llama_like import (
    initialized,
    llama_like,
    pretraining,
    resized,
    rope_of,
    shrunk,
    trained_on,
)
from axlearn_rope import RoPE


def smollm2_1_7b() -> Trainer.Config:
    """SmolLM2 1.7B: 1,711,376,384 parameters, 11T tokens; linear decay over the last tenth."""
    model = llama_like(
        vocab_size=49_152,
        model_dim=2048,
        num_layers=24,
        num_heads=32,
        hidden_dim=8192,
        query_key_transform=RoPE.Config(base=130_000.0),
        tied=True,
    )
    cfg = pretraining(model, tokens=11e12, batch_size=1024, seq_len=2048, peak=5e-4)
    cfg.learner.optimizer.set(learning_rate=_stable(peak=5e-4, decay=0.1))
    return trained_on(cfg, tokens=11e12, warmup_steps=2000)


def smollm2_360m() -> Trainer.Config:
    """SmolLM2 360M: 361,821,120 parameters, 4T tokens; linear decay over the last fifth."""
    cfg = experiments.get("smollm2-1.7B")
    rope_of(cfg).set(base=100_000.0)
    cfg.learner.optimizer.set(learning_rate=_stable(peak=3e-3, decay=0.2))
    trained_on(cfg, tokens=4e12, warmup_steps=2000)
    return resized(cfg, model_dim=960, num_layers=32, num_heads=15, num_kv_heads=5, hidden_dim=2560)


def smollm2_135m() -> Trainer.Config:
    """SmolLM2 135M: 134,515,008 parameters, 2T tokens; initial deviation 1 / sqrt(576)."""
    cfg = experiments.get("smollm2-360M")
    trained_on(cfg, tokens=2e12, warmup_steps=2000)
    initialized(cfg, stddev=1 / 24)
    return resized(cfg, model_dim=576, num_layers=30, num_heads=9, num_kv_heads=3, hidden_dim=1536)


def smollm2_test() -> Trainer.Config:
    """SmolLM2's structure with 0.1M parameters, on bytes."""
    return shrunk(experiments.get("smollm2-135M"), num_kv_heads=2)


def _stable(*, peak: float, decay: float) -> object:
    """Returns warm-up, a plateau and a linear decay to 0 over the last ``decay`` of the run."""
    return config_for(
        schedules.wsd,
        peak=peak,
        warmup_steps=0,  # as trained_on says
        total_steps=scaled(1, of="max_step"),
        decay_steps=scaled(decay, of="max_step", minimum=0),
    )
