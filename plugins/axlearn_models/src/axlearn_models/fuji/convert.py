"""Published weights of Llama: Hugging Face's files both ways, GGUF in.

GGUF files of the architecture ``llama`` hold the two halves of a rotary pair side by side in the
rows of queries and keys; Hugging Face's hold them half a head apart, as this catalog does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore import experiments
from axcore.checkpoint.convert import (
    ModelFamily,
    PairsToHalves,
    Rule,
    TensorInfo,
    TensorRule,
    TorchLinear,
)
from axcore.errors import CheckpointError
from axcore.layers import LMHead
from axcore.train import Trainer
from axlearn_models._export import verified
from axlearn_models._hugging_face import (
    ATTENTION_NAMES,
    FEED_FORWARD_NAMES,
    bias_of,
    check_all_read,
    given,
    llama_like_from,
    llama_like_rules,
    llama_like_to,
    set_bias,
    settings_of,
)
from axlearn_models._llama_like import initialized, normalized, resized, rope_of

__all__ = ["GGUFLlama", "HuggingFaceLlama"]


class HuggingFaceLlama(ModelFamily):
    """``LlamaForCausalLM``: Llama 1 to 3.2, SmolLM2, and whoever else publishes in its form."""

    architecture = "LlamaForCausalLM"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("model_type", "llama")
        cfg = llama_like_from(settings, experiments.get("fuji-7B-v2"))
        set_bias(cfg, *ATTENTION_NAMES, bias=given(settings, "attention_bias", bool, False))
        set_bias(cfg, *FEED_FORWARD_NAMES, bias=given(settings, "mlp_bias", bool, False))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        return llama_like_rules()

    def foreign_config(self, cfg: Trainer.Config) -> dict[str, Any]:
        """See :meth:`ModelFamily.foreign_config`."""
        name = self.architecture
        out = llama_like_to(cfg, architecture=name, model_type="llama")
        biases = {
            "attention_bias": bias_of(cfg, *ATTENTION_NAMES, architecture=name),
            "mlp_bias": bias_of(cfg, *FEED_FORWARD_NAMES, architecture=name),
        }
        return verified(self, cfg, out | biases)


class GGUFLlama(ModelFamily):
    """GGUF files of the architecture ``llama``, without rotary scaling."""

    architecture = "llama"

    def config(self, foreign: Mapping[str, Any], infos: Mapping[str, TensorInfo]) -> Trainer.Config:
        """See :meth:`ModelFamily.config`."""
        settings = settings_of(foreign)
        settings.expect("general.architecture", "llama")
        settings.expect("llama.rope.scaling.type", "none", default="none")
        settings.expect("llama.expert_count", 0, default=0)
        settings.skip(*(name for name in settings if name.startswith(("general.", "GGUF."))))
        if "rope_freqs.weight" in infos:
            raise CheckpointError(
                "the file scales its rotary frequencies with the tensor 'rope_freqs.weight', "
                "which is not implemented for GGUF",
                code="AX614",
                hint="convert the safetensors of the same model, whose config.json says how",
            )
        num_heads = settings.require("llama.attention.head_count", int)
        head_dim = given(settings, "llama.rope.dimension_count", int, None)
        for width in ("llama.attention.key_length", "llama.attention.value_length"):
            settings.expect(width, head_dim, default=head_dim)
        embedding = infos.get("token_embd.weight")
        cfg = resized(
            experiments.get("fuji-7B-v2"),
            vocab_size=embedding.shape[0] if embedding else settings.require("llama.vocab_size"),
            model_dim=settings.require("llama.embedding_length", int),
            num_layers=settings.require("llama.block_count", int),
            hidden_dim=settings.require("llama.feed_forward_length", int),
            num_heads=num_heads,
            num_kv_heads=given(settings, "llama.attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
        )
        settings.skip("llama.vocab_size")
        tied = "output.weight" not in infos
        limit = settings.require("llama.context_length", int)
        cfg.model.set(
            compute_dtype=None, max_seq_len=limit, lm_head=None if tied else LMHead.Config()
        )
        cfg.set(seq_len=min(cfg.seq_len, limit))
        initialized(cfg, stddev=0.02)
        # Stored as float32: the shortest decimal that gives it back.
        eps = settings.require("llama.attention.layer_norm_rms_epsilon", float)
        normalized(cfg, eps=float(f"{eps:.7g}"))
        rope_of(cfg).set(base=given(settings, "llama.rope.freq_base", float, 10_000.0))
        check_all_read(settings)
        return cfg

    def rules(self, cfg: Trainer.Config) -> Sequence[Rule]:
        """See :meth:`ModelFamily.rules`."""
        block, ours = "blk.{i}", "decoder/layer/{i}"
        plain, pairs = TorchLinear(), PairsToHalves(TorchLinear())
        matrices = {
            "attn_q": ("attention/qkv/query", pairs),
            "attn_k": ("attention/qkv/key", pairs),
            "attn_v": ("attention/qkv/value", plain),
            "attn_output": ("attention/output", TorchLinear(num_in=2)),
            "ffn_up": ("feed_forward/up", plain),
            "ffn_gate": ("feed_forward/gate", plain),
            "ffn_down": ("feed_forward/down", plain),
        }
        return [
            TensorRule("token_embd.weight", "embedding/weight"),
            TensorRule(f"{block}.attn_norm.weight", f"{ours}/attention_norm/scale"),
            TensorRule(f"{block}.ffn_norm.weight", f"{ours}/feed_forward_norm/scale"),
            TensorRule("output_norm.weight", "decoder/final_norm/scale"),
            TensorRule("output.weight", "lm_head/weight", TorchLinear()),
            *(
                TensorRule(f"{block}.{name}.weight", f"{ours}/{path}/weight", layout)
                for name, (path, layout) in matrices.items()
            ),
        ]
