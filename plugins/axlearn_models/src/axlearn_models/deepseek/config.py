"""The members of DeepSeek-V2 and V3.

Sizes and recipes: DeepSeek-V2 (arXiv:2405.04434, section 3.1), V3 (arXiv:2412.19437, section 4.2)
and the ``config.json`` published with the weights. The rate is a cosine over the whole run where
theirs are steps or parts of one, and the batch is the final one. Not here: V2's losses that balance
devices and communication, and V3's prediction of a further token, which ``multi_token`` of the
model adds. The counts are exact, V3's with the biases of the choice, and tested.
"""

from __future__ import annotations

import math
from typing import Any

from axcore import experiments
from axcore.layers import FeedForward, Normal
from axcore.train import Trainer
from axlearn_models._latent_attention import LatentAttention, LatentHeads
from axlearn_models._llama_like import initialized, layers_of, llama_like, pretraining, trained_on
from axlearn_models._mixture import mixed, mixtures_of, shrunk_mixture
from axlearn_moe import LoadBalanceLoss, SequenceBalanceLoss
from axlearn_rope import RoPE, YaRNScaling

__all__ = ["attention_scale", "deepseek_v2", "deepseek_v3", "deepseek_v3_test", "dense_first"]

_STDDEV = 0.006


def deepseek_v3() -> Trainer.Config:
    """DeepSeek-V3: 671,026,419,200 parameters, 37,552,282,624 of them for each token."""
    cfg = pretraining(
        llama_like(
            vocab_size=129_280,
            model_dim=7168,
            num_layers=61,
            num_heads=128,
            hidden_dim=18_432,
            norm_eps=1e-6,
            init_stddev=_STDDEV,
        ),
        tokens=14.8e12,
        batch_size=15_360,
        seq_len=4096,
        peak=2.2e-4,
    )
    (layer,) = layers_of(cfg)
    scaling = YaRNScaling(factor=40.0, original_max_seq_len=4096, mscale=1.0, mscale_all_dim=1.0)
    layer.set(
        attention=LatentAttention.Config(
            heads=LatentHeads.Config(weight_init=Normal(stddev=_STDDEV)),
            query_key_transform=RoPE.Config(pairing="interleaved", scaling=scaling),
        )
    )
    attention_scale(layer.attention)
    dense = layer.copy()
    mixed(cfg, count=256, top_k=8, hidden_dim=2048, balance=0.0)
    (moe,) = mixtures_of(cfg)
    shared = dense.feed_forward.copy().set(hidden_dim=2048)
    moe.set(shared_experts=shared, losses=(SequenceBalanceLoss(0.0001),))
    moe.router.set(
        score="sigmoid",
        scale=2.5,
        num_groups=8,
        num_chosen_groups=4,
        group_score="top2_sum",
        choice_bias=True,
    )
    return initialized(dense_first(cfg, dense, 3), stddev=_STDDEV)


def deepseek_v2() -> Trainer.Config:
    """DeepSeek-V2: 235,741,434,880 parameters, 21,375,800,320 of them for each token."""
    cfg = experiments.get("deepseek-V3").set(batch_size=9216)
    model: Any = cfg.model
    model.set(vocab_size=102_400, model_dim=5120)
    dense = model.decoder.prefix[0].copy()
    dense.feed_forward.set(hidden_dim=12_288)
    model.decoder.set(num_layers=60)
    (moe,) = mixtures_of(cfg)
    moe.set(num_experts=160, top_k=6, hidden_dim=1536, losses=(LoadBalanceLoss(0.003),))
    moe.shared_experts.set(hidden_dim=2 * 1536)
    moe.router.set(
        score="softmax",
        normalize=False,
        scale=16.0,
        num_chosen_groups=3,
        group_score="max",
        choice_bias=False,
    )
    dense_first(cfg, dense, 1)
    for layer in (*model.decoder.prefix, *layers_of(cfg)):
        layer.attention.query_key_transform.set(
            scaling=YaRNScaling(
                factor=40.0, original_max_seq_len=4096, mscale=0.707, mscale_all_dim=0.707
            )
        )
        attention_scale(layer.attention)
    schedule: Any = cfg.learner.optimizer
    schedule.learning_rate.set(peak=2.4e-4)
    return trained_on(cfg, tokens=8.1e12, warmup_steps=2000)


def deepseek_v3_test() -> Trainer.Config:
    """DeepSeek-V3's structure with 0.2M parameters, on bytes: one dense layer, two of mixtures."""
    cfg = shrunk_mixture(experiments.get("deepseek-V3"), head_dim=16)
    model: Any = cfg.model
    (layer,) = layers_of(cfg)
    layer.attention.set(rotated_dim=8, value_dim=16, rank=24, query_rank=32)
    attention_scale(layer.attention)
    moe = layer.feed_forward
    moe.set(losses=(SequenceBalanceLoss(0.0001),))
    moe.shared_experts.set(hidden_dim=44)
    moe.router.set(num_groups=4, num_chosen_groups=2)
    dense = layer.copy().set(feed_forward=moe.shared_experts.copy().set(hidden_dim=176))
    model.decoder.set(num_layers=3)
    return initialized(dense_first(cfg, dense, 1), stddev=0.02)


def dense_first(cfg: Trainer.Config, dense: Any, count: int) -> Trainer.Config:
    """Makes the first ``count`` layers of a config dense ones and returns it."""
    assert isinstance(dense.feed_forward, FeedForward.Config)
    cfg.set_path("model.decoder.prefix", (dense,) * count)
    return cfg


def attention_scale(attention: Any) -> None:
    """Sets what the logits of a latent attention are multiplied by, as its rotary scaling asks.

    With ``mscale_all_dim`` the factor of YaRN is on whole logits, not on their rotated part alone.
    """
    scaling = attention.query_key_transform.scaling
    factor, of_all = 1.0, getattr(scaling, "mscale_all_dim", 0.0)
    if of_all and scaling.factor > 1:
        factor = 0.1 * of_all * math.log(scaling.factor) + 1.0
    dims = attention.head_dim + attention.rotated_dim
    attention.set(logit_scale=dims**-0.5 * factor * factor)
