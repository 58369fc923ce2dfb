"""Published weights of OLMoE: Hugging Face's files, both ways."""

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

__all__ = ["HuggingFaceOlmoe"]


class HuggingFaceOlmoe(ModelFamily):
    """``OlmoeForCausalLM``: queries are normalized as one vector; every layer a mixture."""

    architecture = "OlmoeForCausalLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "olmoe")
        cfg = mixture_from(settings, experiments.get("olmoe-1B-7B"), normalize="norm_topk_prob")
        set_bias(cfg, *ATTENTION_NAMES, bias=given(settings, "attention_bias", bool, False))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        return mixture_rules()

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        name = self.architecture
        out = mixture_to(cfg, architecture=name, model_type="olmoe", normalize="norm_topk_prob")
        del out["head_dim"]  # always the model's share there
        # Left out they would be tokens of a vocabulary of 50,304.
        out |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        biases = bias_of(cfg, *ATTENTION_NAMES, architecture=name)
        return mixture_verified(self, cfg, out | {"attention_bias": biases})
