"""The members of Qwen1.5-MoE and Qwen2-MoE.

Sizes: Qwen2 Technical Report (arXiv:2407.10671, table 1) and the ``config.json`` published with the
weights, with the coefficient of the balance loss. Of the training no more is published than 4.5T
tokens for the larger one: tokens, rates and batches are those of Qwen2.5 here. The counts are exact
and tested.
"""

from __future__ import annotations

from axcore import experiments
from axcore.layers import Linear
from axcore.train import Trainer
from axlearn_models._llama_like import layers_of, resized, trained_on
from axlearn_models._mixture import balanced, mixed, mixtures_of, shrunk_mixture


def qwen1_5_moe_a2_7b() -> Trainer.Config:
    """Qwen1.5-MoE-A2.7B: 14,315,784,192 parameters, 2,689,173,504 of them for each token."""
    cfg = resized(
        experiments.get("qwen2.5-7B"),
        vocab_size=151_936,
        model_dim=2048,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
        hidden_dim=5632,
    )
    (layer,) = layers_of(cfg)
    shared = layer.feed_forward.copy()
    mixed(cfg, count=60, top_k=4, hidden_dim=1408, balance=0.001, normalize=False)
    (moe,) = mixtures_of(cfg)
    gate = Linear.Config(bias=False, weight_init=shared.up.weight_init)
    moe.set(shared_experts=shared, shared_gate=gate)
    return cfg


def qwen2_57b_a14b() -> Trainer.Config:
    """Qwen2-57B-A14B: 57,408,658,944 parameters, 14,249,270,784 of them for each token."""
    cfg = resized(
        experiments.get("qwen1.5-MoE-A2.7B"),
        model_dim=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        hidden_dim=2560,
    )
    (moe,) = mixtures_of(cfg)
    moe.set(num_experts=64, top_k=8)
    moe.shared_experts.set(hidden_dim=20_480)
    return balanced(trained_on(cfg, tokens=4.5e12, warmup_steps=2000), 0.001)


def qwen2_moe_test() -> Trainer.Config:
    """The structure of Qwen2's mixtures with 0.2M parameters, on bytes."""
    cfg = shrunk_mixture(experiments.get("qwen2-57B-A14B"), num_kv_heads=2)
    mixtures_of(cfg)[0].shared_experts.set(hidden_dim=88)
    return cfg
