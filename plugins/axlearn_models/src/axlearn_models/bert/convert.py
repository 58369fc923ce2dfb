"""Published weights of BERT, Hugging Face's files both ways: the encoder, or with its head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from axcore import experiments
from axcore.checkpoint.convert import (
    FormerSuffix,
    Ignored,
    ModelFamily,
    OptionalPrefix,
    Oracle,
    Rule,
    Settings,
    TensorInfo,
    TensorRule,
    TensorSource,
    Tied,
    transformers_model,
)
from axcore.layers import FirstTokenPooler, LayerNorm, Linear, Normal
from axcore.train import Trainer
from axlearn_models._encoders import exported, initialized, linear_rules, outputs_of, sized
from axlearn_models._hugging_face import (
    cannot_say,
    check_all_read,
    leave_attention_dropout,
    max_positions,
    settings_of,
)

__all__ = ["HuggingFaceBert", "HuggingFaceBertMaskedLM"]

# The activations of both, by their names there.
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}
_NO_TASK = "of the task of two sentences, which is not a part here"


class HuggingFaceBert(ModelFamily):
    """``BertModel``: the encoder, with BERT's pooler where the file holds one."""

    architecture = "BertModel"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        cfg = _from(settings, experiments.get("minilm-L6-v2"))
        if infos and not any(name.endswith("pooler.dense.weight") for name in infos):
            cfg.model.set(pooler=None)
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        return [*_encoder_rules(""), *linear_rules("pooler.dense", "pooler/dense")]

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`; a missing pooler is not said."""
        settings = _to(cfg, self.architecture)
        if getattr(cfg.model, "pooler", None) is None:
            with_pooler = cfg.copy()
            dense = Linear.Config(weight_init=Normal(stddev=0.02))
            with_pooler.model.set(pooler=FirstTokenPooler.Config(dense=dense))
            return exported(self, with_pooler, settings)
        return exported(self, cfg, settings)

    def oracle(self, source: TensorSource) -> Oracle | None:
        """The last layer's output; see :meth:`ModelFamily.oracle`."""
        import torch  # pyright: ignore[reportMissingImports]

        model = transformers_model(source, "AutoModel")

        def run(ids: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                return model(torch.from_numpy(ids.astype(np.int64))).last_hidden_state.numpy()

        return run

    def outputs(self, model: Any, state: Any, input_ids: np.ndarray) -> np.ndarray:
        """The encoder's output, float32 (batch, seq, model_dim)."""
        return outputs_of(model, state, "hidden", input_ids=input_ids)


class HuggingFaceBertMaskedLM(ModelFamily):
    """``BertForMaskedLM``: the encoder and the head for hidden tokens."""

    architecture = "BertForMaskedLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        cfg = _from(settings, experiments.get("bert-base"))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        head = "cls.predictions"
        return [
            OptionalPrefix("bert."),
            *_encoder_rules("bert."),
            *linear_rules(f"{head}.transform.dense", "head_transform/dense"),
            *_norm_rules(f"{head}.transform.LayerNorm", "head_transform/norm"),
            TensorRule(f"{head}.bias", "embedding/head_bias"),
            Tied(f"{head}.decoder.weight", same_as="bert.embeddings.word_embeddings.weight"),
            Tied(f"{head}.decoder.bias", same_as=f"{head}.bias"),
            *(Ignored(f"bert.pooler.dense.{name}", _NO_TASK) for name in ("weight", "bias")),
            *(Ignored(f"cls.seq_relationship.{name}", _NO_TASK) for name in ("weight", "bias")),
        ]

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        return exported(self, cfg, _to(cfg, self.architecture))

    def oracle(self, source: TensorSource) -> Oracle | None:
        """The head's logits; see :meth:`ModelFamily.oracle`."""
        import torch  # pyright: ignore[reportMissingImports]

        model = transformers_model(source, "AutoModelForMaskedLM")

        def run(ids: np.ndarray) -> np.ndarray:
            with torch.no_grad():
                return model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()

        return run


def _from(settings: Settings, cfg: Trainer.Config) -> Trainer.Config:
    """Gives a member the dims of a ``config.json`` and returns it."""
    settings.expect("model_type", "bert")
    settings.expect("position_embedding_type", "absolute", default="absolute")
    settings.expect("is_decoder", False, default=False)
    settings.expect("add_cross_attention", False, default=False)
    settings.expect("chunk_size_feed_forward", 0, default=0)
    settings.expect("tie_word_embeddings", True, default=True)
    leave_attention_dropout(settings, "attention_probs_dropout_prob")
    settings.skip("classifier_dropout", "gradient_checkpointing")  # in training alone
    sized(
        cfg,
        model_dim=settings.require("hidden_size", int),
        num_layers=settings.require("num_hidden_layers", int),
        num_heads=settings.require("num_attention_heads", int),
        hidden_dim=settings.require("intermediate_size", int),
    )
    initialized(cfg, stddev=float(settings.get("initializer_range", 0.02)))
    for norm in cfg.model.find(LayerNorm.Config).values():
        norm.set(eps=float(settings.get("layer_norm_eps", 1e-12)))
    model: Any = cfg.model
    limit = settings.require("max_position_embeddings", int)
    model.set(
        vocab_size=settings.require("vocab_size", int),
        num_token_types=settings.get("type_vocab_size", 2),
        max_seq_len=limit,
        compute_dtype=None,
    )
    activation = _ACTIVATIONS[settings.expect("hidden_act", *_ACTIVATIONS)]
    model.encoder.layer.feed_forward.set(activation=activation)
    if model.head_transform is not None:
        model.head_transform.set(activation=activation)
    dropout = float(settings.get("hidden_dropout_prob", 0.1))
    model.dropout.set(rate=dropout)
    model.encoder.layer.dropout.set(rate=dropout)
    cfg.set(seq_len=min(cfg.seq_len, limit))
    return cfg


def _to(cfg: Trainer.Config, architecture: str) -> dict[str, Any]:
    model: Any = cfg.model
    for field in ("encoder", "num_token_types", "dropout"):
        if field not in model.fields():
            raise cannot_say(f"a {type(model).__qualname__}", architecture)
    layer = model.encoder.layer
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    eps = {norm.eps for norm in model.find(LayerNorm.Config).values()}
    activation = layer.feed_forward.activation
    if len(eps) != 1 or activation not in names:
        raise cannot_say(f"norms of eps {eps} or the activation {activation!r}", architecture)
    return {
        "architectures": [architecture],
        "model_type": "bert",
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dim,
        "num_hidden_layers": model.encoder.num_layers,
        "num_attention_heads": layer.attention.num_heads,
        "intermediate_size": layer.feed_forward.hidden_dim,
        "hidden_act": names[activation],
        "hidden_dropout_prob": layer.dropout.rate,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": max_positions(cfg),
        "type_vocab_size": model.num_token_types,
        "layer_norm_eps": eps.pop(),
    }


def _norm_rules(foreign: str, path: str) -> list[Rule]:
    return [
        TensorRule(f"{foreign}.weight", f"{path}/scale"),
        TensorRule(f"{foreign}.bias", f"{path}/bias"),
    ]


def _encoder_rules(prefix: str) -> list[Rule]:
    tables = {
        "word_embeddings": "embedding/weight",
        "position_embeddings": "position/weight",
        "token_type_embeddings": "token_types",
    }
    layer, ours = f"{prefix}encoder.layer.{{i}}", "encoder/layer/{i}"
    attention = f"{layer}.attention"
    rules: list[Rule] = [
        FormerSuffix("LayerNorm.weight", "LayerNorm.gamma"),
        FormerSuffix("LayerNorm.bias", "LayerNorm.beta"),
        *(TensorRule(f"{prefix}embeddings.{n}.weight", path) for n, path in tables.items()),
        Ignored(f"{prefix}embeddings.position_ids", "the numbers 0, 1, 2, ..."),
        *_norm_rules(f"{prefix}embeddings.LayerNorm", "embedding_norm"),
        *linear_rules(f"{attention}.output.dense", f"{ours}/attention/output", num_in=2),
        *_norm_rules(f"{attention}.output.LayerNorm", f"{ours}/attention_norm"),
        *linear_rules(f"{layer}.intermediate.dense", f"{ours}/feed_forward/up"),
        *linear_rules(f"{layer}.output.dense", f"{ours}/feed_forward/down"),
        *_norm_rules(f"{layer}.output.LayerNorm", f"{ours}/feed_forward_norm"),
    ]
    for name in ("query", "key", "value"):
        rules += linear_rules(f"{attention}.self.{name}", f"{ours}/attention/qkv/{name}")
    return rules
