"""The members of MiniLM.

Sizes: MiniLM (Wang et al., arXiv:2002.10957, table 7) and the ``config.json`` of
sentence-transformers/all-MiniLM-L6-v2, whose tensors include BERT's pooler and no head. The counts
are exact and tested. They are published as distilled and then trained on pairs of sentences; here
their structure is trained as BERT is, with the embedding as the head. A sentence's embedding is
``pooled`` with ``--set 'model.pooler=config("axcore.layers.MeanPooler")' --set
model.pooler.normalize=True``.
"""

from __future__ import annotations

from axcore import experiments
from axcore.layers import FirstTokenPooler, Linear, Normal
from axcore.train import Trainer
from axlearn_models._encoders import sized

__all__ = ["minilm_l6_v2", "minilm_test"]


def minilm_l6_v2() -> Trainer.Config:
    """all-MiniLM-L6-v2: 22,713,216 parameters."""
    cfg = sized(
        experiments.get("bert-base"), model_dim=384, num_layers=6, num_heads=12, hidden_dim=1536
    )
    return without_head(cfg)


def minilm_test() -> Trainer.Config:
    """MiniLM's structure with 0.1M parameters, on bytes; the id 263 is the mask."""
    return without_head(experiments.get("bert-test"))


def without_head(cfg: Trainer.Config) -> Trainer.Config:
    """Replaces a BERT's head for hidden tokens by BERT's pooler and returns the config."""
    dense = Linear.Config(weight_init=Normal(stddev=0.02))
    cfg.model.set(head_transform=None, pooler=FirstTokenPooler.Config(dense=dense))
    cfg.set_path("model.embedding.head_bias", False)
    return cfg
