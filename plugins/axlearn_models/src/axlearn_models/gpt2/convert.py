"""Published weights of GPT-2: Hugging Face's files, both ways.

Its matrices are stored (in, out), queries, keys and values as one. The files that OpenAI's weights
are published in leave the prefix ``transformer.`` out of the tensors' names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import (
    Flatten,
    Fused,
    Ignored,
    Matrix,
    ModelFamily,
    OptionalPrefix,
    Rule,
    TensorInfo,
    TensorRule,
    Tied,
    TorchLinear,
)
from axcore.layers import Dropout, LayerNorm, LMHead, Normal
from axcore.train import Trainer
from axlearn_models._export import layers_to_say, verified
from axlearn_models._hugging_face import (
    cannot_say,
    check_all_read,
    given,
    leave_attention_dropout,
    max_positions,
    settings_of,
)
from axlearn_models._llama_like import initialized, resized
from axlearn_models.gpt2.config import residual_deviation

__all__ = ["HuggingFaceGPT2"]

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_ACTIVATIONS |= {"relu": "relu", "silu": "silu"}


class HuggingFaceGPT2(ModelFamily):
    """``GPT2LMHeadModel``. Dropout of the attention weights is not kept."""

    architecture = "GPT2LMHeadModel"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "gpt2")
        settings.expect("add_cross_attention", False, default=False)
        settings.expect("scale_attn_by_inverse_layer_idx", False, default=False)
        leave_attention_dropout(settings, "attn_pdrop")
        settings.skip("reorder_and_upcast_attn", "task_specific_params", "n_ctx")
        settings.skip(*(name for name in settings if name.startswith("summary_")))
        limit = settings.require("n_positions", int)
        cfg = resized(
            experiments.get("gpt2-124M"),
            vocab_size=settings.require("vocab_size", int),
            model_dim=settings.require("n_embd", int),
            num_layers=settings.require("n_layer", int),
            hidden_dim=given(settings, "n_inner", int, None),
            num_heads=settings.require("n_head", int),
        )
        model: Any = cfg.model
        layer = model.decoder.layer
        tied = given(settings, "tie_word_embeddings", bool, True)
        model.set(compute_dtype=None, max_seq_len=limit, lm_head=None if tied else LMHead.Config())
        cfg.set(seq_len=min(cfg.seq_len, limit))
        stddev = given(settings, "initializer_range", float, 0.02)
        model.position.set(weight_init=Normal(stddev=stddev))
        residual_deviation(initialized(cfg, stddev=stddev), stddev=stddev)
        eps = settings.require("layer_norm_epsilon", float)
        for norm in (layer.attention_norm, layer.feed_forward_norm, model.decoder.final_norm):
            norm.set(eps=eps)
        known = settings.expect("activation_function", *_ACTIVATIONS, default="gelu_new")
        layer.feed_forward.set(activation=_ACTIVATIONS[known])
        scaled = given(settings, "scale_attn_weights", bool, True)
        layer.attention.set(logit_scale=None if scaled else 1.0)
        layer.dropout.set(rate=given(settings, "resid_pdrop", float, 0.1))
        model.dropout.set(rate=given(settings, "embd_pdrop", float, 0.1))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        layer, ours = "transformer.h.{i}", "decoder/layer/{i}"
        qkv = [f"{ours}/attention/qkv/{name}" for name in ("query", "key", "value")]
        norms = {
            f"{layer}.ln_1": f"{ours}/attention_norm",
            f"{layer}.ln_2": f"{ours}/feed_forward_norm",
            "transformer.ln_f": "decoder/final_norm",
        }
        matrices = {
            f"{layer}.attn.c_proj": (f"{ours}/attention/output", Matrix(num_in=2)),
            f"{layer}.mlp.c_fc": (f"{ours}/feed_forward/up", Matrix()),
            f"{layer}.mlp.c_proj": (f"{ours}/feed_forward/down", Matrix()),
        }
        rules: list[Rule] = [
            OptionalPrefix("transformer."),
            TensorRule("transformer.wte.weight", "embedding/weight"),
            TensorRule("transformer.wpe.weight", "position/weight"),
            TensorRule(
                f"{layer}.attn.c_attn.weight",
                tuple(f"{name}/weight" for name in qkv),
                Fused(Matrix(), axis=1),
            ),
            TensorRule(
                f"{layer}.attn.c_attn.bias",
                tuple(f"{name}/bias" for name in qkv),
                Fused(Flatten(), axis=0),
            ),
            TensorRule("lm_head.weight", "lm_head/weight", TorchLinear()),
            Tied("lm_head.weight", same_as="transformer.wte.weight"),
            Ignored(f"{layer}.attn.bias", "the causal mask"),
            Ignored(f"{layer}.attn.masked_bias", "what masked logits are set to"),
        ]
        for foreign, path in norms.items():
            rules.append(TensorRule(f"{foreign}.weight", f"{path}/scale"))
            rules.append(TensorRule(f"{foreign}.bias", f"{path}/bias"))
        for foreign, (path, layout) in matrices.items():
            rules.append(TensorRule(f"{foreign}.weight", f"{path}/weight", layout))
            rules.append(TensorRule(f"{foreign}.bias", f"{path}/bias"))
        return rules

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        (layer,) = layers_to_say(cfg, self.architecture)
        model: Any = cfg.model
        final_norm, dropouts = model.decoder.final_norm, (model.dropout, layer.dropout)
        if not all(isinstance(dropout, Dropout.Config) for dropout in dropouts):
            raise cannot_say("another kind of dropout", self.architecture)
        if not isinstance(final_norm, LayerNorm.Config):
            raise cannot_say("no LayerNorm at its end", self.architecture)
        hidden_dim = layer.feed_forward.hidden_dim
        activations = [
            name for name, ours in _ACTIVATIONS.items() if ours == layer.feed_forward.activation
        ]
        if not activations:
            raise cannot_say(f"the activation {layer.feed_forward.activation!r}", self.architecture)
        out = {
            "architectures": [self.architecture],
            "model_type": "gpt2",
            "vocab_size": model.vocab_size,
            "n_positions": max_positions(cfg),
            "n_embd": model.model_dim,
            "n_layer": model.decoder.num_layers,
            "n_head": layer.attention.num_heads,
            "n_inner": hidden_dim if isinstance(hidden_dim, int) else None,
            "activation_function": activations[0],
            "layer_norm_epsilon": final_norm.eps,
            "scale_attn_weights": layer.attention.logit_scale is None,
            "resid_pdrop": layer.dropout.rate,
            "embd_pdrop": model.dropout.rate,
            "attn_pdrop": 0.0,
            "tie_word_embeddings": model.lm_head is None,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        return verified(self, cfg, out)
