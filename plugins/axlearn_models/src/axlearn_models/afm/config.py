"""The AFM pair: a model for devices and one for servers.

Apple Intelligence Foundation Language Models (arXiv:2407.21075) publishes:

- of both (section 2): a shared matrix of input and output embeddings, pre-norm with RMSNorm, norms
  on queries and keys, grouped queries with 8 key and value heads, SwiGLU, rotary base 500,000;
- of the model for devices (table 1): 26 layers of width 3,072, 24 heads of 128, 2.58B parameters
  beside 0.15B of a vocabulary of 49k;
- of the model for servers: a vocabulary of 100k, and no size;
- of the training (section 3): 6.3T tokens in rows of 4,096, batches of 4,096 rows, then two shorter
  stages of longer rows; an optimizer of its own (RMSProp with momentum) under muP.

Chosen here: the width inside the feed-forward network of the smaller model (8,032, the multiple of
32 that gives 2.58B), both vocabularies' exact sizes (49,152 and 100,352), the larger model's dims
(Llama 3 70B's), norms per head, and AdamW with Llama 3's rates. The smaller model is published as
pruned and distilled; here it trains like any other. The models of 2025 (arXiv:2507.13575), whose
layers share caches and tracks, are others and not here.
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
    with_qk_norm,
)
from axlearn_rope import RoPE


def afm_on_device() -> Trainer.Config:
    """AFM-on-device: 2,730,071,552 parameters, 6.3T tokens."""
    model = llama_like(
        vocab_size=49_152,
        model_dim=3072,
        num_layers=26,
        num_heads=24,
        num_kv_heads=8,
        hidden_dim=8032,
        query_key_transform=RoPE.Config(base=500_000.0),
        tied=True,
    )
    cfg = pretraining(model, tokens=6.3e12, batch_size=4096, seq_len=4096, peak=3e-4)
    return with_qk_norm(cfg, RMSNorm.Config(eps=1e-5), over="head_dim")


def afm_server() -> Trainer.Config:
    """AFM-server: 69,274,464,256 parameters, 6.3T tokens; its size is chosen here."""
    cfg = experiments.get("afm-on-device")
    learning_rate(cfg).set(peak=1.5e-4)
    return resized(
        cfg,
        vocab_size=100_352,
        model_dim=8192,
        num_layers=80,
        num_heads=64,
        hidden_dim=28_672,
    )


def afm_test() -> Trainer.Config:
    """AFM's structure (norms on queries and keys, tied head), 0.1M parameters, on bytes."""
    return shrunk(experiments.get("afm-on-device"), num_kv_heads=2)
