"""Published weights of ViT, Hugging Face's files both ways."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from axcore import experiments
from axcore.checkpoint.convert import (
    ModelFamily,
    OneToOne,
    Oracle,
    Rule,
    TensorInfo,
    TensorRule,
    TensorSource,
    Transpose,
    transformers_model,
)
from axcore.layers import Dropout, LayerNorm
from axcore.train import Trainer
from axlearn_models._encoders import exported, initialized, linear_rules, outputs_of, sized
from axlearn_models._hugging_face import (
    cannot_say,
    check_all_read,
    leave_attention_dropout,
    settings_of,
)

__all__ = ["HuggingFaceViT"]

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}
_QKV = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class _LeadingOnes(OneToOne):
    """A foreign array that has ``count`` dims of one before ours."""

    count: int

    def ours(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """(1, ..., *ours) -> ours."""
        return array.reshape(shape)

    def foreign(self, array: np.ndarray) -> np.ndarray:
        """Ours -> (1, ..., *ours)."""
        return array.reshape((1,) * self.count + array.shape)


class HuggingFaceViT(ModelFamily):
    """``ViTForImageClassification``."""

    architecture = "ViTForImageClassification"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`; the classes are counted by ``id2label``."""
        settings = settings_of(foreign)
        settings.expect("model_type", "vit")
        # In training alone, or of other heads.
        leave_attention_dropout(settings, "attention_probs_dropout_prob")
        settings.skip("encoder_stride", "pooler_act")
        settings.skip("pooler_output_size", "tie_word_embeddings", "chunk_size_feed_forward")
        cfg = sized(
            experiments.get("vit-B16"),
            model_dim=settings.require("hidden_size", int),
            num_layers=settings.require("num_hidden_layers", int),
            num_heads=settings.require("num_attention_heads", int),
            hidden_dim=settings.require("intermediate_size", int),
        )
        initialized(cfg, stddev=float(settings.get("initializer_range", 0.02)))
        model: Any = cfg.model
        size, patch = settings.get("image_size", 224), settings.get("patch_size", 16)
        if not isinstance(size, int):
            size = tuple(size)
        classifier = infos.get("classifier.weight")
        labels = tuple(settings.get("id2label", {0: "", 1: ""}).values())  # the library's default
        model.set(
            image_size=size,
            patch_size=patch,
            num_channels=settings.get("num_channels", 3),
            num_classes=classifier.shape[0] if classifier else len(labels),
            compute_dtype=None,
        )
        activation = _ACTIVATIONS[settings.expect("hidden_act", *_ACTIVATIONS)]
        layer = model.encoder.layer
        layer.feed_forward.set(activation=activation)
        bias = settings.get("qkv_bias", True)
        for name in _QKV:
            getattr(layer.attention.qkv, name).set(bias=bias)
        for norm in model.find(LayerNorm.Config).values():
            norm.set(eps=float(settings.get("layer_norm_eps", 1e-12)))
        for dropout in model.find(Dropout.Config).values():
            dropout.set(rate=float(settings.get("hidden_dropout_prob", 0.0)))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        embeddings, projection = "vit.embeddings", "patch_embeddings.projection"
        layer, ours = "vit.encoder.layer.{i}", "encoder/layer/{i}"
        rules: list[Rule] = [
            TensorRule(f"{embeddings}.cls_token", "class_token", _LeadingOnes(2)),
            TensorRule(f"{embeddings}.position_embeddings", "position/weight", _LeadingOnes(1)),
            # (out, channels, height, width) -> (height, width, channels, out)
            TensorRule(
                f"{embeddings}.{projection}.weight",
                "patches/projection/weight",
                Transpose((2, 3, 1, 0)),
            ),
            TensorRule(f"{embeddings}.{projection}.bias", "patches/projection/bias"),
            *_norm_rules(f"{layer}.layernorm_before", f"{ours}/attention_norm"),
            *_norm_rules(f"{layer}.layernorm_after", f"{ours}/feed_forward_norm"),
            *_norm_rules("vit.layernorm", "encoder/final_norm"),
            *linear_rules(f"{layer}.attention.output.dense", f"{ours}/attention/output", num_in=2),
            *linear_rules(f"{layer}.intermediate.dense", f"{ours}/feed_forward/up"),
            *linear_rules(f"{layer}.output.dense", f"{ours}/feed_forward/down"),
            *linear_rules("classifier", "classifier"),
        ]
        for name in _QKV:
            foreign = f"{layer}.attention.attention.{name}"
            rules += linear_rules(foreign, f"{ours}/attention/qkv/{name}")
        return rules

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        model: Any = cfg.model
        for field in ("encoder", "patches", "num_classes"):
            if field not in model.fields():
                raise cannot_say(f"a {type(model).__qualname__}", self.architecture)
        layer = model.encoder.layer
        names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
        eps = {norm.eps for norm in model.find(LayerNorm.Config).values()}
        activation = layer.feed_forward.activation
        if len(eps) != 1 or activation not in names or not model.num_classes:
            raise cannot_say(
                f"norms of eps {eps}, the activation {activation!r}, or no classes",
                self.architecture,
            )
        labels = {str(i): f"LABEL_{i}" for i in range(model.num_classes)}
        settings = {
            "architectures": [self.architecture],
            "model_type": "vit",
            "hidden_size": model.model_dim,
            "num_hidden_layers": model.encoder.num_layers,
            "num_attention_heads": layer.attention.num_heads,
            "intermediate_size": layer.feed_forward.hidden_dim,
            "hidden_act": names[activation],
            "hidden_dropout_prob": layer.dropout.rate,
            "attention_probs_dropout_prob": 0.0,
            "layer_norm_eps": eps.pop(),
            "image_size": model.image_size,
            "patch_size": model.patch_size,
            "num_channels": model.num_channels,
            "qkv_bias": layer.attention.qkv.query.bias,
            "id2label": labels,
            "label2id": {label: int(i) for i, label in labels.items()},
        }
        return exported(self, cfg, settings)

    def oracle(self, source: TensorSource) -> Oracle | None:
        """Logits of images that the ids stand for; see :func:`_images`."""
        import torch  # pyright: ignore[reportMissingImports]

        model = transformers_model(source, "AutoModelForImageClassification")
        config = model.config

        def run(ids: np.ndarray) -> np.ndarray:
            size = config.image_size
            sides = (size, size) if isinstance(size, int) else tuple(size)
            images = _images(ids, (*sides, config.num_channels))
            with torch.no_grad():
                return model(torch.from_numpy(images.transpose(0, 3, 1, 2))).logits.numpy()

        return run

    def outputs(self, model: Any, state: Any, input_ids: np.ndarray) -> np.ndarray:
        """As :meth:`oracle` says, float32 (batch, num_classes)."""
        cfg = model.cfg
        size = cfg.image_size
        sides = (size, size) if isinstance(size, int) else size
        images = _images(input_ids, (*sides, cfg.num_channels))
        return outputs_of(model, state, "logits", images=images)


def _images(ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns one image for each row of ids, float32 (rows, *shape), the ids as its pixels."""
    pixels = [np.resize(row.astype(np.float32) / (row.max() + 1), shape) for row in ids]
    return np.stack(pixels) - np.float32(0.5)


def _norm_rules(foreign: str, path: str) -> list[Rule]:
    return [
        TensorRule(f"{foreign}.weight", f"{path}/scale"),
        TensorRule(f"{foreign}.bias", f"{path}/bias"),
    ]
