"""Published sizes as configs of core's layers, in plain numbers, and a mixture of experts."""

from __future__ import annotations

from typing import Any

from axcore import experiments
from axcore.config import REQUIRED, Required
from axcore.layers import (
    Attention,
    CausalLM,
    Decoder,
    FeedForward,
    Linear,
    LMHead,
    RMSNorm,
    TransformerLayer,
)
from axcore.layers.initializers import VarianceScaling
from axcore.layers.qkv import QKV
from axcore.layers.roles import BaseFeedForward
from axcore.ops.masks import Causal, Mask
from axcore.train import Trainer


class Experts(BaseFeedForward):
    """Gated experts behind a router, described but never run."""

    class Config(BaseFeedForward.Config):
        """Sizes."""

        num_experts: Required[int] = REQUIRED
        top_k: Required[int] = REQUIRED
        hidden_dim: Required[int] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Any = None):
        super().__init__(cfg, parent=parent)
        n, d, m = cfg.num_experts, cfg.input_dim, cfg.hidden_dim
        fans: dict[str, Any] = {"fan_in_dims": (1,), "fan_out_dims": (2,)}
        for name in ("up", "gate"):
            self._add_weight(
                name, (n, d, m), ("experts", "embed", "mlp"), VarianceScaling(), **fans
            )
        self._add_weight("down", (n, m, d), ("experts", "mlp", "embed"), VarianceScaling(), **fans)
        self._add_weight(
            "router",
            (d, n),
            ("embed", "experts"),
            VarianceScaling(),
            fan_in_dims=(0,),
            fan_out_dims=(1,),
        )

    @property
    def experts_per_token(self) -> int:
        """Experts that one token goes to."""
        return self.cfg.top_k

    def forward(self, x: Any, info: Any) -> Any:
        """Never called."""
        raise AssertionError


def language_model(
    *,
    layers: int,
    dim: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    hidden: int = 0,
    head_dim: int | None = None,
    mask: Mask | None = None,
    feed_forward: BaseFeedForward.Config | None = None,
    tied: bool = False,
) -> CausalLM.Config:
    """A model with RMSNorm, a gated feed-forward layer and no biases."""
    bare = Linear.Config(bias=False)
    return CausalLM.Config(
        vocab_size=vocab,
        model_dim=dim,
        position=None,
        lm_head=None if tied else LMHead.Config(),
        decoder=Decoder.Config(
            num_layers=layers,
            final_norm=RMSNorm.Config(),
            layer=TransformerLayer.Config(
                attention_norm=RMSNorm.Config(),
                feed_forward_norm=RMSNorm.Config(),
                attention=Attention.Config(
                    num_heads=heads,
                    num_kv_heads=kv_heads,
                    head_dim=head_dim,
                    mask=mask or Causal(),
                    qkv=QKV.Config(query=bare, key=bare, value=bare),
                    output=bare,
                ),
                feed_forward=feed_forward
                or FeedForward.Config(
                    hidden_dim=hidden, activation="silu", up=bare, gate=bare, down=bare
                ),
            ),
        ),
    )


def trainer(model: CausalLM.Config, *, batch_size: int, seq_len: int) -> Trainer.Config:
    """A trainer of a model, with AdamW."""
    cfg = experiments.get("tiny-lm")
    cfg.model = model
    return cfg.set(batch_size=batch_size, seq_len=seq_len)


def llama2_7b() -> CausalLM.Config:
    """6.74 billion parameters (arXiv:2307.09288)."""
    return language_model(layers=32, dim=4096, heads=32, kv_heads=32, hidden=11008, vocab=32000)


def llama2_70b() -> CausalLM.Config:
    """68.98 billion parameters, 8 key/value heads (arXiv:2307.09288)."""
    return language_model(layers=80, dim=8192, heads=64, kv_heads=8, hidden=28672, vocab=32000)


def qwen3_30b_a3b() -> CausalLM.Config:
    """30.5 billion parameters, of which 3.3 billion per token (arXiv:2505.09388)."""
    return language_model(
        layers=48,
        dim=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        vocab=151936,
        feed_forward=Experts.Config(num_experts=128, top_k=8, hidden_dim=768),
    )


MODELS = {"7B": llama2_7b, "70B": llama2_70b, "30B-A3B": qwen3_30b_a3b}
"""Size -> config, as the tables of published figures name them."""
