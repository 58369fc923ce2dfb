"""Published weights of OLMo 2: Hugging Face's files, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import ModelFamily, Rule, TensorInfo, TensorRule
from axcore.train import Trainer
from axlearn_models._export import layers_to_say, verified
from axlearn_models._hugging_face import (
    ATTENTION_NAMES,
    bias_of,
    check_all_read,
    given,
    llama_like_from,
    llama_like_rules,
    llama_like_to,
    set_bias,
    settings_of,
)

__all__ = ["HuggingFaceOlmo2"]


class HuggingFaceOlmo2(ModelFamily):
    """``Olmo2ForCausalLM``: each branch ends in its norm; queries are normalized as one vector."""

    architecture = "Olmo2ForCausalLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "olmo2")
        cfg = llama_like_from(settings, experiments.get("olmo2-7B"))
        set_bias(cfg, *ATTENTION_NAMES, bias=given(settings, "attention_bias", bool, False))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        layer, ours = "model.layers.{i}", "decoder/layer/{i}"
        return [
            *llama_like_rules(),
            TensorRule(
                f"{layer}.post_attention_layernorm.weight", f"{ours}/attention_out_norm/scale"
            ),
            TensorRule(
                f"{layer}.post_feedforward_layernorm.weight", f"{ours}/feed_forward_out_norm/scale"
            ),
        ]

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        name, plain = self.architecture, cfg.copy()
        (layer,) = layers_to_say(plain, name)
        layer.set(attention_out_norm=None, feed_forward_out_norm=None)
        out = llama_like_to(plain, architecture=name, model_type="olmo2")
        del out["head_dim"]  # always the model's share there
        biases = bias_of(cfg, *ATTENTION_NAMES, architecture=name)
        return verified(self, cfg, out | {"attention_bias": biases})
