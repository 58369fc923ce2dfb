"""What the ``config.json`` and the tensors of Hugging Face's Llama-like models have in common.

Reading refuses what is not implemented: a value that a family does not compute, and any setting
that nobody read and that says something (``None``, ``False`` and empty ones say nothing).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from axcore.checkpoint.convert import (
    Flatten,
    Ignored,
    Rule,
    Settings,
    TensorRule,
    Tied,
    TorchLinear,
)
from axcore.config import Config
from axcore.errors import CheckpointError, ConfigError
from axcore.layers import (
    QKV,
    Attention,
    CausalLM,
    FeedForward,
    LMHead,
    RMSNorm,
    TransformerLayer,
)
from axcore.train import Trainer
from axlearn_models._llama_like import attention_of, initialized, normalized, resized, rope_of
from axlearn_rope import DynamicNTKScaling, rope_from_hf, rope_to_hf

__all__ = [
    "ATTENTION_NAMES",
    "FEED_FORWARD_NAMES",
    "QKV_NAMES",
    "bias_of",
    "cannot_say",
    "check_all_read",
    "given",
    "leave_attention_dropout",
    "llama_like_from",
    "llama_like_rules",
    "llama_like_to",
    "max_positions",
    "set_bias",
    "settings_of",
]

# They describe the files, the tokens or the training, and change nothing of what is computed.
_HARMLESS = (
    "_attn_implementation_autoset",
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "label2id",
    "max_window_layers",  # of a sliding window that is off
    "pad_token_id",
    "pretraining_tp",
    "return_dict",
    "sliding_window",  # its size, while use_sliding_window is off
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
)
_log = logging.getLogger("axcore.convert")
_LAYER, _OURS = "model.layers.{i}", "decoder/layer/{i}"
_KINDS = {
    "model": CausalLM.Config,
    "model.decoder.layer": TransformerLayer.Config,
    "model.decoder.layer.attention": Attention.Config,
    "model.decoder.layer.attention.qkv": QKV.Config,
    "model.decoder.final_norm": RMSNorm.Config,
}
QKV_NAMES = ("attention.qkv.query", "attention.qkv.key", "attention.qkv.value")
ATTENTION_NAMES = (*QKV_NAMES, "attention.output")
FEED_FORWARD_NAMES = ("feed_forward.up", "feed_forward.gate", "feed_forward.down")


def settings_of(foreign: Mapping[str, Any]) -> Settings:
    """Returns foreign settings as those that remember what was read."""
    return foreign if isinstance(foreign, Settings) else Settings(foreign, "config.json")


def given(settings: Settings, key: str, kind: type, default: Any) -> Any:
    """Returns a setting of the right type, or ``default`` where it is absent or null.

    Raises:
        CheckpointError: It has another type (AX614).
    """
    return default if settings.get(key) is None else settings.require(key, kind)


def leave_attention_dropout(settings: Settings, key: str) -> None:
    """Reads a rate at which attention weights are dropped in training, and says that none is here.

    What the model computes is the same; a run that goes on training it is regularized less.
    """
    rate = given(settings, key, float, 0.0)
    if rate:
        _log.warning(
            "%s = %s is left out: attention weights are not dropped in training here", key, rate
        )


def llama_like_from(settings: Settings, cfg: Trainer.Config) -> Trainer.Config:
    """Gives a Llama-like experiment the dims of a ``config.json`` and returns it.

    Biases are the caller's, who calls :func:`check_all_read` at the end.

    Args:
        settings: The settings.
        cfg: An experiment of the family; its structure and recipe stay.

    Raises:
        CheckpointError: A setting is missing or not implemented (AX614).
    """
    settings.expect("hidden_act", "silu", "swish")
    settings.expect("attention_dropout", 0, default=0)
    settings.expect("rope_interleaved", False, default=False)
    settings.expect("is_llama_config", True, default=True)
    settings.expect("chunk_size_feed_forward", 0, default=0)
    settings.expect("use_sliding_window", False, default=False)
    for kind in given(settings, "layer_types", list, []):
        if kind != "full_attention":
            raise CheckpointError(
                f"the setting 'layer_types' names {kind!r}; implemented: 'full_attention'",
                code="AX614",
                hint="the converted model would compute something else, so it is refused",
            )
    num_heads = settings.require("num_attention_heads", int)
    resized(
        cfg,
        vocab_size=settings.require("vocab_size", int),
        model_dim=settings.require("hidden_size", int),
        num_layers=settings.require("num_hidden_layers", int),
        hidden_dim=settings.require("intermediate_size", int),
        num_heads=num_heads,
        num_kv_heads=given(settings, "num_key_value_heads", int, num_heads),
        head_dim=given(settings, "head_dim", int, None),
    )
    model: Any = cfg.model
    tied = settings.expect("tie_word_embeddings", True, False, default=False)
    model.set(compute_dtype=None, lm_head=None if tied else LMHead.Config())
    initialized(cfg, stddev=given(settings, "initializer_range", float, 0.02))
    normalized(cfg, eps=settings.require("rms_norm_eps", float))
    limit = settings.require("max_position_embeddings", int)
    model.set(max_seq_len=limit)
    cfg.set(seq_len=min(cfg.seq_len, limit))
    _set_rope(cfg, settings)
    return cfg


def check_all_read(settings: Settings) -> None:
    """Refuses settings that say something and that nobody has read.

    Raises:
        CheckpointError: It names them (AX614).
    """
    settings.skip(*_HARMLESS)
    unknown = []
    for name in settings.unread():
        value: Any = settings
        for part in name.split(".") if name not in settings else (name,):
            value = value[part]
        if value is not None and value is not False and value not in ("", (), []):
            unknown.append(f"{name} = {value!r}")
    if unknown:
        raise CheckpointError(
            f"settings that are not known here: {', '.join(unknown)}",
            code="AX614",
            hint="the converted model may compute something else, so they are refused; what "
            "changes nothing can be deleted from the copy of the settings that is converted",
        )


def llama_like_to(
    cfg: Trainer.Config,
    *,
    architecture: str,
    model_type: str,
    feed_forward: type[Config] = FeedForward.Config,
) -> dict[str, Any]:
    """Returns the ``config.json`` of a Llama-like experiment: the inverse of `llama_like_from`.

    It does not look at what the format has no setting for: pass the result to
    :func:`axlearn_models._export.verified`.

    Args:
        cfg: The experiment.
        architecture: Name of the class.
        model_type: Short name of the family.
        feed_forward: What its feed-forward layers are.

    Raises:
        CheckpointError: The model is not made of the layers that the settings describe (AX622).
    """
    model: Any = cfg.model
    kinds = _KINDS | {"model.decoder.layer.feed_forward": feed_forward}
    for path, kind in kinds.items():
        node = cfg.get_path(path)
        if type(node) is not kind:
            raise cannot_say(f"a {type(node).__qualname__} at {path}", architecture)
    attention, hidden_dim = attention_of(cfg), model.decoder.layer.feed_forward.hidden_dim
    if not isinstance(hidden_dim, int):
        raise cannot_say("a hidden_dim that depends on another value", architecture)
    kv_heads = attention.num_kv_heads
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dim,
        "intermediate_size": hidden_dim,
        "num_hidden_layers": model.decoder.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads if kv_heads is None else kv_heads,
        "head_dim": attention.head_dim or model.model_dim // attention.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions(cfg),
        "rms_norm_eps": model.decoder.final_norm.eps,
        "tie_word_embeddings": model.lm_head is None,
        "attention_dropout": 0.0,
        **_rope_settings(cfg, architecture),
    }


def max_positions(cfg: Trainer.Config) -> int:
    """Returns how many positions the model is for: what it states, else those of its rows."""
    limit = cfg.get_path("model.max_seq_len")
    return limit if isinstance(limit, int) else cfg.seq_len


def llama_like_rules() -> list[Rule]:
    """Returns the tensors of a Llama-like model, biases and norms of queries and keys included."""
    rules: list[Rule] = [
        TensorRule("model.embed_tokens.weight", "embedding/weight"),
        TensorRule(f"{_LAYER}.input_layernorm.weight", f"{_OURS}/attention_norm/scale"),
        TensorRule(f"{_LAYER}.post_attention_layernorm.weight", f"{_OURS}/feed_forward_norm/scale"),
        TensorRule("model.norm.weight", "decoder/final_norm/scale"),
        TensorRule("lm_head.weight", "lm_head/weight", TorchLinear()),
        Tied("lm_head.weight", same_as="model.embed_tokens.weight"),
        Ignored(f"{_LAYER}.self_attn.rotary_emb.inv_freq", "computed from the rotary settings"),
    ]
    for name, ours in {"q": "qkv/query", "k": "qkv/key", "v": "qkv/value", "o": "output"}.items():
        foreign, path = f"{_LAYER}.self_attn.{name}_proj", f"{_OURS}/attention/{ours}"
        layout = TorchLinear(num_in=2 if name == "o" else 1)
        rules.append(TensorRule(f"{foreign}.weight", f"{path}/weight", layout))
        rules.append(TensorRule(f"{foreign}.bias", f"{path}/bias", Flatten()))
    for name in ("up", "gate", "down"):
        foreign, path = f"{_LAYER}.mlp.{name}_proj", f"{_OURS}/feed_forward/{name}"
        rules.append(TensorRule(f"{foreign}.weight", f"{path}/weight", TorchLinear()))
        rules.append(TensorRule(f"{foreign}.bias", f"{path}/bias"))
    for name, ours in {"q": "query", "k": "key"}.items():
        norm = f"{_OURS}/attention/query_key_transform/transform_0/{ours}_norm/scale"
        rules.append(TensorRule(f"{_LAYER}.self_attn.{name}_norm.weight", norm))
    return rules


# -- rotary embeddings -----------------------------------------------------------------------------


def _set_rope(cfg: Trainer.Config, settings: Settings) -> None:
    """Gives the rotary embedding of an experiment the base and the scaling of a ``config.json``.

    Raises:
        ConfigError: A scheme, or one of its settings, is not implemented (AX386).
        CheckpointError: It has several position axes (AX614).
    """
    for place in (settings, given(settings, "rope_parameters", Mapping, settings)):
        given(place, "rope_theta", float, None)
    given(settings, "rope_scaling", Mapping, None)
    rope = rope_from_hf(settings)
    settings.skip("rope_theta", "rope_scaling", "partial_rotary_factor")
    if rope.axes is not None:
        raise CheckpointError(
            "the setting 'mrope_section' asks for several position axes, which only models of "
            "images have",
            code="AX614",
        )
    fields = ("base", "rotary_fraction", "scaling")
    rope_of(cfg).set(**{name: getattr(rope, name) for name in fields})


def _rope_settings(cfg: Trainer.Config, architecture: str) -> dict[str, Any]:
    """Returns the settings that say what :func:`_set_rope` reads.

    Raises:
        CheckpointError: The format cannot say it (AX622).
    """
    try:
        rope = rope_of(cfg)
        out = rope_to_hf(rope)
    except ConfigError as error:
        raise cannot_say(f"positions that it has no words for: {error}", architecture) from error
    if isinstance(rope.scaling, DynamicNTKScaling):
        # There its trained length is the model's.
        out["max_position_embeddings"] = rope.scaling.original_max_seq_len
    return out


# -- biases ----------------------------------------------------------------------------------------


def set_bias(cfg: Trainer.Config, *names: str, bias: bool) -> None:
    """Sets ``bias`` of layers, named by their path below the transformer layer."""
    model: Any = cfg.model
    for name in names:
        model.decoder.layer.get_path(name).set(bias=bias)


def bias_of(cfg: Trainer.Config, *names: str, architecture: str) -> bool:
    """Returns whether all of these layers have biases, or none of them.

    Raises:
        CheckpointError: Only some have (AX622).
    """
    model: Any = cfg.model
    found = {model.decoder.layer.get_path(name).bias for name in names}
    if len(found) != 1:
        raise cannot_say(f"biases of some of {', '.join(names)}", architecture)
    return found.pop()


def cannot_say(what: str, architecture: str) -> CheckpointError:
    """Returns the error for a config that a foreign format has no words for."""
    return CheckpointError(
        f"the config has {what}, which {architecture} cannot express",
        code="AX622",
        hint="export it as a family that can, or leave it out of the config",
    )
