"""The members of Mixtral.

Sizes: Mixtral of Experts (arXiv:2401.04088, table 1) and the ``config.json`` published with the
weights, with the coefficient of the balance loss. Nothing else is published of the training:
tokens, rates and batches are those of Mistral here. The counts are exact and tested.
"""

from __future__ import annotations

from axcore import experiments
from axcore.train import Trainer
from axlearn_models._llama_like import resized
from axlearn_models._mixture import balanced, mixed, shrunk_mixture


def mixtral_8x7b() -> Trainer.Config:
    """Mixtral 8x7B: 46,702,792,704 parameters, 12,879,925,248 of them for each token."""
    cfg = resized(experiments.get("mistral-7B-v0.3"), vocab_size=32_000)
    return mixed(cfg, count=8, top_k=2, hidden_dim=14_336, balance=0.02)


def mixtral_8x22b() -> Trainer.Config:
    """Mixtral 8x22B: 140,620,634,112 parameters, 39,152,031,744 of them for each token."""
    cfg = experiments.get("mixtral-8x7B")
    resized(cfg, model_dim=6144, num_layers=56, num_heads=48, hidden_dim=16_384)
    return balanced(cfg, 0.001)


def mixtral_test() -> Trainer.Config:
    """Mixtral's structure with 0.2M parameters, on bytes."""
    return shrunk_mixture(experiments.get("mixtral-8x7B"), num_kv_heads=2)
