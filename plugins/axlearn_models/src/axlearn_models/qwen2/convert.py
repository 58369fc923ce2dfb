"""Published weights of Qwen2 and Qwen2.5: Hugging Face's files, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import ModelFamily, Rule, TensorInfo
from axcore.train import Trainer
from axlearn_models._export import verified
from axlearn_models._hugging_face import (
    check_all_read,
    llama_like_from,
    llama_like_rules,
    llama_like_to,
    settings_of,
)

__all__ = ["HuggingFaceQwen2"]


class HuggingFaceQwen2(ModelFamily):
    """``Qwen2ForCausalLM``: biases on queries, keys and values, nowhere else."""

    architecture = "Qwen2ForCausalLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "qwen2")
        settings.expect("use_mrope", False, default=False)
        cfg = llama_like_from(settings, experiments.get("qwen2.5-0.5B"))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        return llama_like_rules()

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        out = llama_like_to(cfg, architecture=self.architecture, model_type="qwen2")
        return verified(self, cfg, out | {"use_sliding_window": False})
