"""What the Llama-like families share: the block, the training recipe, and how a size is changed.

A family's ``config.py`` calls :func:`llama_like` and :func:`pretraining` once, for its first
member; every other member gets its parent by name and states its differences with :func:`resized`,
:func:`trained_on` and plain edits.
"""

from __future__ import annotations

from typing import Any, Literal

from axcore.config import config_for, scaled
from axcore.errors import ConfigError
from axcore.layers import (
    QKV,
    Attention,
    BaseQueryKeyTransform,
    CausalLM,
    Decoder,
    Embedding,
    FeedForward,
    Linear,
    LMHead,
    Normal,
    QKNorm,
    QueryKeyChain,
    RMSNorm,
    TransformerLayer,
)
from axcore.train import Learner, Trainer, optimizers, schedules
from axlearn_rope import RoPE

__all__ = [
    "attention_of",
    "initialized",
    "layers_of",
    "learning_rate",
    "llama_like",
    "normalized",
    "pretraining",
    "resized",
    "rope_of",
    "shrunk",
    "trained_on",
    "with_qk_norm",
]


def llama_like(
    *,
    vocab_size: int,
    model_dim: int,
    num_layers: int,
    num_heads: int,
    hidden_dim: int,
    num_kv_heads: int | None = None,
    query_key_transform: BaseQueryKeyTransform.Config | None = None,
    norm_eps: float = 1e-5,
    tied: bool = False,
    init_stddev: float = 0.02,
) -> CausalLM.Config:
    """Returns a decoder of pre-norm blocks with RMSNorm, rotary embeddings and SwiGLU, no biases.

    Args:
        vocab_size: Rows of the embedding.
        model_dim: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Query heads, of ``model_dim / num_heads`` each.
        hidden_dim: Width inside the feed-forward network.
        num_kv_heads: Key and value heads; None is one for each query head.
        query_key_transform: Rotary embeddings of the family; None: of base 10,000.
        norm_eps: Added to the mean square in every norm.
        tied: Whether the output head is the embedding.
        init_stddev: Standard deviation of every initial matrix; the ``initializer_range`` that the
            family publishes beside its weights.

    References:
        Touvron et al., LLaMA, arXiv:2302.13971, section 2.2.
    """
    init = Normal(stddev=init_stddev)
    linear = Linear.Config(bias=False, weight_init=init)
    norm = RMSNorm.Config(eps=norm_eps)
    attention = Attention.Config(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        qkv=QKV.Config(query=linear, key=linear, value=linear),
        output=linear,
        query_key_transform=query_key_transform or RoPE.Config(base=10_000.0),
    )
    feed_forward = FeedForward.Config(
        hidden_dim=hidden_dim, activation="silu", up=linear, gate=linear, down=linear
    )
    layer = TransformerLayer.Config(
        attention_norm=norm,
        attention=attention,
        feed_forward_norm=norm,
        feed_forward=feed_forward,
    )
    return CausalLM.Config(
        vocab_size=vocab_size,
        model_dim=model_dim,
        embedding=Embedding.Config(weight_init=init),
        position=None,
        decoder=Decoder.Config(num_layers=num_layers, layer=layer, final_norm=norm),
        lm_head=None if tied else LMHead.Config(weight_init=init),
    )


def pretraining(
    model: CausalLM.Config,
    *,
    tokens: float,
    batch_size: int,
    seq_len: int,
    peak: float,
    warmup_steps: int = 2000,
    end_ratio: float = 0.1,
    weight_decay: float = 0.1,
    eps: float = 1e-8,
) -> Trainer.Config:
    """Returns the recipe most of the families publish: AdamW, warm-up, cosine, clipping at 1.

    Products run in bfloat16, parameters and reductions stay float32. The data of these models are
    not published with them: ``input`` is the trainer's default until it is set.

    Args:
        model: The model.
        tokens: Tokens of the whole run.
        batch_size: Rows of a batch.
        seq_len: Tokens of a row.
        peak: Largest learning rate.
        warmup_steps: Updates over which the rate rises.
        end_ratio: Last rate as a fraction of the largest.
        weight_decay: Decoupled decay of the matrices.
        eps: Added to the root of the second moment.
    """
    learning_rate = config_for(
        schedules.linear_warmup_cosine,
        peak=peak,
        warmup_steps=0,  # as trained_on says
        total_steps=scaled(1, of="max_step"),
        end_ratio=end_ratio,
    )
    adamw = config_for(
        optimizers.adamw,
        learning_rate=learning_rate,
        b1=0.9,
        b2=0.95,
        eps=eps,
        weight_decay=weight_decay,
    )
    cfg = Trainer.Config(
        model=model.set(compute_dtype="bfloat16"),
        learner=Learner.Config(optimizer=adamw, clip_global_norm=1.0),
        max_step=1,
        batch_size=batch_size,
        seq_len=seq_len,
    )
    return trained_on(cfg, tokens=tokens, warmup_steps=warmup_steps)


