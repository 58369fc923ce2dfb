"""Published weights of Gemma 3: Hugging Face's files, both ways; of those with images, the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import (
    Ignored,
    ModelFamily,
    Rule,
    Settings,
    TensorInfo,
    TensorRule,
    Tied,
)
from axcore.errors import CheckpointError
from axcore.train import Trainer
from axlearn_models._export import verified
from axlearn_models._gemma import rope_of_layer
from axlearn_models._gemma_files import gemma_from, gemma_rules, gemma_to, rope_from
from axlearn_models._hugging_face import check_all_read, given, settings_of
from axlearn_models._windows import split_layers
from axlearn_rope import RoPE, rope_to_hf

__all__ = ["HuggingFaceGemma3", "HuggingFaceGemma3WithImages"]

_LOCAL_BASE, _GLOBAL_BASE = 10_000.0, 1_000_000.0
# What published files with images leave out of the text's settings.
_TEXT_DEFAULTS = dict(
    model_type="gemma3_text",
    vocab_size=262_208,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    query_pre_attn_scalar=256,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-6,
    sliding_window=4096,
)
_IMAGES = ("vision_config", "mm_tokens_per_image")
_IMAGES += ("boi_token_index", "eoi_token_index", "image_token_index")


class HuggingFaceGemma3(ModelFamily):
    """``Gemma3ForCausalLM``: local layers have a rotary base of their own."""

    architecture = "Gemma3ForCausalLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "gemma3_text")
        # Its attention does not read it.
        settings.expect("attn_logit_softcapping", None, default=None)
        caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
        cfg = gemma_from(settings, experiments.get("gemma3-1B"), period=6, caps=caps)
        local_rope, global_rope = _ropes(settings)
        local, everything = split_layers(cfg)
        for layers, rope in ((local, local_rope), (everything, global_rope)):
            for layer in layers:
                rope_of_layer(layer).set(base=rope.base, scaling=rope.scaling)
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        return gemma_rules()

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        out = gemma_to(cfg, architecture=self.architecture, model_type="gemma3_text")
        local, everything = split_layers(cfg)
        local_rope = rope_of_layer(local[0]) if local else RoPE.Config(base=_LOCAL_BASE)
        global_rope = rope_of_layer(everything[0]) if everything else RoPE.Config(base=_GLOBAL_BASE)
        rope = {**rope_to_hf(global_rope), "rope_local_base_freq": local_rope.base}
        return verified(self, cfg, out | rope)


class HuggingFaceGemma3WithImages(ModelFamily):
    """``Gemma3ForConditionalGeneration``: what it does with text alone. Import only."""

    architecture = "Gemma3ForConditionalGeneration"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "gemma3")
        settings.expect("tie_word_embeddings", True, default=True)
        settings.skip("initializer_range", *_IMAGES)
        text = {**_TEXT_DEFAULTS, **_plain(settings.require("text_config", Mapping))}
        check_all_read(settings)
        return HuggingFaceGemma3().config(Settings(text, "config.json: text_config"), {})

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        rules = [_below("language_model.", rule) for rule in gemma_rules()]
        parts = ("vision_tower.", "multi_modal_projector.")
        return rules + [Ignored(f"{part}*", "of images, which are not read") for part in parts]

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """Refuses; see :meth:`ModelFamily.foreign_config`."""
        raise CheckpointError(
            f"{self.architecture} cannot be exported: its part for images was not read",
            code="AX622",
            hint=f"export the text model with --family {HuggingFaceGemma3.architecture}",
        )


def _plain(value: Any) -> Any:
    """Settings as a dict, all of them read: another reader takes them."""
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _below(prefix: str, rule: Rule) -> Rule:
    match rule:
        case TensorRule(foreign=str(name)) | Ignored(foreign=name):
            return dataclasses.replace(rule, foreign=prefix + name)
        case Tied():
            return Tied(prefix + rule.foreign, same_as=prefix + rule.same_as)
    raise AssertionError(rule)


def _ropes(settings: Settings) -> tuple[RoPE.Config, RoPE.Config]:
    """Returns the rotary embeddings of local and of global layers, from either form of settings."""
    if settings.get("rope_parameters") is not None:
        local = rope_from(settings, "sliding_attention")
        return local, rope_from(settings, "full_attention")
    local = RoPE.Config(base=given(settings, "rope_local_base_freq", float, _LOCAL_BASE))
    names = ("rope_theta", "rope_scaling", "max_position_embeddings")
    present = {name: settings[name] for name in names if name in settings}
    return local, rope_from({"rope_theta": _GLOBAL_BASE, **present})
