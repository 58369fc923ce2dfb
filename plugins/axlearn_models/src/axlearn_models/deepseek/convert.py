"""Weights of DeepSeek-V2 and V3: Hugging Face's files, both ways."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import (
    Fused,
    Ignored,
    ModelFamily,
    Rule,
    Settings,
    TensorInfo,
    TensorRule,
    TorchLinear,
)
from axcore.errors import CheckpointError, ConfigError
from axcore.layers import (
    CausalLM,
    Decoder,
    Embedding,
    FeedForward,
    RMSNorm,
    TransformerLayer,
)
from axcore.train import Trainer
from axlearn_models._hugging_face import (
    cannot_say,
    check_all_read,
    given,
    max_positions,
    settings_of,
)
from axlearn_models._latent_attention import LatentAttention
from axlearn_models._llama_like import initialized, layers_of, normalized
from axlearn_models._mixture import mixtures_of
from axlearn_models._mixture_files import (
    EXPERT_NAMES,
    mixture_rules,
    mixture_verified,
    normalizes,
)
from axlearn_models.deepseek.config import attention_scale, dense_first
from axlearn_moe import MoE, TopKRouter
from axlearn_rope import RoPE, rope_from_hf, rope_to_hf

__all__ = ["HuggingFaceDeepseekV2", "HuggingFaceDeepseekV3"]

_KINDS = {
    "model": CausalLM.Config,
    "model.embedding": Embedding.Config,
    "model.decoder": Decoder.Config,
    "model.decoder.final_norm": RMSNorm.Config,
    "model.decoder.layer": TransformerLayer.Config,
    "model.decoder.layer.attention": LatentAttention.Config,
    "model.decoder.layer.attention.query_key_transform": RoPE.Config,
    "model.decoder.layer.feed_forward": MoE.Config,
    "model.decoder.layer.feed_forward.router": TopKRouter.Config,
    "model.decoder.layer.feed_forward.shared_experts": FeedForward.Config,
}
_FIXED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0,),
    "moe_layer_freq": (1,),
    "tie_word_embeddings": (False,),
}
# Of training or of how the model is spread; the published files give them.
_SKIPPED = ("aux_loss_alpha", "seq_aux", "ep_size", "auto_map", "num_nextn_predict_layers")
_SKIPPED += ("num_mtp_layers", "output_router_logits", "router_aux_loss_coef")


class _DeepSeek(ModelFamily):
    """What both versions share; how a token's experts are chosen is each one's own."""

    _member: str
    _model_type: str

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", self._model_type)
        if settings.get("quantization_config") is not None:
            raise CheckpointError(
                "the setting 'quantization_config' says that matrices are stored in 8 bits",
                code="AX614",
                hint="convert a copy in bfloat16, such as DeepSeek's fp8_cast_bf16.py makes",
            )
        cfg = _from(settings, experiments.get(self._member))
        self._read_router(settings, mixtures_of(cfg)[0])
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        return _rules(cfg)

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        out = _to(cfg, self.architecture, self._model_type)
        return mixture_verified(self, cfg, out | self._say_router(mixtures_of(cfg)[0]))

    @abc.abstractmethod
    def _read_router(self, settings: Settings, layer: Any) -> None:
        """Gives the router of a mixture what the settings say of it."""

    @abc.abstractmethod
    def _say_router(self, layer: Any) -> dict[str, Any]:
        """The inverse of :meth:`_read_router`."""


class HuggingFaceDeepseekV3(_DeepSeek):
    """``DeepseekV3ForCausalLM``: sigmoid scores, groups by their best two, a bias for the choice.

    What predicts a further token in training is left out. The published files are in FP8, which is
    refused.
    """

    architecture = "DeepseekV3ForCausalLM"
    _member, _model_type = "deepseek-V3", "deepseek_v3"

    def _read_router(self, settings: Settings, layer: Any) -> None:
        settings.expect("scoring_func", "sigmoid", default="sigmoid")
        settings.expect("topk_method", "noaux_tc", default="noaux_tc")
        layer.router.set(
            normalize=given(settings, "norm_topk_prob", bool, True),
            num_groups=given(settings, "n_group", int, 1),
            num_chosen_groups=given(settings, "topk_group", int, 1),
        )

    def _say_router(self, layer: Any) -> dict[str, Any]:
        router = layer.router
        return {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": normalizes(layer),
            "n_group": router.num_groups,
            "topk_group": router.num_chosen_groups,
            "rope_interleave": True,
        }


class HuggingFaceDeepseekV2(_DeepSeek):
    """``DeepseekV2ForCausalLM``: softmax scores that are scaled, groups by their best expert."""

    architecture = "DeepseekV2ForCausalLM"
    _member, _model_type = "deepseek-V2", "deepseek_v2"

    def _read_router(self, settings: Settings, layer: Any) -> None:
        settings.expect("scoring_func", "softmax", default="softmax")
        settings.expect("norm_topk_prob", False, default=False)
        grouped = settings.expect("topk_method", "greedy", "group_limited_greedy", default="greedy")
        groups = [given(settings, name, int, 1) for name in ("n_group", "topk_group")]
        groups = groups if grouped == "group_limited_greedy" else [1, 1]
        layer.router.set(num_groups=groups[0], num_chosen_groups=groups[1])

    def _say_router(self, layer: Any) -> dict[str, Any]:
        router = layer.router
        grouped = router.num_groups > 1
        return {
            "scoring_func": "softmax",
            "topk_method": "group_limited_greedy" if grouped else "greedy",
            "norm_topk_prob": False,
            "n_group": router.num_groups,
            "topk_group": router.num_chosen_groups,
        }


def _from(settings: Settings, cfg: Trainer.Config) -> Trainer.Config:
    """Gives an experiment the dims of a ``config.json``; how experts are chosen is the caller's."""
    for name, values in _FIXED.items():
        settings.expect(name, *values, default=values[0])
    settings.expect("rope_interleave", True, default=True)
    settings.skip(*_SKIPPED, "head_dim", "qk_head_dim", "num_key_value_heads")
    model: Any = cfg.model
    (layer,) = layers_of(cfg)
    model.set(
        vocab_size=settings.require("vocab_size", int),
        model_dim=settings.require("hidden_size", int),
        max_seq_len=settings.require("max_position_embeddings", int),
        compute_dtype=None,
    )
    cfg.set(seq_len=min(cfg.seq_len, model.max_seq_len))
    model.decoder.set(num_layers=settings.require("num_hidden_layers", int))
    attention = layer.attention
    attention.set(
        num_heads=settings.require("num_attention_heads", int),
        head_dim=settings.require("qk_nope_head_dim", int),
        rotated_dim=settings.require("qk_rope_head_dim", int),
        value_dim=settings.require("v_head_dim", int),
        rank=settings.require("kv_lora_rank", int),
        query_rank=given(settings, "q_lora_rank", int, None),
    )
    rope = rope_from_hf(settings)
    for place in (settings, given(settings, "rope_parameters", Mapping, settings)):
        given(place, "rope_theta", float, None)
    given(settings, "rope_scaling", Mapping, None)
    settings.skip("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    attention.query_key_transform.set(base=rope.base, scaling=rope.scaling)
    attention_scale(attention)
    moe = layer.feed_forward
    width = settings.require("moe_intermediate_size", int)
    count = "n_routed_experts" if "n_routed_experts" in settings else "num_experts"
    moe.set(
        num_experts=settings.require(count, int),
        top_k=settings.require("num_experts_per_tok", int),
        hidden_dim=width,
    )
    moe.shared_experts.set(hidden_dim=width * settings.require("n_shared_experts", int))
    moe.router.set(scale=given(settings, "routed_scaling_factor", float, 1.0))
    model.decoder.set(prefix=())
    initialized(cfg, stddev=given(settings, "initializer_range", float, 0.02))
    attention.heads.set(weight_init=attention.query.weight_init)
    moe.router.set(weight_init=attention.query.weight_init)
    eps = settings.require("rms_norm_eps", float)
    normalized(cfg, eps=eps)
    for norm in layer.attention.find(RMSNorm.Config).values():
        norm.set(eps=1e-6)  # whatever the settings say
    dense = moe.shared_experts.copy().set(hidden_dim=settings.require("intermediate_size", int))
    first = layer.copy().set(feed_forward=dense)
    return dense_first(cfg, first, given(settings, "first_k_dense_replace", int, 0))


def _to(cfg: Trainer.Config, architecture: str, model_type: str) -> dict[str, Any]:
    """Returns the ``config.json`` without how experts are chosen."""
    for path, kind in _KINDS.items():
        node: Any = cfg.get_path(path)
        if type(node) is not kind:
            raise cannot_say(f"a {type(node).__qualname__} at {path}", architecture)
    model: Any = cfg.model
    (layer,) = layers_of(cfg)
    attention, moe, prefix = layer.attention, layer.feed_forward, model.decoder.prefix
    shared, rest = divmod(moe.shared_experts.hidden_dim, moe.hidden_dim)
    if rest or model.lm_head is None:
        raise cannot_say("shared experts of another width, or a tied head", architecture)
    if any(type(first.feed_forward) is not FeedForward.Config for first in prefix):
        raise cannot_say("a first layer that is not dense", architecture)
    width = prefix[0].feed_forward.hidden_dim if prefix else 4 * model.model_dim
    try:
        rope = rope_to_hf(attention.query_key_transform.copy().set(pairing="half"))
    except ConfigError as error:
        raise cannot_say(f"positions that it has no words for: {error}", architecture) from error
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dim,
        "intermediate_size": width,
        "moe_intermediate_size": moe.hidden_dim,
        "num_hidden_layers": model.decoder.num_layers,
        "first_k_dense_replace": len(prefix),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "qk_nope_head_dim": attention.head_dim,
        "qk_rope_head_dim": attention.rotated_dim,
        "v_head_dim": attention.value_dim,
        "kv_lora_rank": attention.rank,
        "q_lora_rank": attention.query_rank,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": shared,
        "num_experts_per_tok": moe.top_k,
        "routed_scaling_factor": moe.router.scale,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": max_positions(cfg),
        "rms_norm_eps": model.decoder.final_norm.eps,
        "tie_word_embeddings": False,
        # Left out they would be tokens of a vocabulary of another size.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **rope,
    }


