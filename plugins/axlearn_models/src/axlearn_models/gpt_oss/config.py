"""The members of GPT-OSS.

Sizes and structure: gpt-oss model card (arXiv:2508.10925, section 2 and table 1) and the
``config.json`` published with the weights. Nothing is published of the training: tokens, rates and
batches are those of Qwen3 here, and the balance loss has 0.001, not the 0.9 of that file. The
counts are exact and tested; the model card does not count the embedding among active parameters.
"""

from __future__ import annotations

from axcore import experiments
from axcore.train import Trainer
from axlearn_models._llama_like import layers_of, llama_like, pretraining, resized
from axlearn_models._mixture import balanced, mixed, mixtures_of, shrunk_mixture
from axlearn_models._windows import alternating
from axlearn_moe import ClampedGLU, Experts
from axlearn_rope import RoPE, YaRNScaling

# Of the layers of a period, which see a window.
PERIOD = (True, False)
BALANCE = 0.001


def gpt_oss_20b() -> Trainer.Config:
    """GPT-OSS 20B: 20,914,757,184 parameters, 4,187,440,704 of them for each token."""
    scaling = YaRNScaling(factor=32.0, original_max_seq_len=4096, truncate=False)
    model = llama_like(
        vocab_size=201_088,
        model_dim=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        hidden_dim=2880,
        query_key_transform=RoPE.Config(base=150_000.0, scaling=scaling),
    )
    cfg = pretraining(model, tokens=36e12, batch_size=1024, seq_len=4096, peak=3e-4)
    (layer,) = layers_of(cfg)
    attention, dense = layer.attention, layer.feed_forward
    attention.set(head_dim=64, sinks=True)
    qkv = attention.qkv
    for linear in (
        qkv.query,
        qkv.key,
        qkv.value,
        attention.output,
        dense.up,
        dense.gate,
        dense.down,
    ):
        linear.set(bias=True)
    mixed(cfg, count=32, top_k=4, hidden_dim=2880, balance=BALANCE)
    (moe,) = mixtures_of(cfg)
    moe.set(experts=Experts.Config(glu=ClampedGLU()))
    moe.router.set(bias=True)
    return alternating(cfg, local=PERIOD, window=128)


def gpt_oss_120b() -> Trainer.Config:
    """GPT-OSS 120B: 116,829,156,672 parameters, 5,711,982,912 of them for each token."""
    cfg = resized(experiments.get("gpt-oss-20B"), num_layers=36)
    for moe in mixtures_of(cfg):
        moe.set(num_experts=128)
    return balanced(cfg, BALANCE)


def gpt_oss_test() -> Trainer.Config:
    """GPT-OSS's structure with 0.2M parameters, on bytes."""
    cfg = shrunk_mixture(experiments.get("gpt-oss-20B"), num_kv_heads=2, head_dim=32)
    return alternating(cfg, local=PERIOD, window=16)
