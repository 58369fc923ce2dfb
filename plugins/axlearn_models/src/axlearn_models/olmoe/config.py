"""The member of OLMoE.

Sizes, recipe and losses: OLMoE (arXiv:2409.02060, section 2 and appendix B) and the ``config.json``
published with the weights. The weights of the losses there are of means over layers. The rate falls
to a tenth over the whole run; the last 100B tokens, over which it falls to zero there, are not
apart. The counts are exact and tested.
"""

from __future__ import annotations

from axcore import experiments
from axcore.layers import RMSNorm
from axcore.train import Trainer
from axlearn_models._llama_like import llama_like, pretraining, with_qk_norm
from axlearn_models._mixture import mixed, mixtures_of, shrunk_mixture
from axlearn_moe import RouterZLoss

_NUM_LAYERS = 16


def olmoe_1b_7b() -> Trainer.Config:
    """OLMoE 1B-7B: 6,919,161,856 parameters, 1,282,017,280 of them for each token."""
    model = llama_like(
        vocab_size=50_304, model_dim=2048, num_layers=_NUM_LAYERS, num_heads=16, hidden_dim=1024
    )
    cfg = pretraining(
        model, tokens=5.1e12, batch_size=1024, seq_len=4096, peak=4e-4, warmup_steps=2500
    )
    with_qk_norm(cfg, RMSNorm.Config(eps=1e-5), over="heads")
    mixed(cfg, count=64, top_k=8, hidden_dim=1024, balance=0.01, normalize=False)
    for moe in mixtures_of(cfg):
        moe.set(losses=(*moe.losses, RouterZLoss(0.001 / _NUM_LAYERS)))
    return cfg


def olmoe_test() -> Trainer.Config:
    """OLMoE's structure with 0.2M parameters, on bytes."""
    return shrunk_mixture(experiments.get("olmoe-1B-7B"))
