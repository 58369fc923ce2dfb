"""The members of OLMo 2.

Sizes and recipes: 2 OLMo 2 Furious (arXiv:2501.00656, tables 1 and 2) and the ``config.json``
published with the weights; of the first of the two stages of training. The horizon is the published
number of tokens, at which the rate has reached a tenth. The counts are exact and tested.
"""

from __future__ import annotations

from axcore import experiments
from axcore.layers import RMSNorm
from axcore.train import Trainer
from axlearn_models._llama_like import (
    learning_rate,
    llama_like,
    pretraining,
    resized,
    shrunk,
    trained_on,
    with_qk_norm,
)
from axlearn_rope import RoPE


def olmo2_7b() -> Trainer.Config:
    """OLMo 2 7B: 7,298,617,344 parameters, 4T tokens."""
    model = llama_like(
        vocab_size=100_352,
        model_dim=4096,
        num_layers=32,
        num_heads=32,
        hidden_dim=11_008,
        query_key_transform=RoPE.Config(base=500_000.0),
        norm_eps=1e-6,
    )
    cfg = pretraining(
        model.set(z_loss_weight=1e-5), tokens=4e12, batch_size=1024, seq_len=4096, peak=3e-4
    )
    norm = RMSNorm.Config(eps=1e-6)
    layer = cfg.get_path("model.decoder.layer")
    layer.set(
        attention_norm=None,
        attention_out_norm=norm,
        feed_forward_norm=None,
        feed_forward_out_norm=norm,
    )
    return with_qk_norm(cfg, norm, over="heads")


def olmo2_1b() -> Trainer.Config:
    """OLMo 2 1B: 1,484,916,736 parameters, 4T tokens, half the batch."""
    cfg = experiments.get("olmo2-7B").set(batch_size=512)
    learning_rate(cfg).set(peak=4e-4)
    trained_on(cfg, tokens=4e12, warmup_steps=2000)
    return resized(cfg, model_dim=2048, num_layers=16, num_heads=16, hidden_dim=8192)


def olmo2_13b() -> Trainer.Config:
    """OLMo 2 13B: 13,716,198,400 parameters, 5T tokens, twice the batch, three times the rate."""
    cfg = experiments.get("olmo2-7B").set(batch_size=2048)
    learning_rate(cfg).set(peak=9e-4)
    trained_on(cfg, tokens=5e12, warmup_steps=2000)
    return resized(cfg, model_dim=5120, num_layers=40, num_heads=40, hidden_dim=13_824)


def olmo2_32b() -> Trainer.Config:
    """OLMo 2 32B: 32,234,279,936 parameters, 6T tokens, grouped queries."""
    cfg = experiments.get("olmo2-13B")
    learning_rate(cfg).set(peak=6e-4)
    trained_on(cfg, tokens=6e12, warmup_steps=2000)
    return resized(cfg, num_layers=64, num_kv_heads=8, hidden_dim=27_648)


def olmo2_test() -> Trainer.Config:
    """OLMo 2 32B's structure with 0.1M parameters, on bytes."""
    return shrunk(experiments.get("olmo2-32B"), num_kv_heads=2)
