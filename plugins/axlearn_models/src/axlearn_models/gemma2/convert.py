"""Published weights of Gemma 2: Hugging Face's files, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import ModelFamily, Rule, TensorInfo
from axcore.train import Trainer
from axlearn_models._export import verified
from axlearn_models._gemma import rope_of_layer
from axlearn_models._gemma_files import gemma_from, gemma_rules, gemma_to, rope_from
from axlearn_models._hugging_face import check_all_read, settings_of
from axlearn_models._llama_like import layers_of
from axlearn_rope import rope_to_hf

__all__ = ["HuggingFaceGemma2"]


class HuggingFaceGemma2(ModelFamily):
    """``Gemma2ForCausalLM``: local and global layers rotate alike."""

    architecture = "Gemma2ForCausalLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "gemma2")
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
        cfg = gemma_from(settings, experiments.get("gemma2-2B"), period=2, caps=caps)
        rope = rope_from(settings)
        settings.skip("rope_theta", "rope_scaling")
        for layer in layers_of(cfg):
            rope_of_layer(layer).set(base=rope.base, scaling=rope.scaling)
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        return gemma_rules()

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        out = gemma_to(cfg, architecture=self.architecture, model_type="gemma2")
        rope = rope_to_hf(rope_of_layer(layers_of(cfg)[0]))
        return verified(self, cfg, out | rope)
