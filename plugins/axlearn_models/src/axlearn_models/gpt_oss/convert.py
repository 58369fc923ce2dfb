"""Weights of GPT-OSS: Hugging Face's files, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import (
    Fused,
    Identity,
    ModelFamily,
    Rule,
    Settings,
    TensorInfo,
    TensorRule,
    TorchLinear,
)
from axcore.errors import CheckpointError
from axcore.ops.masks import Causal
from axcore.train import Trainer
from axlearn_models._hugging_face import (
    ATTENTION_NAMES,
    bias_of,
    cannot_say,
    check_all_read,
    given,
    llama_like_rules,
    set_bias,
    settings_of,
)
from axlearn_models._llama_like import layers_of
from axlearn_models._mixture import mixtures_of
from axlearn_models._mixture_files import (
    mixture_from,
    mixture_to,
    mixture_verified,
    mixtures_to_say,
)
from axlearn_models._windows import alternating, period_of, split_layers, without_window
from axlearn_moe import ClampedGLU

__all__ = ["HuggingFaceGptOss"]

_KINDS = {"sliding_attention": True, "full_attention": False}


class HuggingFaceGptOss(ModelFamily):
    """``GptOssForCausalLM``: sinks, windows in every other layer, experts with biases.

    A file holds gate and up of all experts in one array, column by column in turn. The published
    files hold them in MXFP4, which is refused: ``transformers`` writes them in bfloat16.
    """

    architecture = "GptOssForCausalLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        given_settings = settings_of(foreign)
        given_settings.expect("model_type", "gpt_oss")
        if given_settings.get("quantization_config") is not None:
            raise CheckpointError(
                "the setting 'quantization_config' says that the experts are stored in 4 bits",
                code="AX614",
                hint="write them in bfloat16 with transformers first: GptOssForCausalLM."
                "from_pretrained(path, quantization_config=Mxfp4Config(dequantize=True))"
                ".save_pretrained(path)",
            )
        # One layer is read as any other model's; which of them have a window comes after.
        named = ("layer_types", "sliding_window")
        plain = {name: value for name, value in given_settings.items() if name not in named}
        settings = Settings(plain, "config.json")
        settings.skip("initial_context_length", "experts_per_token", "model_type")
        cfg = experiments.get("gpt-oss-20B")
        (local, _), num_layers = layers_of(cfg), settings.require("num_hidden_layers", int)
        local.attention.set(mask=Causal())
        cfg.set_path("model.decoder.layer", local)
        mixture_from(settings, cfg)
        set_bias(cfg, *ATTENTION_NAMES, bias=given(settings, "attention_bias", bool, True))
        (moe,) = mixtures_of(cfg)
        glu = ClampedGLU(
            alpha=given(settings, "swiglu_alpha", float, 1.702),
            limit=given(settings, "swiglu_limit", float, 7.0),
        )
        moe.experts.set(glu=glu)
        check_all_read(settings)
        kinds = given(given_settings, "layer_types", list, None) or [*_KINDS] * num_layers
        kinds = list(kinds)[:num_layers]
        if len(kinds) != num_layers or any(kind not in tuple(_KINDS) for kind in kinds):
            raise CheckpointError(
                f"the setting 'layer_types' is {kinds}, expected {num_layers} of "
                f"{', '.join(_KINDS)}",
                code="AX614",
            )
        window = given(given_settings, "sliding_window", int, 128)
        return alternating(cfg, local=period_of([_KINDS[kind] for kind in kinds]), window=window)

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        layer, ours = "model.layers.{i}", "decoder/layer/{i}"
        foreign, mixture = f"{layer}.mlp", f"{ours}/feed_forward"
        (moe, *_) = mixtures_of(cfg)
        rules = [
            *llama_like_rules(),
            TensorRule(f"{layer}.self_attn.sinks", f"{ours}/attention/sinks"),
            TensorRule(f"{foreign}.router.weight", f"{mixture}/router/weight", TorchLinear()),
            TensorRule(f"{foreign}.router.bias", f"{mixture}/router/bias"),
        ]
        for name, part, axis in (("", "weight", 2), ("_bias", "bias", 1)):
            gate_up = tuple(f"{mixture}/experts/{n}/{part}" for n in ("gate", "up"))
            in_turn = Fused(Identity(), axis=axis, groups=moe.hidden_dim)
            rules += [
                TensorRule(f"{foreign}.experts.gate_up_proj{name}", gate_up, in_turn),
                TensorRule(f"{foreign}.experts.down_proj{name}", f"{mixture}/experts/down/{part}"),
            ]
        return rules

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        name, plain = self.architecture, cfg.copy()
        mixtures_to_say(cfg, name, periodic=True)
        layers = layers_of(plain)
        local = [len(split) for split in split_layers(plain)]
        windows = {without_window(layer.attention) for layer in layers} - {None}
        if len(windows) > 1 or local[0] + local[1] != len(layers):
            raise cannot_say(f"windows of {sorted(map(str, windows))} tokens", name)
        kinds = {here: kind for kind, here in _KINDS.items()}
        seen = [layer.attention.mask != Causal() for layer in layers_of(cfg)]
        num_layers = plain.get_path("model.decoder.num_layers")
        plain.set_path("model.decoder.layer", layers[0])
        out = mixture_to(plain, architecture=name, model_type="gpt_oss", count="num_local_experts")
        glu = getattr(mixtures_of(cfg)[0].experts, "glu", None)
        if glu is None:
            raise cannot_say("experts without a clamped gate", name)
        more = {
            "attention_bias": bias_of(plain, *ATTENTION_NAMES, architecture=name),
            "layer_types": [kinds[seen[i % len(seen)]] for i in range(num_layers)],
            "sliding_window": next(iter(windows), 128),
            "swiglu_alpha": glu.alpha,
            "swiglu_limit": glu.limit,
            # Left out they would be tokens of a vocabulary of 201,088.
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        return mixture_verified(self, cfg, out | more)
