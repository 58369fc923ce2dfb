"""Mixtures of experts against transformers on random tiny models, both directions."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from axcore import experiments
from axcore.checkpoint import stack_form
from axcore.checkpoint.convert import load_family
from axcore.config import apply_modifier
from axcore.errors import CheckpointError
from axcore.inference import Generator, load_model
from axlearn_moe import MoEModifier

IDS = np.random.default_rng(1).integers(3, 96, (2, 24))
SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=3,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
DEEPSEEK = dict(
    num_key_value_heads=4,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    intermediate_size=48,
    moe_intermediate_size=24,
    n_routed_experts=8,
    n_shared_experts=2,
    routed_scaling_factor=1.5,
    kv_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=10_000.0,
        factor=4.0,
        original_max_position_embeddings=16,
        mscale=0.8,
        mscale_all_dim=0.8,
    ),
)
# Family -> what its settings add to SIZES.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": dict(num_experts=6, moe_intermediate_size=24, head_dim=16, norm_topk_prob=True),
    "Mixtral": dict(num_local_experts=6, sliding_window=8),
    "Olmoe": dict(num_experts=6),
    "Qwen2Moe": dict(num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=40),
    "GptOss": dict(
        num_local_experts=6,
        head_dim=16,
        sliding_window=8,
        num_hidden_layers=3,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=10_000.0,
            factor=4.0,
            original_max_position_embeddings=16,
            truncate=False,
        ),
    ),
    "DeepseekV3": DEEPSEEK | dict(q_lora_rank=20, n_group=4, topk_group=2),
    "DeepseekV2": DEEPSEEK
    | dict(q_lora_rank=None, topk_method="group_limited_greedy", n_group=4, topk_group=2),
}
# What published models of a family have otherwise: the gates' sum, groups, a query's low rank.
OTHERWISE = {
    "qwen3-gates-as-they-are": ("Qwen3Moe", dict(norm_topk_prob=False)),
    "olmoe-gates-sum-to-one": ("Olmoe", dict(norm_topk_prob=True)),
    "qwen2-gates-sum-to-one": ("Qwen2Moe", dict(norm_topk_prob=True, qkv_bias=False)),
    "deepseek-v2-low-rank-queries": ("DeepseekV2", dict(q_lora_rank=20)),
    "deepseek-v2-greedy": ("DeepseekV2", dict(topk_method="greedy", n_group=1, topk_group=1)),
    "deepseek-v3-gates-as-they-are": ("DeepseekV3", dict(norm_topk_prob=False, q_lora_rank=None)),
}
MEMBERS = {
    "qwen3-moe-test": "Qwen3Moe",
    "mixtral-test": "Mixtral",
    "olmoe-test": "Olmoe",
    "qwen2-moe-test": "Qwen2Moe",
    "gpt-oss-test": "GptOss",
    "deepseek-V3-test": "DeepseekV3",
}


def in_files(name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Names and values in files of what transformers holds as one array in memory."""
    if (found := re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)) is None:
        yield name, array
        return
    parts = [("down_proj", array)]
    if found[2] == "gate_up_proj":
        parts = list(zip(("gate_proj", "up_proj"), np.split(array, 2, axis=1), strict=True))
    for part, experts in parts:
        for i, expert in enumerate(experts):
            yield f"{found[1]}.{i}.{part}.weight", expert


def as_mixtral(name: str) -> str:
    name = name.replace(".mlp.", ".block_sparse_moe.")
    for ours, theirs in {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}.items():
        name = name.replace(ours, theirs) if ".experts." in name else name
    return name


def gradients_in_files(model: Any) -> Mapping[str, np.ndarray]:
    found = {
        file: part
        for name, p in model.named_parameters()
        for file, part in in_files(name, p.grad.numpy())
    }
    if type(model).__name__.startswith("GptOss"):  # written as they are held
        return {name: p.grad.numpy() for name, p in model.named_parameters()}
    if type(model).__name__.startswith("Mixtral"):
        return {as_mixtral(name): part for name, part in found.items()}
    return found


@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
@pytest.mark.parametrize("family", MODELS)
def test_an_imported_mixture_computes_the_same(
    family, random_model, read_model, close, close_gradients
):
    import torch

    settings = SIZES | MODELS[family]
    theirs, directory = random_model(f"{family}ForCausalLM", f"{family}Config", **settings)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.cos(torch.arange(buffer.numel())))
            theirs.save_pretrained(directory)
    ours = read_model(directory)
    tokens = torch.from_numpy(IDS)
    logits = theirs(tokens).logits
    close(ours.logits(IDS), logits.detach().numpy())

    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    our_loss, gradients = ours.gradients(IDS)
    assert our_loss == pytest.approx(loss.item(), rel=1e-5)
    expected = gradients_in_files(theirs)
    for name in [name for name in gradients if name.endswith("e_score_correction_bias")]:
        assert not gradients.pop(name).any()  # a state
    close_gradients(gradients, expected)

    prompt = IDS[0, :7].tolist()
    generated = Generator(ours.model, ours.params, max_seq_len=64).generate([prompt], 8)
    sequence = theirs.generate(tokens[:1, :7], max_new_tokens=8, do_sample=False)
    assert generated.tokens[0] == sequence[0, 7:].tolist()


