"""The members of Phi-3.

Sizes: Phi-3 Technical Report (arXiv:2404.14219, section 2) and the ``config.json`` published with
the weights. The report gives the tokens and neither rates nor batches: those are Llama 2's here.
Phi-3-small is another architecture and is not here. The counts are exact and tested.
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
    trained_on,
)
from axlearn_models._windows import causal
from axlearn_rope import LongRoPEScaling

# Divisors of the 48 rotary frequencies, of the release of April 2024.
_SHORT = (
    *(1.05, 1.05, 1.05, 1.1, 1.1, 1.15, 1.2, 1.25, 1.3, 1.35, 1.5),
    *(2.0,) * 21,
    *(2.05, 2.05, 2.05, 2.1, 2.1, 2.1, 2.15, 2.15, 2.35, 2.55, 2.6, 2.6, 2.75, 2.85, 2.85, 2.95),
)
_LONG = (
    *(1.03, 1.05, 1.05, 1.0799999, 1.2299999, 1.2299999, 1.3, 1.4499999, 1.5999999, 1.6499999),
    *(1.8999999, 2.86, 3.6899998, 5.4199996, 5.49, 5.49, 9.09, 11.58, 15.66, 15.7699995, 15.79),
    *(18.36, 21.99, 23.08, 30.009998, 32.350002, 32.590004, 35.560005, 39.950005, 53.840004),
    *(56.200005, 57.950005, 59.290005, 59.770004, 59.920006, 61.190006, 61.960007, 62.500008),
    *(63.370007, 63.480007, 63.480007, 63.660007, 63.850006, 64.08001, 64.76001, 64.80001),
    *(64.81001, 64.81001),
)


def phi3_mini_4k() -> Trainer.Config:
    """Phi-3-mini-4k: 3,821,079,552 parameters, 3.3T tokens; a token sees the last 2,047."""
    model = llama_like(
        vocab_size=32_064,
        model_dim=3072,
        num_layers=32,
        num_heads=32,
        hidden_dim=8192,
    )
    cfg = pretraining(model, tokens=3.3e12, batch_size=1024, seq_len=4096, peak=3e-4)
    attention_of(cfg).set(mask=causal(2047))
    return cfg


def phi3_mini_128k() -> Trainer.Config:
    """Phi-3-mini-128k: mini-4k's with rotary frequencies for 131,072 positions and no window.

    The frequencies are the short ones while a sequence fits into the 4,096 positions of the first
    training, and the long ones beyond. A sequence that grows past them in cached decode keeps the
    keys turned by the short ones, as elsewhere; ``seq_len`` of the scaling settles on one set.
    """
    cfg = experiments.get("phi3-mini-4k")
    attention_of(cfg).set(mask=causal(None))
    scaling = LongRoPEScaling(
        short_factor=_SHORT, long_factor=_LONG, factor=32.0, original_max_seq_len=4096
    )
    rope_of(cfg).set(scaling=scaling)
    return cfg


def phi3_medium_4k() -> Trainer.Config:
    """Phi-3-medium-4k: 13,960,238,080 parameters, 4.8T tokens, grouped queries."""
    cfg = experiments.get("phi3-mini-4k")
    trained_on(cfg, tokens=4.8e12)
    return resized(
        cfg, model_dim=5120, num_layers=40, num_heads=40, num_kv_heads=10, hidden_dim=17_920
    )


def phi3_test() -> Trainer.Config:
    """Phi-3-medium-4k's structure (window, grouped queries) with 0.1M parameters, on bytes."""
    cfg = shrunk(experiments.get("phi3-medium-4k"), num_kv_heads=2)
    attention_of(cfg).set(mask=causal(15))
    return cfg
