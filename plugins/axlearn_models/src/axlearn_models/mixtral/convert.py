"""Published weights of Mixtral: Hugging Face's files, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import ModelFamily, Rule, TensorInfo
from axcore.train import Trainer
from axlearn_models._hugging_face import check_all_read, given, settings_of
from axlearn_models._llama_like import attention_of
from axlearn_models._mixture import mixtures_of
from axlearn_models._mixture_files import (
    mixture_from,
    mixture_rules,
    mixture_to,
    mixture_verified,
    mixtures_to_say,
)
from axlearn_models._windows import causal_within, without_window

__all__ = ["HuggingFaceMixtral"]


class HuggingFaceMixtral(ModelFamily):
    """``MixtralForCausalLM``: Mistral's attention; every layer a mixture with weights of sum 1."""

    architecture = "MixtralForCausalLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "mixtral")
        cfg = mixture_from(settings, experiments.get("mixtral-8x7B"))
        window = given(settings, "sliding_window", int, None)
        attention_of(cfg).set(mask=causal_within(window, settings["max_position_embeddings"]))
        for moe in mixtures_of(cfg):
            moe.router.set(jitter=given(settings, "router_jitter_noise", float, 0.0))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        return mixture_rules({"gate": "w1", "down": "w2", "up": "w3"}, block="block_sparse_moe")

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        name, plain = self.architecture, cfg.copy()
        mixtures_to_say(cfg, name)
        window = without_window(attention_of(plain))
        out = mixture_to(plain, architecture=name, model_type="mixtral", count="num_local_experts")
        more = {
            "sliding_window": window,
            "router_jitter_noise": mixtures_of(cfg)[0].router.jitter,
        }
        return mixture_verified(self, cfg, out | more)
