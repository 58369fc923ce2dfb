"""Hugging Face's files of Gemma 2 and Gemma 3: settings both ways, and the tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axcore.checkpoint.convert import Rule, Settings, TensorRule
from axcore.errors import CheckpointError
from axcore.layers import RMSNorm
from axcore.ops.masks import SlidingWindow
from axcore.train import Trainer
from axlearn_models._export import layers_to_say, rules_without
from axlearn_models._gemma import resized_gemma
from axlearn_models._hugging_face import cannot_say, given, max_positions
from axlearn_models._llama_like import initialized, layers_of, normalized
from axlearn_models._windows import alternating, causal, period_of
from axlearn_rope import RoPE, rope_from_hf

__all__ = ["gemma_from", "gemma_rules", "gemma_to", "rope_from"]

_KINDS = {"sliding_attention": True, "full_attention": False}


def gemma_from(
    settings: Settings, cfg: Trainer.Config, *, period: int, caps: Mapping[str, float | None]
) -> Trainer.Config:
    """Gives an experiment of Gemma the dims, windows and caps of a ``config.json``.

    Rotary embeddings are the caller's, who checks that all was read.

    Args:
        settings: The settings.
        cfg: An experiment of the family; its structure and recipe stay.
        period: Every how many layers one is global, where the settings do not say.
        caps: What absent ``attn_logit_softcapping`` and ``final_logit_softcapping`` mean.

    Raises:
        CheckpointError: A setting is missing or not implemented (AX614).
    """
    for name in ("hidden_activation", "hidden_act"):
        settings.expect(name, "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    settings.expect("attention_bias", False, default=False)
    settings.expect("attention_dropout", 0, None, default=0)
    settings.expect("tie_word_embeddings", True, default=True)
    settings.expect("use_bidirectional_attention", None, False, default=False)
    settings.skip("cache_implementation")
    num_layers = settings.require("num_hidden_layers", int)
    resized_gemma(
        cfg,
        vocab_size=settings.require("vocab_size", int),
        model_dim=settings.require("hidden_size", int),
        num_layers=num_layers,
        hidden_dim=settings.require("intermediate_size", int),
        num_heads=settings.require("num_attention_heads", int),
        num_kv_heads=settings.require("num_key_value_heads", int),
        head_dim=settings.require("head_dim", int),
        query_scale=settings.require("query_pre_attn_scalar", (int, float)),
    )
    local = _local_layers(settings, num_layers, period)
    window = settings.require("sliding_window", int) if any(local) else 1
    settings.expect("sliding_window_size", window, default=window)
    alternating(cfg, local=period_of(local), window=window)
    for layer in layers_of(cfg):
        layer.attention.set(logit_cap=_cap(settings, "attn_logit_softcapping", caps))
    model: Any = cfg.model
    model.embedding.set(logit_cap=_cap(settings, "final_logit_softcapping", caps))
    initialized(cfg, stddev=given(settings, "initializer_range", float, 0.02))
    normalized(cfg, eps=settings.require("rms_norm_eps", float))
    limit = settings.require("max_position_embeddings", int)
    model.set(compute_dtype=None, max_seq_len=limit)
    cfg.set(seq_len=min(cfg.seq_len, limit))
    return cfg


def rope_from(settings: Mapping[str, Any], layer_type: str | None = None) -> RoPE.Config:
    """Returns the rotary embedding that settings describe; all of a head is rotated.

    Args:
        settings: The settings.
        layer_type: The kind of layer, where they differ.

    Raises:
        ConfigError: A scheme, or one of its settings, is not implemented (AX386).
        CheckpointError: Only a part of a head is rotated (AX614).
    """
    rope = rope_from_hf(settings, layer_type=layer_type)
    if rope.rotary_fraction != 1 or rope.axes is not None:
        raise CheckpointError(
            f"the setting 'partial_rotary_factor' is {rope.rotary_fraction}; implemented: 1",
            code="AX614",
            hint="the converted model would compute something else, so it is refused",
        )
    return rope


def gemma_to(cfg: Trainer.Config, *, architecture: str, model_type: str) -> dict[str, Any]:
    """Returns the ``config.json`` of an experiment of Gemma, without its rotary settings.

    Raises:
        CheckpointError: The config holds something that the format cannot say (AX622).
    """
    model: Any = cfg.model
    period = layers_to_say(cfg, architecture, periodic=True)
    layer = period[0]
    attention, norm = layer.attention, layer.attention_norm
    if not all(len(layer.find(RoPE.Config)) == 1 for layer in period):
        raise cannot_say("layers without a rotary embedding, or with several", architecture)
    seen = [_window(layer, architecture) for layer in period]
    windows = {window for window in seen if window is not None}
    if len(windows) > 1:
        raise cannot_say(f"windows of {sorted(windows)} tokens", architecture)
    if attention.logit_scale is None or not isinstance(norm, RMSNorm.Config):
        raise cannot_say("no scale of the attention logits, or no norm", architecture)
    scale = attention.logit_scale**-2
    kinds = {here: kind for kind, here in _KINDS.items()}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dim,
        "intermediate_size": layer.feed_forward.hidden_dim,
        "num_hidden_layers": model.decoder.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads or attention.num_heads,
        "head_dim": attention.head_dim or model.model_dim // attention.num_heads,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scale) if abs(scale - round(scale)) < 1e-6 else scale,
        "attn_logit_softcapping": attention.logit_cap,
        "final_logit_softcapping": model.embedding.logit_cap,
        "sliding_window": windows.pop() if windows else 4096,
        "layer_types": [
            kinds[seen[i % len(seen)] is not None] for i in range(model.decoder.num_layers)
        ],
        "max_position_embeddings": max_positions(cfg),
        "rms_norm_eps": norm.eps,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
    }


def gemma_rules() -> list[Rule]:
    """Returns the tensors of Gemma: Llama's, with four norms a layer."""
    layer, ours = "model.layers.{i}", "decoder/layer/{i}"
    norms = {
        "post_attention_layernorm": "attention_out_norm",
        "pre_feedforward_layernorm": "feed_forward_norm",
        "post_feedforward_layernorm": "feed_forward_out_norm",
    }
    return [
        *rules_without(f"{ours}/feed_forward_norm/scale"),
        *(
            TensorRule(f"{layer}.{foreign}.weight", f"{ours}/{name}/scale")
            for foreign, name in norms.items()
        ),
    ]


def _local_layers(settings: Settings, num_layers: int, period: int) -> list[bool]:
    """Tells of each layer whether it is local."""
    for name in ("_sliding_window_pattern", "sliding_window_pattern"):  # newer and older files
        period = given(settings, name, int, period)
    kinds = given(settings, "layer_types", list, None)
    if kinds is None:
        return [(index + 1) % period != 0 for index in range(num_layers)]
    if len(kinds) != num_layers or not all(kind in tuple(_KINDS) for kind in kinds):
        raise CheckpointError(
            f"the setting 'layer_types' is {kinds}, expected {num_layers} of {', '.join(_KINDS)}",
            code="AX614",
        )
    return [_KINDS[kind] for kind in kinds]


def _cap(settings: Settings, name: str, default: Mapping[str, float | None]) -> float | None:
    return given(settings, name, float, None) if name in settings else default[name]


def _window(layer: Any, architecture: str) -> int | None:
    """Returns how many tokens a layer sees; None: all earlier ones."""
    mask = layer.attention.mask
    for part in mask.parts():
        if isinstance(part, SlidingWindow) and part.left is not None:
            window = part.left + 1
            if mask == causal(window):
                return window
    if mask == causal(None):
        return None
    raise cannot_say(f"the mask {mask!r}", architecture)