def trained_on(
    cfg: Trainer.Config, *, tokens: float, warmup_steps: int | None = None
) -> Trainer.Config:
    """Sets the horizon of a run and returns it; the warm-up is a share of the horizon.

    So a run cut short (``--max-step 100``) warms up over the same share of it.

    Args:
        cfg: Its ``batch_size`` and ``seq_len`` are the final ones.
        tokens: Tokens of the whole run; a step more is never taken.
        warmup_steps: Updates of warm-up in a whole run; None leaves the share as it is.
    """
    cfg.set(max_step=int(tokens / (cfg.batch_size * cfg.seq_len)))
    if warmup_steps is not None:
        share = scaled(warmup_steps / cfg.max_step, of="max_step", minimum=0)
        learning_rate(cfg).set(warmup_steps=share)
    return cfg


def learning_rate(cfg: Trainer.Config) -> Any:
    """Returns the node of the learning-rate schedule."""
    optimizer: Any = cfg.learner.optimizer
    return optimizer.learning_rate


def with_qk_norm(
    cfg: Trainer.Config, norm: RMSNorm.Config, *, over: Literal["head_dim", "heads"]
) -> Trainer.Config:
    """Normalizes queries and keys before what is done to them so far, and returns the config."""
    attention = attention_of(cfg)
    chain = (QKNorm.Config(norm=norm, over=over), attention.query_key_transform)
    attention.set(query_key_transform=QueryKeyChain.Config(transforms=chain))
    return cfg


def attention_of(cfg: Trainer.Config) -> Any:
    """Returns the node of the attention layers, an ``Attention.Config``."""
    model: Any = cfg.model
    return model.decoder.layer.attention


def layers_of(cfg: Trainer.Config) -> tuple[Any, ...]:
    """Returns the nodes of the layers: one, or those of a period."""
    layer = cfg.get_path("model.decoder.layer")
    return layer if isinstance(layer, tuple) else (layer,)


def rope_of(cfg: Trainer.Config) -> RoPE.Config:
    """Returns the node of the rotary embedding, which all layers share.

    Raises:
        ConfigError: There is none, or several.
    """
    found = cfg.model.find(RoPE.Config)
    if len(found) != 1:
        raise ConfigError(
            f"the model has {len(found)} rotary embeddings, expected one for all layers",
            code="AX391",
            where=", ".join(found) or "model",
        )
    return next(iter(found.values()))


def normalized(cfg: Trainer.Config, *, eps: float) -> Trainer.Config:
    """Sets what every RMSNorm adds to its mean square and returns the config."""
    for norm in cfg.model.find(RMSNorm.Config).values():
        norm.set(eps=eps)
    return cfg


def initialized(cfg: Trainer.Config, *, stddev: float) -> Trainer.Config:
    """Sets the standard deviation of every initial matrix and returns the config."""
    for kind in (Embedding.Config, Linear.Config, LMHead.Config):
        for weights in cfg.model.find(kind).values():
            weights.set(weight_init=Normal(stddev=stddev))
    return cfg


def resized(
    cfg: Trainer.Config,
    *,
    model_dim: int | None = None,
    num_layers: int | None = None,
    hidden_dim: int | None = None,
    vocab_size: int | None = None,
    **heads: int | None,
) -> Trainer.Config:
    """Changes the dims that are given, in every layer of a period, and returns the config.

    Args:
        cfg: A config of a Llama-like family.
        model_dim: Width of the residual stream.
        num_layers: Blocks.
        hidden_dim: Width inside the feed-forward network.
        vocab_size: Rows of the embedding.
        **heads: ``num_heads``, ``num_kv_heads``, ``head_dim`` of the attention.
    """
    model: Any = cfg.model
    widths = {"model_dim": model_dim, "vocab_size": vocab_size}
    model.set(**{name: width for name, width in widths.items() if width is not None})
    if num_layers is not None:
        model.decoder.set(num_layers=num_layers)
    for layer in layers_of(cfg):
        layer.attention.set(**heads)
        if hidden_dim is not None:
            layer.feed_forward.set(hidden_dim=hidden_dim)
    return cfg


def shrunk(cfg: Trainer.Config, *, num_kv_heads: int | None = None) -> Trainer.Config:
    """Makes a family's test member of a full one and returns it: seconds on a laptop.

    The structure stays; dims, horizon and rate are a byte-level model's of 0.1M parameters.

    Args:
        cfg: A config of a Llama-like family.
        num_kv_heads: Key and value heads for the 4 query heads.
    """
    kv_heads = {"num_kv_heads": num_kv_heads}
    resized(
        cfg,
        model_dim=64,
        num_layers=2,
        hidden_dim=176,
        vocab_size=264,  # ByteTokenizer's
        num_heads=4,
        **(kv_heads if "num_kv_heads" in layers_of(cfg)[0].attention.fields() else {}),
    )
    cfg.model.set(compute_dtype=None)
    cfg.set(batch_size=8, seq_len=64, log_every_n_steps=1, sample_prompt="The ")
    cfg.set_path("evalers.heldout.max_documents", 20)
    learning_rate(cfg).set(peak=5e-3)
    return trained_on(cfg, tokens=200 * 8 * 64, warmup_steps=10)
