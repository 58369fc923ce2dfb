"""Published weights of T5 and T5 1.1, Hugging Face's files both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from axcore import experiments
from axcore.checkpoint.convert import (
    Ignored,
    ModelFamily,
    Oracle,
    Rule,
    Settings,
    TensorInfo,
    TensorRule,
    TensorSource,
    Tied,
    TorchLinear,
    transformers_model,
)
from axcore.layers import (
    Dropout,
    FeedForward,
    RelativePositionBias,
    RelativePositionTable,
    RMSNorm,
)
from axcore.train import Trainer
from axlearn_models._encoders import exported, outputs_of
from axlearn_models._hugging_face import cannot_say, check_all_read, settings_of
from axlearn_models.t5.config import resized

__all__ = ["HuggingFaceT5"]

# Name there -> (our activation, whether the network is gated).
_NETWORKS = {
    "relu": ("relu", False),
    "gelu": ("gelu", False),
    "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True),
}
_HEAD = "lm_head.weight"


class HuggingFaceT5(ModelFamily):
    """``T5ForConditionalGeneration``: a tied head is scaled (T5), one of its own is not (1.1)."""

    architecture = "T5ForConditionalGeneration"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "t5")
        settings.expect("is_encoder_decoder", True, default=True)
        settings.expect("is_decoder", False, default=False)
        network = settings.expect("feed_forward_proj", *_NETWORKS, default="relu")
        activation, is_gated = _NETWORKS[network]
        _check_derived(settings, network)
        tied = settings.get("tie_word_embeddings", True)
        is_scaled = settings.get("scale_decoder_outputs", tied) and tied
        has_head = not is_scaled and (not infos or _HEAD in infos)
        cfg = experiments.get("t5-v1.1-small" if is_gated else "t5-small")
        model: Any = cfg.model
        lm_head = experiments.get("t5-v1.1-small").get_path("model.lm_head")
        model.set(lm_head=lm_head if has_head else None)
        num_layers = settings.require("num_layers", int)
        resized(
            cfg,
            model_dim=settings.require("d_model", int),
            num_layers=num_layers,
            num_heads=settings.require("num_heads", int),
            hidden_dim=settings.require("d_ff", int),
            head_dim=settings.require("d_kv", int),
        )
        model.decoder.set(num_layers=settings.get("num_decoder_layers") or num_layers)
        if not is_scaled:
            model.embedding.set(head_scale=1.0)
        model.set(vocab_size=settings.require("vocab_size", int), compute_dtype=None)
        for layer in model.find(FeedForward.Config).values():
            layer.set(activation=activation)
        buckets = settings.get("relative_attention_num_buckets", 32)
        for bias in model.find(RelativePositionBias.Config).values():
            distance = settings.get("relative_attention_max_distance", 128)
            bias.set(num_buckets=buckets, max_distance=distance)
        for table in model.find(RelativePositionTable.Config).values():
            table.set(num_buckets=buckets)
        for norm in model.find(RMSNorm.Config).values():
            norm.set(eps=float(settings.get("layer_norm_epsilon", 1e-6)))
        for dropout in model.find(Dropout.Config).values():
            dropout.set(rate=float(settings.get("dropout_rate", 0.1)))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        rules: list[Rule] = [
            TensorRule("shared.weight", "embedding/weight"),
            TensorRule(_HEAD, "lm_head/weight", TorchLinear()),
            *(
                Tied(name, same_as="shared.weight")
                for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", _HEAD)
            ),
            Ignored(
                "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
                "never read: attention over the source has no positions",
            ),
        ]
        for stack in ("encoder", "decoder"):
            block, ours = f"{stack}.block.{{i}}.layer", f"{stack}/layer/{{i}}"
            bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            network = "2" if stack == "decoder" else "1"
            rules += [
                TensorRule(bias, f"{stack}/shared/weight"),
                TensorRule(f"{stack}.final_layer_norm.weight", f"{stack}/final_norm/scale"),
                TensorRule(f"{block}.0.layer_norm.weight", f"{ours}/attention_norm/scale"),
                TensorRule(
                    f"{block}.{network}.layer_norm.weight", f"{ours}/feed_forward_norm/scale"
                ),
                *_attention_rules(f"{block}.0.SelfAttention", f"{ours}/attention", "qkv/"),
                *_network_rules(f"{block}.{network}.DenseReluDense", f"{ours}/feed_forward", cfg),
            ]
        block, ours = "decoder.block.{i}.layer.1", "decoder/layer/{i}"
        rules.append(TensorRule(f"{block}.layer_norm.weight", f"{ours}/cross_attention_norm/scale"))
        return [*rules, *_attention_rules(f"{block}.EncDecAttention", f"{ours}/cross_attention")]

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        model: Any = cfg.model
        for field in ("encoder", "decoder", "encoder_position"):
            if field not in model.fields():
                raise cannot_say(f"a {type(model).__qualname__}", self.architecture)
        attention, network = model.encoder.layer.attention, model.encoder.layer.feed_forward
        bias = attention.bias
        kind = (network.activation, network.gate is not None)
        names = {ours: theirs for theirs, ours in _NETWORKS.items()}
        if kind not in names or not isinstance(bias, RelativePositionBias.Config):
            raise cannot_say(f"networks of {kind} or the bias {bias}", self.architecture)
        settings = {
            "architectures": [self.architecture],
            "model_type": "t5",
            "is_encoder_decoder": True,
            "vocab_size": model.vocab_size,
            "d_model": model.model_dim,
            "d_kv": attention.head_dim or model.model_dim // attention.num_heads,
            "d_ff": network.hidden_dim,
            "num_layers": model.encoder.num_layers,
            "num_decoder_layers": model.decoder.num_layers,
            "num_heads": attention.num_heads,
            "relative_attention_num_buckets": bias.num_buckets,
            "relative_attention_max_distance": bias.max_distance,
            "feed_forward_proj": names[kind],
            "layer_norm_epsilon": model.encoder.final_norm.eps,
            "dropout_rate": model.dropout.rate,
            "tie_word_embeddings": model.lm_head is None,
        }
        return exported(self, cfg, settings)

    def oracle(self, source: TensorSource) -> Oracle | None:
        """Logits where the ids are the source and what has been written too."""
        import torch  # pyright: ignore[reportMissingImports]

        model = transformers_model(source, "AutoModelForSeq2SeqLM")

        def run(ids: np.ndarray) -> np.ndarray:
            tokens = torch.from_numpy(ids.astype(np.int64))
            with torch.no_grad():
                return model(input_ids=tokens, decoder_input_ids=tokens).logits.numpy()

        return run

    def outputs(self, model: Any, state: Any, input_ids: np.ndarray) -> np.ndarray:
        """As :meth:`oracle` says, float32 (batch, seq, vocab_size)."""
        return outputs_of(model, state, "logits", source_ids=input_ids, input_ids=input_ids)


def _check_derived(settings: Settings, network: str) -> None:
    """What newer files repeat must agree with what it is derived from."""
    is_gated = network.startswith("gated")
    settings.expect("is_gated_act", is_gated, default=is_gated)
    function = "gelu_new" if network == "gated-gelu" else network.rpartition("-")[2]
    settings.expect("dense_act_fn", function, default=function)
    # Of other tasks, of training, or of generation.
    settings.skip("classifier_dropout", "decoder_start_token_id", "initializer_factor")
    settings.skip("n_positions", "output_past", "task_specific_params")


def _attention_rules(foreign: str, path: str, qkv: str = "") -> list[Rule]:
    names = {"q": f"{qkv}query", "k": f"{qkv}key", "v": f"{qkv}value", "o": "output"}
    return [
        TensorRule(
            f"{foreign}.{name}.weight",
            f"{path}/{ours}/weight",
            TorchLinear(2 if name == "o" else 1),
        )
        for name, ours in names.items()
    ]


def _network_rules(foreign: str, path: str, cfg: Trainer.Config) -> list[Rule]:
    model: Any = cfg.model
    is_gated = model.encoder.layer.feed_forward.gate is not None
    names = {"wi_0": "gate", "wi_1": "up", "wo": "down"} if is_gated else {"wi": "up", "wo": "down"}
    return [
        TensorRule(f"{foreign}.{name}.weight", f"{path}/{ours}/weight", TorchLinear())
        for name, ours in names.items()
    ]
