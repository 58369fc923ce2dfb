"""What the families that encode have in common: sizes, test members, settings that say it all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from axcore import functional
from axcore.checkpoint.convert import Flatten, ModelFamily, Rule, TensorRule, TorchLinear
from axcore.layers import (
    Attention,
    CrossAttention,
    Embedding,
    LearnedPositions,
    Linear,
    LMHead,
    Normal,
)
from axcore.train import Trainer
from axlearn_models._hugging_face import cannot_say, max_positions

__all__ = ["exported", "initialized", "linear_rules", "outputs_of", "shrunk_encoder", "sized"]

# How a model is computed, initialized and trained, not what it computes from its parameters.
_UNSAID = {
    *("param_dtype", "compute_dtype", "reduce_dtype", "weight_init", "bias_init", "scale_init"),
    *("token_type_init", "class_token_init", "sinks_init", "dropout", "dot", "logits_dot"),
    *("values_dot", "kernel", "kv_cache", "remat", "unroll", "stack", "z_loss_weight"),
}
_NAMES = ("encoder", "decoder")


def sized(
    cfg: Trainer.Config,
    *,
    model_dim: int,
    num_layers: int,
    num_heads: int,
    hidden_dim: int,
    head_dim: int | None = None,
) -> Trainer.Config:
    """Changes the dims of an encoder, and of a decoder beside it, and returns the config.

    Args:
        cfg: A config whose model has an ``encoder``.
        model_dim: Width of the residual stream.
        num_layers: Layers of each stack.
        num_heads: Heads of every attention.
        hidden_dim: Width inside the feed-forward networks.
        head_dim: Width of a head; None is ``model_dim / num_heads``.
    """
    model: Any = cfg.model
    model.set(model_dim=model_dim)
    for kind in (Attention.Config, CrossAttention.Config):
        for attention in model.find(kind).values():
            attention.set(num_heads=num_heads, head_dim=head_dim)
    for stack in (getattr(model, name) for name in _NAMES if name in model.fields()):
        stack.set(num_layers=num_layers)
        stack.layer.feed_forward.set(hidden_dim=hidden_dim)
        if stack.shared is not None:
            stack.shared.set(num_heads=num_heads)
    return cfg


def shrunk_encoder(cfg: Trainer.Config, *, head_dim: int | None = None) -> Trainer.Config:
    """Makes a family's test member of a full one and returns it: seconds on a laptop.

    Args:
        cfg: A config whose model has an ``encoder``.
        head_dim: Width of a head, where the family does not derive it.
    """
    sized(cfg, model_dim=64, num_layers=2, num_heads=4, hidden_dim=176, head_dim=head_dim)
    cfg.model.set(compute_dtype=None)
    cfg.set(batch_size=8, seq_len=64, max_step=200, log_every_n_steps=1)
    cfg.set_path("evalers.heldout.max_documents", 20)
    return cfg


def initialized(cfg: Trainer.Config, *, stddev: float) -> Trainer.Config:
    """Sets the standard deviation of every initial matrix and returns the config."""
    for kind in (Embedding.Config, LearnedPositions.Config, Linear.Config, LMHead.Config):
        for weights in cfg.model.find(kind).values():
            weights.set(weight_init=Normal(stddev=stddev))
    return cfg


def linear_rules(foreign: str, path: str, *, num_in: int = 1) -> Sequence[Rule]:
    """Returns the rules of a linear layer's weight and bias."""
    return (
        TensorRule(f"{foreign}.weight", f"{path}/weight", TorchLinear(num_in=num_in)),
        TensorRule(f"{foreign}.bias", f"{path}/bias", Flatten()),
    )


def exported(family: ModelFamily, cfg: Trainer.Config, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns foreign settings after reading them back: they must say all of the model.

    Args:
        family: The family, whose ``config`` reads them.
        cfg: The experiment.
        settings: What is to be written.

    Raises:
        CheckpointError: Read back they give another model (AX622); it names the difference.
    """
    said, meant = _computed(family.config(settings, {})), _computed(cfg)
    for path in sorted({*said, *meant}):
        if said.get(path) != meant.get(path):
            raise cannot_say(f"{path} = {meant.get(path, 'nothing')}", family.architecture)
    return settings


def outputs_of(model: Any, state: Any, method: str, **inputs: Any) -> np.ndarray:
    """Returns what a method of a model gives in evaluation, as float32."""
    import jax

    def run(state: Any, inputs: Any) -> Any:
        return functional(model, state=state, inputs=inputs, method=method, is_training=False)[0]

    return np.asarray(jax.jit(run)(state, inputs), np.float32)


def _computed(cfg: Trainer.Config) -> dict[str, str]:
    model: Any = cfg.model.copy()
    if "max_seq_len" in model.fields():
        # Only learned positions give a length a meaning.
        has_table = bool(model.find(LearnedPositions.Config))
        model.set(max_seq_len=max_positions(cfg) if has_table else 1)
    for kind in (Attention.Config, CrossAttention.Config):
        for attention in model.find(kind).values():
            width = attention.head_dim or model.model_dim // attention.num_heads
            heads = attention.num_kv_heads or attention.num_heads
            attention.set(head_dim=width, num_kv_heads=heads)
    lines = {p: v for p, v in model.lines().items() if not _UNSAID.intersection(p.split("."))}
    for name in _NAMES:
        if name in model.fields():
            values = getattr(model, name).stack.layer_values
            lines[f"{name}.stack.layer_values"] = repr(values)
    return lines
