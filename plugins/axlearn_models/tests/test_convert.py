"""Converters: settings and tensors survive a round trip; what is not implemented is refused."""

from __future__ import annotations

import numpy as np
import pytest

from axcore import experiments
from axcore.checkpoint.convert import load_family
from axcore.checkpoint.convert._rules import match_tensors
from axcore.checkpoint.convert._source import TensorInfo
from axcore.config import scaled
from axcore.errors import AxcoreError, CheckpointError
from axcore.layers import Attention, LayerNorm, LearnedPositions, LMHead
from axcore.ops.masks import SlidingWindow
from axlearn_rope import DynamicNTKScaling, LinearScaling, NTKScaling, RoPE, YaRNScaling

LLAMA = "hf:LlamaForCausalLM"
FAMILIES = {
    "fuji": LLAMA,
    "smollm2": LLAMA,
    "qwen2.5": "hf:Qwen2ForCausalLM",
    "qwen3": "hf:Qwen3ForCausalLM",
    "gpt2": "hf:GPT2LMHeadModel",
    "mistral": "hf:MistralForCausalLM",
    "gemma2": "hf:Gemma2ForCausalLM",
    "gemma3": "hf:Gemma3ForCausalLM",
    "olmo2": "hf:Olmo2ForCausalLM",
    "phi3": "hf:Phi3ForCausalLM",
    "mixtral": "hf:MixtralForCausalLM",
    "olmoe": "hf:OlmoeForCausalLM",
    "gpt-oss": "hf:GptOssForCausalLM",
}
MEMBERS = {
    name: family
    for prefix, family in FAMILIES.items()
    for name in experiments.names()
    if name.startswith(f"{prefix}-")
}
MEMBERS |= dict.fromkeys(("deepseek-V3", "deepseek-V3-test"), "hf:DeepseekV3ForCausalLM")
MEMBERS["deepseek-V2"] = "hf:DeepseekV2ForCausalLM"
MEMBERS |= dict.fromkeys(
    ("qwen3-30B-A3B", "qwen3-235B-A22B", "qwen3-moe-test"), "hf:Qwen3MoeForCausalLM"
)
MEMBERS |= dict.fromkeys(
    ("qwen1.5-MoE-A2.7B", "qwen2-57B-A14B", "qwen2-moe-test"), "hf:Qwen2MoeForCausalLM"
)

# config.json of HuggingFaceTB/SmolLM2-135M: another program's file, with settings of its own.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 1 / 24,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 49152,
}


def model_lines(cfg) -> dict[str, str]:
    """What a foreign config must say: all of the model but how it is computed."""
    lines = cfg.model.lines()
    for path, heads in cfg.model.find(Attention.Config).items():
        head_dim = heads.head_dim or cfg.model.model_dim // heads.num_heads
        lines[f"{path}.head_dim"] = repr(head_dim)
        lines[f"{path}.num_kv_heads"] = repr(heads.num_kv_heads or heads.num_heads)
    left_out = ("compute_dtype", "max_seq_len", "weight_init")
    return {path: value for path, value in lines.items() if not path.endswith(left_out)}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_survives_the_way_through_foreign_settings(name):
    family, cfg = load_family(MEMBERS[name]), experiments.get(name)
    back = family.config(family.foreign_config(cfg), {})
    assert model_lines(back) == model_lines(cfg)
    assert back.model.max_seq_len == cfg.seq_len


