"""Published weights of Qwen1.5's and Qwen2's mixtures: Hugging Face's files, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import ModelFamily, Rule, TensorInfo, TensorRule, TorchLinear
from axcore.layers import FeedForward
from axcore.train import Trainer
from axlearn_models._hugging_face import (
    QKV_NAMES,
    bias_of,
    cannot_say,
    check_all_read,
    given,
    set_bias,
    settings_of,
)
from axlearn_models._mixture import mixtures_of
from axlearn_models._mixture_files import (
    EXPERT_NAMES,
    mixture_from,
    mixture_rules,
    mixture_to,
    mixture_verified,
    mixtures_to_say,
)

__all__ = ["HuggingFaceQwen2MoE"]

_NAMES = {"width": "moe_intermediate_size", "normalize": "norm_topk_prob"}


class HuggingFaceQwen2MoE(ModelFamily):
    """``Qwen2MoeForCausalLM``: Qwen2's attention; mixtures with a shared expert and its gate."""

    architecture = "Qwen2MoeForCausalLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "qwen2_moe")
        settings.expect("decoder_sparse_step", 1, default=1)
        cfg = mixture_from(settings, experiments.get("qwen1.5-MoE-A2.7B"), **_NAMES)
        shared = settings.require("shared_expert_intermediate_size", int)
        for moe in mixtures_of(cfg):
            moe.shared_experts.set(hidden_dim=shared)
        set_bias(cfg, *QKV_NAMES, bias=given(settings, "qkv_bias", bool, True))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        foreign, ours = "model.layers.{i}.mlp", "decoder/layer/{i}/feed_forward"
        names = {f"shared_experts/{our}": f"shared_expert.{n}" for our, n in EXPERT_NAMES.items()}
        names["shared_gate"] = "shared_expert_gate"
        return [
            *mixture_rules(),
            *(
                TensorRule(f"{foreign}.{name}.weight", f"{ours}/{our}/weight", TorchLinear())
                for our, name in names.items()
            ),
        ]

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        name = self.architecture
        mixtures_to_say(cfg, name)
        shared = mixtures_of(cfg)[0].shared_experts
        if type(shared) is not FeedForward.Config or not isinstance(shared.hidden_dim, int):
            raise cannot_say("no shared expert of a given width", name)
        out = mixture_to(cfg, architecture=name, model_type="qwen2_moe", **_NAMES)
        del out["head_dim"]  # always the model's share there
        more = {
            "shared_expert_intermediate_size": shared.hidden_dim,
            "qkv_bias": bias_of(cfg, *QKV_NAMES, architecture=name),
            "use_sliding_window": False,
            "mlp_only_layers": [],
        }
        return mixture_verified(self, cfg, out | more)
