"""Published weights of Qwen3's dense models: Hugging Face's files, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import ModelFamily, Rule, TensorInfo
from axcore.train import Trainer
from axlearn_models._export import verified
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

__all__ = ["HuggingFaceQwen3"]


class HuggingFaceQwen3(ModelFamily):
    """``Qwen3ForCausalLM``: queries and keys are normalized per head, then rotated."""

    architecture = "Qwen3ForCausalLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "qwen3")
        settings.require("head_dim", int)
        cfg = llama_like_from(settings, experiments.get("qwen3-0.6B"))
        set_bias(cfg, *ATTENTION_NAMES, bias=given(settings, "attention_bias", bool, False))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        return llama_like_rules()

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        name = self.architecture
        out = llama_like_to(cfg, architecture=name, model_type="qwen3")
        biases = bias_of(cfg, *ATTENTION_NAMES, architecture=name)
        more = {"attention_bias": biases, "use_sliding_window": False}
        return verified(self, cfg, out | more)
