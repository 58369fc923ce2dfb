"""Published weights of Mistral: Hugging Face's files, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import ModelFamily, Rule, TensorInfo
from axcore.train import Trainer
from axlearn_models._export import layers_to_say, verified
from axlearn_models._hugging_face import (
    check_all_read,
    given,
    llama_like_from,
    llama_like_rules,
    llama_like_to,
    settings_of,
)
from axlearn_models._llama_like import attention_of
from axlearn_models._windows import causal_within, without_window

__all__ = ["HuggingFaceMistral"]


class HuggingFaceMistral(ModelFamily):
    """``MistralForCausalLM``: Llama's layers, all of them with the same window, or none."""

    architecture = "MistralForCausalLM"
    yields_to = ("LlamaForCausalLM",)

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "mistral")
        cfg = llama_like_from(settings, experiments.get("mistral-7B-v0.1"))
        window = None
        if settings.get("sliding_window", 4096) is not None:
            window = given(settings, "sliding_window", int, 4096)
        attention_of(cfg).set(mask=causal_within(window, settings["max_position_embeddings"]))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        return llama_like_rules()

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        layers_to_say(cfg, self.architecture)
        plain = cfg.copy()
        window = without_window(attention_of(plain))
        out = llama_like_to(plain, architecture=self.architecture, model_type="mistral")
        return verified(self, cfg, out | {"sliding_window": window})
