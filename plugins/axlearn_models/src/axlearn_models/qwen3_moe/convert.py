"""Published weights of Qwen3's mixtures of experts: Hugging Face's files, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import ModelFamily, Rule, TensorInfo
from axcore.train import Trainer
from axlearn_models._hugging_face import (
    ATTENTION_NAMES,
    bias_of,
    check_all_read,
    given,
    set_bias,
    settings_of,
)
from axlearn_models._mixture_files import mixture_from, mixture_rules, mixture_to, mixture_verified

__all__ = ["HuggingFaceQwen3MoE"]

_NAMES = {"width": "moe_intermediate_size", "normalize": "norm_topk_prob"}


class HuggingFaceQwen3MoE(ModelFamily):
    """``Qwen3MoeForCausalLM``: Qwen3's attention; every layer a mixture."""

    architecture = "Qwen3MoeForCausalLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "qwen3_moe")
        settings.require("head_dim", int)
        settings.expect("decoder_sparse_step", 1, default=1)
        cfg = mixture_from(settings, experiments.get("qwen3-30B-A3B"), **_NAMES)
        set_bias(cfg, *ATTENTION_NAMES, bias=given(settings, "attention_bias", bool, False))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        return mixture_rules()

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        name = self.architecture
        out = mixture_to(cfg, architecture=name, model_type="qwen3_moe", **_NAMES)
        biases = bias_of(cfg, *ATTENTION_NAMES, architecture=name)
        more = {"attention_bias": biases, "use_sliding_window": False, "mlp_only_layers": []}
        return mixture_verified(self, cfg, out | more)
