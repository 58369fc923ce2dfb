"""Exports that say all of a model: its settings, read back, must give the same model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axcore.checkpoint.convert import ModelFamily, Rule, TensorRule
from axcore.config import Config
from axcore.layers import (
    QKV,
    Attention,
    CausalLM,
    Decoder,
    Embedding,
    FeedForward,
    TransformerLayer,
)
from axcore.train import Trainer
from axlearn_models._hugging_face import cannot_say, llama_like_rules
from axlearn_models._llama_like import layers_of

__all__ = ["layers_to_say", "rules_without", "verified"]

# How a model is computed, initialized and trained, not what it computes from its parameters.
_UNSAID = {
    *("param_dtype", "compute_dtype", "reduce_dtype", "weight_init", "bias_init", "scale_init"),
    *("sinks_init", "dropout", "dot", "logits_dot", "values_dot", "kernel", "kv_cache"),
    *("max_seq_len", "z_loss_weight", "remat", "unroll", "stack"),
    *("dispatch", "losses", "choice_bias_rate"),
}


# The configs that the settings of a decoder describe; of another kind they have other fields.
_KINDS = {
    "model": CausalLM.Config,
    "model.embedding": Embedding.Config,
    "model.decoder": Decoder.Config,
}
_LAYER_KINDS = {
    "attention": Attention.Config,
    "attention.qkv": QKV.Config,
}


def layers_to_say(
    cfg: Trainer.Config,
    architecture: str,
    *,
    periodic: bool = False,
    feed_forward: type[Config] = FeedForward.Config,
) -> tuple[Any, ...]:
    """Returns the layers of an experiment that is to be said in foreign settings.

    Args:
        cfg: The experiment.
        architecture: The foreign name, for messages.
        periodic: Whether the layers may differ.
        feed_forward: What their feed-forward layers are.

    Raises:
        CheckpointError: It is no decoder of plain layers (AX622).
    """
    for path, kind in _KINDS.items():
        _check_kind(cfg.get_path(path), kind, path, architecture)
    layers = layers_of(cfg)
    if not periodic and isinstance(cfg.get_path("model.decoder.layer"), tuple):
        raise cannot_say(f"a period of {len(layers)} layers", architecture)
    for layer in layers:
        _check_kind(layer, TransformerLayer.Config, "model.decoder.layer", architecture)
        for path, kind in (*_LAYER_KINDS.items(), ("feed_forward", feed_forward)):
            where = f"model.decoder.layer.{path}"
            _check_kind(layer.get_path(path), kind, where, architecture)
    return layers


def _check_kind(node: Any, kind: type, path: str, architecture: str) -> None:
    if type(node) is not kind:
        raise cannot_say(f"a {type(node).__qualname__} at {path}", architecture)


def verified(
    family: ModelFamily,
    cfg: Trainer.Config,
    settings: dict[str, Any],
    *,
    state_defaults: Callable[[Any], None] = lambda layer: None,
) -> dict[str, Any]:
    """Returns foreign settings that say all of an experiment's model.

    Args:
        family: The family, whose ``config`` reads them.
        cfg: The experiment.
        settings: What is to be written.
        state_defaults: Makes explicit, in a layer's config, what its own kind of feed-forward layer
            leaves to its other fields.

    Raises:
        CheckpointError: Read back they give another model (AX622); it names the difference.
    """
    said = _computed(family.config(settings, {}), state_defaults)
    for path, value in _computed(cfg, state_defaults).items():
        if said.get(path) != value:
            raise cannot_say(f"{path} = {value}", family.architecture)
    return settings


def rules_without(*paths: str) -> list[Rule]:
    """Returns the rules of Llama-like models but those of the given parameters."""
    return [
        rule
        for rule in llama_like_rules()
        if not isinstance(rule, TensorRule) or rule.path not in paths
    ]


def _computed(cfg: Trainer.Config, state_defaults: Callable[[Any], None]) -> dict[str, str]:
    """Lines of a model's config, each layer of the period on its own and defaults made explicit."""
    model: Any = cfg.model
    lines = {
        path: value
        for path, value in model.lines().items()
        if not path.startswith("decoder.layer") and _is_said(path)
    }
    lines["decoder.stack.layer_values"] = repr(model.decoder.stack.layer_values)
    period = layers_of(cfg)
    for index in range(model.decoder.num_layers):
        layer = period[index % len(period)].copy()
        attention = layer.attention
        if isinstance(attention, Attention.Config):
            attention.set(
                head_dim=attention.head_dim or model.model_dim // attention.num_heads,
                num_kv_heads=attention.num_kv_heads or attention.num_heads,
            )
        state_defaults(layer)
        lines |= {
            f"decoder.layer.{index}.{path}": value
            for path, value in layer.lines().items()
            if _is_said(path)
        }
    return lines


def _is_said(path: str) -> bool:
    return not _UNSAID.intersection(path.split("."))
