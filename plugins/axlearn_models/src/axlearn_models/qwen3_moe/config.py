"""The members of Qwen3 that have mixtures of experts; names state total and active billions.

Sizes: Qwen3 Technical Report (arXiv:2505.09388, table 2) and the ``config.json`` published with the
weights, with the coefficient of the balance loss. The recipe is that of the dense models. The
counts are exact and tested.
"""

from __future__ import annotations

from axcore import experiments
from axcore.train import Trainer
from axlearn_models._llama_like import resized
from axlearn_models._mixture import balanced, mixed, shrunk_mixture


def qwen3_30b_a3b() -> Trainer.Config:
    """Qwen3 30B-A3B: 30,532,122,624 parameters, 3,353,032,704 of them for each token."""
    cfg = resized(
        experiments.get("qwen3-8B"), model_dim=2048, num_layers=48, num_heads=32, num_kv_heads=4
    )
    return mixed(cfg, count=128, top_k=8, hidden_dim=768, balance=0.001)


def qwen3_235b_a22b() -> Trainer.Config:
    """Qwen3 235B-A22B: 235,093,634,560 parameters, 22,190,763,520 of them for each token."""
    cfg = experiments.get("qwen3-30B-A3B")
    resized(cfg, model_dim=4096, num_layers=94, num_heads=64, hidden_dim=1536)
    return balanced(cfg, 0.001)


def qwen3_moe_test() -> Trainer.Config:
    """The structure of Qwen3's mixtures, 0.2M parameters, on bytes."""
    return shrunk_mixture(experiments.get("qwen3-30B-A3B"), num_kv_heads=2, head_dim=32)