def test_published_settings_give_the_member_of_the_catalog():
    cfg = load_family(LLAMA).config(SMOLLM2, {})
    ours = experiments.get("smollm2-135M")
    assert model_lines(cfg) == model_lines(ours)
    assert cfg.model.embedding.weight_init == ours.model.embedding.weight_init
    assert cfg.model.max_seq_len == 8192


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"rope_interleaved": True},
        {"rope_scaling": {"type": "ntk", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0, "surprise": 1}},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"attention_dropout": 0.1},
        {"use_sliding_window": True, "sliding_window": 128},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"final_logit_softcapping": 30.0},
        {"vocab_size": "49152"},
        {"tie_word_embeddings": "false"},
        {"rope_theta": "abc"},
        {"rope_scaling": ["linear"]},
        {"model_type": "mistral"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_implemented_is_refused_by_name(change):
    with pytest.raises(AxcoreError) as caught:
        load_family(LLAMA).config({**SMOLLM2, **change}, {})
    named = [*change, "surprise", "rope_type", "low_freq_factor"]
    assert caught.value.code in ("AX614", "AX386")
    assert any(name in str(caught.value) for name in named)


def test_a_missing_setting_is_named():
    settings = {name: value for name, value in SMOLLM2.items() if name != "rms_norm_eps"}
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        load_family(LLAMA).config(settings, {})


def test_biases_are_read_where_the_settings_say_so():
    cfg = load_family(LLAMA).config({**SMOLLM2, "attention_bias": True, "mlp_bias": True}, {})
    layer = cfg.model.decoder.layer
    assert layer.attention.qkv.query.bias
    assert layer.attention.output.bias
    assert layer.feed_forward.down.bias
    assert load_family(LLAMA).foreign_config(cfg)["mlp_bias"] is True


@pytest.mark.parametrize(
    "scaling",
    [
        LinearScaling(factor=4.0),
        DynamicNTKScaling(factor=2.0, original_max_seq_len=8192),
        YaRNScaling(factor=4.0, original_max_seq_len=2048, beta_fast=16.0, truncate=False),
    ],
    ids=lambda scaling: type(scaling).__name__,
)
def test_rotary_scaling_survives_the_way_through_foreign_settings(scaling):
    family, cfg = load_family(LLAMA), experiments.get("fuji-8B-v3")
    cfg.model.decoder.layer.attention.query_key_transform.set(scaling=scaling)
    back = family.config(family.foreign_config(cfg), {})
    assert back.model.decoder.layer.attention.query_key_transform.scaling == scaling


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("decoder.layer.attention.mask", SlidingWindow(16)),
        ("decoder.layer.attention.logit_cap", 50.0),
        ("decoder.layer.attention.query_key_transform", RoPE.Config(pairing="interleaved")),
        ("decoder.layer.attention.query_key_transform.scaling", NTKScaling(factor=2.0)),
        ("decoder.layer.attention.qkv.query.bias", True),
        ("decoder.layer.feed_forward.activation", "gelu"),
        ("decoder.final_norm.eps", 1e-3),
        ("embedding.embedding_scale", 8.0),
        ("lm_head", LMHead.Config(logit_cap=30.0)),
        ("position", LearnedPositions.Config()),
        ("decoder.layer.attention_norm", LayerNorm.Config()),
        ("decoder.layer.feed_forward.hidden_dim", scaled(4, of="input_dim")),
        ("decoder.layer.attention.query_key_transform", None),
    ],
    ids=lambda value: value.rsplit(".", 1)[-1] if isinstance(value, str) else "",
)
def test_what_a_foreign_config_cannot_say_is_not_exported(path, value):
    cfg = experiments.get("fuji-test-v2")
    cfg.model.set_path(path, value)
    with pytest.raises(CheckpointError) as caught:
        load_family(LLAMA).foreign_config(cfg)
    assert caught.value.code == "AX622"


def test_one_family_s_model_is_not_written_as_another_s():
    for member, names in {
        "fuji-test-v2": ("hf:Qwen2ForCausalLM", "hf:Qwen3ForCausalLM"),
        "qwen2.5-test": (LLAMA, "hf:Qwen3ForCausalLM"),
        "qwen3-test": (LLAMA, "hf:Qwen2ForCausalLM"),
    }.items():
        for name in names:
            with pytest.raises(CheckpointError, match="cannot express"):
                load_family(name).foreign_config(experiments.get(member))


@pytest.mark.parametrize(
    ("member", "name"),
    [
        ("fuji-test-v1", LLAMA),
        ("smollm2-test", "gguf:llama"),
        ("qwen2.5-test", "hf:Qwen2ForCausalLM"),
        ("qwen3-test", "hf:Qwen3ForCausalLM"),
        ("glassllm", "npz:glassllm"),
    ],
)
def test_every_parameter_has_one_tensor_and_comes_back_from_it(member, name, of_config):
    family = load_family(name)
    model = of_config(experiments.get(member), family)
    arrays = model.foreign(model.params)
    infos = {n: TensorInfo(n, a.shape, "float32", a.nbytes, "f") for n, a in arrays.items()}
    shapes = {
        path: shape
        for a in model.applications
        for path, shape in zip(a.paths, a.shapes, strict=True)
    }
    found = match_tensors(family.rules(model.cfg), shapes, infos)
    assert len(arrays) == len(shapes)
    for item in found.applications:
        back = item.transform.to_ours([arrays[n] for n in item.foreign], item.shapes)
        again = item.transform.to_foreign(back)
        for n, array in zip(item.foreign, again, strict=True):
            np.testing.assert_array_equal(array, arrays[n])


def test_dropout_of_attention_weights_is_left_out_aloud(caplog):
    family = load_family("hf:GPT2LMHeadModel")
    settings = family.foreign_config(experiments.get("gpt2-test"))
    family.config(settings, {})
    assert not caplog.records
    family.config({**settings, "attn_pdrop": 0.1}, {})
    assert "attn_pdrop = 0.1 is left out" in caplog.text
