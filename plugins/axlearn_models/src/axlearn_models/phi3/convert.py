"""Published weights of Phi-3-mini and -medium: Hugging Face's files, both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import (
    Fused,
    ModelFamily,
    Rule,
    Settings,
    TensorInfo,
    TensorRule,
    TorchLinear,
)
from axcore.train import Trainer
from axlearn_models._export import layers_to_say, rules_without, verified
from axlearn_models._hugging_face import (
    check_all_read,
    given,
    llama_like_from,
    llama_like_to,
    settings_of,
)
from axlearn_models._llama_like import attention_of
from axlearn_models._windows import causal_within, without_window

__all__ = ["HuggingFacePhi3"]


class HuggingFacePhi3(ModelFamily):
    """``Phi3ForCausalLM``: Llama's layers; one tensor for queries, keys, values, one for gate, up.

    Here they are apart: a tensor is cut in three, or in two.
    """

    architecture = "Phi3ForCausalLM"
    yields_to = ("LlamaForCausalLM", "MistralForCausalLM")

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "phi3")
        settings.expect("resid_pdrop", 0, default=0)
        settings.expect("embd_pdrop", 0, default=0)
        for name in ("rope_parameters", "rope_scaling"):
            rope = given(settings, name, Mapping, Settings({}))
            for kind in ("rope_type", "type"):
                rope.expect(kind, "default", "longrope", "su", default="default")
        # Read with LongRoPE, and of no meaning without; the other names code that is never run.
        settings.skip("original_max_position_embeddings", "auto_map")
        cfg = llama_like_from(settings, experiments.get("phi3-mini-4k"))
        window = given(settings, "sliding_window", int, None)
        attention_of(cfg).set(mask=causal_within(window, settings["max_position_embeddings"]))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        layer, ours = "model.layers.{i}", "decoder/layer/{i}"
        qkv = [f"{ours}/attention/qkv/{name}/weight" for name in ("query", "key", "value")]
        gate_up = [f"{ours}/feed_forward/{name}/weight" for name in ("gate", "up")]
        return [
            *rules_without(*qkv, *gate_up),
            TensorRule(
                f"{layer}.self_attn.qkv_proj.weight", tuple(qkv), Fused(TorchLinear(), axis=0)
            ),
            TensorRule(
                f"{layer}.mlp.gate_up_proj.weight", tuple(gate_up), Fused(TorchLinear(), axis=0)
            ),
        ]

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        layers_to_say(cfg, self.architecture)
        plain = cfg.copy()
        window = without_window(attention_of(plain))
        out = llama_like_to(plain, architecture=self.architecture, model_type="phi3")
        del out["head_dim"]  # always the model's share there
        # Left out they would be tokens of a vocabulary of 32,064.
        out |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return verified(self, cfg, out | {"sliding_window": window})