@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
@pytest.mark.parametrize("case", OTHERWISE)
def test_settings_that_differ_within_a_family_compute_the_same(
    case, random_model, read_model, close
):
    import torch

    family, changes = OTHERWISE[case]
    settings = SIZES | MODELS[family] | changes
    theirs, directory = random_model(f"{family}ForCausalLM", f"{family}Config", **settings)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(IDS)).logits.numpy()
    close(read_model(directory).logits(IDS), logits)


@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
@pytest.mark.parametrize("member", MEMBERS)
def test_an_exported_mixture_computes_the_same(
    member, transformers, of_config, write_model, close, tmp_path
):
    import torch

    name = f"{MEMBERS[member]}ForCausalLM"
    ours = of_config(experiments.get(member), load_family(f"hf:{name}"))
    directory = write_model(ours, tmp_path / "exported")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, local_files_only=True
    )
    assert type(theirs).__name__ == name
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        logits = theirs.eval()(torch.from_numpy(IDS)).logits.numpy()
    close(ours.logits(IDS), logits)


@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
@pytest.mark.parametrize("family", MODELS)
def test_a_mixture_goes_in_and_comes_out_with_the_same_bits(family, transformers, cli, tmp_path):
    import torch

    config = getattr(transformers, f"{family}Config")(**SIZES | MODELS[family])
    torch.manual_seed(0)
    first = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    first.save_pretrained(tmp_path / "first", max_shard_size="20KB")  # experts in several files

    done = cli("convert", tmp_path / "first", "--out", tmp_path / "ours", "--verify", "always")
    assert done["max_abs_logit_difference"] < 1e-4
    report = json.loads((tmp_path / "ours" / "conversion.json").read_text())
    assert not report["settings_unread"]

    cli("convert", tmp_path / "ours", "--export", "hf", "--out", tmp_path / "last")
    auto = transformers.AutoModelForCausalLM
    last = auto.from_pretrained(tmp_path / "last", local_files_only=True)
    assert type(last) is type(first)
    weights = last.state_dict()
    assert set(weights) == set(first.state_dict())
    for name, weight in first.state_dict().items():
        assert torch.equal(weights[name], weight), name
    tokens = torch.from_numpy(IDS)
    with torch.no_grad():  # the settings came back, too
        torch.testing.assert_close(last.eval()(tokens).logits, first(tokens).logits)


def test_biases_of_the_choice_are_states_that_convert(of_config, write_model, cli, tmp_path):
    pytest.importorskip("safetensors", reason="files: pip install 'axcore[convert]'")
    family = load_family("hf:DeepseekV3ForCausalLM")
    ours = of_config(experiments.get("deepseek-V3-test"), family)
    directory = write_model(ours, tmp_path / "theirs")
    cli("convert", directory, "--out", tmp_path / "ours", "--verify", "never")
    loaded = stack_form.flatten(load_model(tmp_path / "ours").state)
    path = "decoder/layer/1:3:1/feed_forward/router/choice_bias"
    expected = [
        ours.params["decoder"]["layer"][i]["feed_forward"]["router"]["choice_bias"]
        for i in ("1", "2")
    ]
    np.testing.assert_array_equal(loaded[path], np.stack(expected))


def test_a_dense_model_with_experts_put_in_is_exported_as_a_mixture():
    """Its router leaves it to ``top_k`` whether a token's weights sum to 1; Mixtral's always do."""
    cfg = apply_modifier(experiments.get("fuji-test-v2"), MoEModifier.Config(num_experts=4))
    family = load_family("hf:MixtralForCausalLM")
    settings = family.foreign_config(cfg)
    assert (settings["num_local_experts"], settings["num_experts_per_tok"]) == (4, 2)
    # One expert's weight is its probability, which these settings cannot say.
    cfg.model.decoder.layer.feed_forward.top_k = 1
    with pytest.raises(CheckpointError, match="normalize = False, which MixtralForCausalLM"):
        family.foreign_config(cfg)


def test_without_the_package_of_mixtures_the_others_work_and_these_say_what_to_install():
    code = """
import sys
sys.modules["axlearn_moe"] = None  # as if it were not installed
from axcore import experiments
from axcore.errors import AxcoreError
experiments.get("qwen3-test")
try:
    experiments.get("qwen3-30B-A3B")
except AxcoreError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 'pip install "axlearn-models[moe]"' in done.stdout