def _rules(cfg: Trainer.Config) -> list[Rule]:
    model: Any = cfg.model
    heads = layers_of(cfg)[0].attention.num_heads
    layer, ours = "model.layers.{i}", "decoder/layer/{i}"
    attention, block = f"{ours}/attention", f"{ours}/feed_forward"
    at = f"{layer}.self_attn"
    further = "predicts a further token in training"
    rules: list[Rule] = [
        *mixture_rules(),
        Ignored(f"model.layers.{model.decoder.num_layers}.*", further),
        TensorRule(f"{at}.q_a_layernorm.weight", f"{attention}/query_norm/scale"),
        TensorRule(f"{at}.kv_a_layernorm.weight", f"{attention}/latent_norm/scale"),
        TensorRule(f"{at}.q_a_proj.weight", f"{attention}/query_down/weight", TorchLinear()),
        TensorRule(f"{at}.kv_a_proj_with_mqa.weight", f"{attention}/latent/weight", TorchLinear()),
        TensorRule(
            f"{at}.kv_b_proj.weight",
            (f"{attention}/heads/key", f"{attention}/heads/value"),
            Fused(TorchLinear(), groups=heads),
        ),
        TensorRule(f"{layer}.mlp.gate.e_score_correction_bias", f"{block}/router/choice_bias"),
    ]
    q = "q_proj" if layers_of(cfg)[0].attention.query_rank is None else "q_b_proj"
    rules.append(TensorRule(f"{at}.{q}.weight", f"{attention}/query/weight", TorchLinear()))
    for name, theirs in EXPERT_NAMES.items():
        shared = f"{layer}.mlp.shared_experts.{theirs}.weight"
        rules.append(TensorRule(shared, f"{block}/shared_experts/{name}/weight", TorchLinear()))
    return rules
