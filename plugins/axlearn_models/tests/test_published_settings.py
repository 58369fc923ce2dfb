"""``config.json`` as published with the weights gives the catalog's member, or is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from published_settings import PUBLISHED

from axcore import experiments
from axcore.checkpoint.convert import load_family
from axcore.checkpoint.convert._rules import applications, match_tensors
from axcore.checkpoint.convert._source import TensorInfo
from axcore.errors import AxcoreError, CheckpointError
from axcore.layers import Attention, RMSNorm, StackedTransformer
from axcore.module import flatten_specs
from axcore.ops.masks import Causal, PrefixLM, SlidingWindow
from axcore.plugins import host
from axlearn_rope import LinearScaling, RoPE


def lines_of(cfg) -> dict[str, str]:
    """Everything of a model that is not about its initial values or how it is computed."""
    lines = cfg.model.lines()
    for path, heads in cfg.model.find(Attention.Config).items():
        head_dim = heads.head_dim or cfg.model.model_dim // heads.num_heads
        lines[f"{path}.head_dim"] = repr(head_dim)
        lines[f"{path}.num_kv_heads"] = repr(heads.num_kv_heads or heads.num_heads)
    left_out = ("compute_dtype", "max_seq_len")
    return {path: value for path, value in lines.items() if not path.endswith(left_out)}


def settings_of(name: str) -> dict[str, Any]:
    settings = dict(PUBLISHED[name][1])
    if name == "phi3-mini-128k":
        (rope,) = experiments.get(name).model.find(RoPE.Config).values()
        factors = {key: list(getattr(rope.scaling, key)) for key in ("short_factor", "long_factor")}
        settings["rope_scaling"] = {"type": "su", **factors}
    return settings


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_give_the_member(name):
    family = load_family(PUBLISHED[name][0])
    cfg = family.config(settings_of(name), {})
    assert lines_of(cfg) == lines_of(experiments.get(name))
    limit = "n_positions" if name.startswith("gpt2") else "max_position_embeddings"
    assert cfg.model.max_seq_len == settings_of(name)[limit]


REFUSED = {
    "qwen3-30B-A3B": [{"decoder_sparse_step": 2}, {"mlp_only_layers": [0]}],
    "mixtral-8x7B": [{"num_experts_per_tok": "2"}, {"sliding_window": "4096"}],
    "olmoe-1B-7B": [{"clip_qkv": 8.0}],
    "gpt-oss-20B": [
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"layer_types": ["chunked_attention"] * 24},
        {"surprise": 1},
    ],
    "deepseek-V3": [
        {"quantization_config": {"quant_method": "fp8"}},
        {"scoring_func": "softmax"},
        {"topk_method": "greedy"},
        {"surprise": 1},
        {"attention_bias": True},
    ],
    "gpt2-124M": [
        {"scale_attn_by_inverse_layer_idx": True},
        {"add_cross_attention": True},
        {"activation_function": "tanh"},
        {"n_inner": "3072"},
    ],
    "mistral-7B-v0.1": [
        {"hidden_act": "gelu"},
        {"attention_dropout": 0.1},
        {"num_experts": 8},
        {"sliding_window": "4096"},
    ],
    "gemma2-2B": [
        {"use_bidirectional_attention": True},
        {"attention_bias": True},
        {"tie_word_embeddings": False},
        {"partial_rotary_factor": 0.5},
        {"sliding_window": None},
        {"final_logit_softcapping": "30"},
        {"layer_types": ["chunked_attention"] * 26},
    ],
    "gemma3-1B": [
        {"attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": True},
        {"layer_types": ["full_attention"] * 25},
        {"layer_types": [["full_attention"]] * 26},
        {"rope_local_base_freq": "10000"},
        {"surprise": 1},
    ],
    "olmo2-7B": [{"clip_qkv": 8.0}, {"rope_scaling": {"rope_type": "mystery"}}],
    "phi3-mini-4k": [{"resid_pdrop": 0.1}, {"rope_scaling": {"type": "yarn", "factor": 4.0}}],
    "phi3-mini-128k": [{"rope_scaling": ["su"]}, {"sliding_window": 0.5}],
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(name, change, id=f"{name}-{next(iter(change))}")
        for name, changes in REFUSED.items()
        for change in changes
    ],
)
def test_what_is_not_implemented_is_refused_by_name(name, change):
    with pytest.raises(AxcoreError) as caught:
        load_family(PUBLISHED[name][0]).config({**settings_of(name), **change}, {})
    assert caught.value.code in ("AX614", "AX386")
    named = [*change, "rope_type", "'type'"]
    assert any(part in str(caught.value) for part in named)


def edited(name: str, edit: Callable[[Any], Any]) -> Any:
    cfg = experiments.get(name)
    edit(cfg.model)
    return cfg


def first(kind: Any, **fields: Any) -> Callable[[Any], Any]:
    """Sets fields of the first config of a kind."""
    return lambda model: next(iter(model.find(kind).values())).set(**fields)


UNSAYABLE = {
    "gpt2": first(Attention.Config, logit_cap=5.0),
    "mistral": first(Attention.Config, mask=PrefixLM(4) & SlidingWindow(8)),
    "gemma2": first(Attention.Config, mask=Causal() & SlidingWindow(4, 4)),
    "gemma3": lambda model: model.embedding.set(embedding_scale=1.0),
    "olmo2": lambda model: model.decoder.layer.set(attention_norm=RMSNorm.Config()),
    "phi3": first(Attention.Config, head_dim=8),
}


@pytest.mark.parametrize("family", UNSAYABLE)
def test_what_a_foreign_config_cannot_say_is_not_exported(family):
    name = next(name for name in PUBLISHED if name.startswith(family))
    cfg = edited(f"{family}-test", UNSAYABLE[family])
    with pytest.raises(CheckpointError) as caught:
        load_family(PUBLISHED[name][0]).foreign_config(cfg)
    assert caught.value.code == "AX622"


def test_layers_that_differ_otherwise_are_not_exported():
    cfg = experiments.get("gemma3-test")
    cfg.model.decoder.layer[1].feed_forward.set(activation="silu")
    with pytest.raises(CheckpointError, match=r"layer\.1\.feed_forward\.activation"):
        load_family("hf:Gemma3ForCausalLM").foreign_config(cfg)


def test_gemma_3_reads_both_forms_of_rotary_settings():
    family = load_family("hf:Gemma3ForCausalLM")
    old = settings_of("gemma3-1B") | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {name: value for name, value in old.items() if not name.startswith("rope")}
    new["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
    }
    read = [family.config(settings, {}) for settings in (old, new)]
    assert read[0].model == read[1].model
    ropes = [layer.find(RoPE.Config) for layer in read[0].model.decoder.layer]
    found = [next(iter(rope.values())) for rope in ropes]
    assert [rope.base for rope in found] == [10_000.0] * 5 + [1_000_000.0]
    assert [rope.scaling for rope in found] == [None] * 5 + [LinearScaling(factor=8.0)]


def test_gpt2s_first_files_lack_the_prefix_and_hold_the_mask():
    family, cfg = load_family("hf:GPT2LMHeadModel"), experiments.get("gpt2-test")
    cfg.model.decoder.set(stack=StackedTransformer.Config())
    model = cfg.instantiate(name="trainer").model
    params = {path: spec.shape for path, spec in flatten_specs(model.parameter_specs()).items()}
    shapes: dict[str, tuple[int, ...]] = {"h.0.attn.bias": (1, 1, 64, 64)}
    for item in applications(family.rules(cfg), params):
        foreign = item.transform.foreign_shapes(item.shapes)
        names = (name.removeprefix("transformer.") for name in item.foreign)
        shapes |= dict(zip(names, foreign, strict=True))
    infos = {n: TensorInfo(n, s, "float32", 4 * int(np.prod(s)), "f") for n, s in shapes.items()}
    found = match_tensors(family.rules(cfg), params, infos)
    assert {path for item in found.applications for path in item.paths} == set(params)
    assert list(found.ignored) == ["h.0.attn.bias"]
    assert shapes["h.1.attn.c_attn.weight"] == (64, 3 * 64)


def families_that_say(name: str) -> list[str]:
    """The architectures among which an export that names no family must choose."""
    fitting = []
    for converter in host().converters.names():
        if converter.startswith("hf:"):
            family = load_family(converter)
            # Whatever a family cannot say it refuses, and does not stumble over.
            with contextlib.suppress(CheckpointError):
                family.foreign_config(experiments.get(name))
                fitting.append(family)
    able = {family.architecture for family in fitting}
    return [f.architecture for f in fitting if able.isdisjoint(f.yields_to)]


def test_every_test_member_is_exported_as_one_architecture():
    catalog = host().experiments
    members = [n for n in catalog.names() if "-test" in n and catalog.owner(n) == "axlearn-models"]
    found = {name: families_that_say(name) for name in members if not name.startswith("t5")}
    assert {name: said for name, said in found.items() if len(said) != 1} == {}
    assert found["fuji-test-v2"] == found["smollm2-test"] == ["LlamaForCausalLM"]
    assert found["gemma3-test"] == ["Gemma3ForCausalLM"]
