"""Against transformers on random tiny models: logits, gradients, generation, both directions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axcore import experiments
from axcore.checkpoint.convert import load_family
from axcore.inference import Generator

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("torch-models")]

IDS = np.random.default_rng(1).integers(3, 96, (2, 24))
SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
GPT2 = dict(
    vocab_size=96,
    n_positions=64,
    n_embd=32,
    n_layer=2,
    n_head=4,
    bos_token_id=None,
    eos_token_id=None,
)
GEMMA = dict(head_dim=16, sliding_window=8, query_pre_attn_scalar=24)
LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10_000.0,
    short_factor=[1.0, 1.1, 1.3, 2.0],
    long_factor=[1.1, 2.0, 4.0, 8.0],
    original_max_position_embeddings=32,
)
CLASSES = {
    "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
    "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}
# Family of the model, and what its settings add to SIZES; GPT2 names them otherwise.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(rms_norm_eps=1e-5)),
    "llama-tied-biases": (
        "Llama",
        dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True, num_key_value_heads=4),
    ),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "gpt2": ("GPT2", GPT2),
    "gpt2-untied": (
        "GPT2",
        dict(GPT2, n_inner=48, scale_attn_weights=False, tie_word_embeddings=False),
    ),
    "mistral": ("Mistral", dict(head_dim=16, sliding_window=8)),
    "gemma2": (
        "Gemma2",
        dict(GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, num_hidden_layers=3),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            GEMMA,
            num_hidden_layers=4,
            layer_types=[f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0},
            },
        ),
    ),
    "olmo2": ("Olmo2", dict(attention_bias=True)),
    "phi3": ("Phi3", dict(sliding_window=8)),
    "phi3-longrope": ("Phi3", dict(rope_parameters=dict(LONGROPE, factor=2.0))),
}
ROPES: dict[str, dict[str, Any]] = {
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=2.0),
    "llama3": dict(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "yarn": dict(factor=4.0, original_max_position_embeddings=16),
}


@pytest.fixture(scope="module")
def torch_models(tmp_path_factory) -> Callable[..., tuple[Any, Path]]:
    """Makes a random model of transformers and saves it."""
    reason = "the oracle: pip install torch transformers"
    torch = pytest.importorskip("torch", reason=reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        transformers = pytest.importorskip("transformers", reason=reason)

    def make(cls: str, **settings: Any) -> tuple[Any, Path]:
        config_class, model_class = CLASSES.get(cls, (f"{cls}Config", f"{cls}ForCausalLM"))
        sizes = SIZES if "n_embd" not in settings else {}
        config = getattr(transformers, config_class)(**{**sizes, **settings})
        model = getattr(transformers, model_class)(config).eval()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            scale = "norm" in name or (".ln_" in name and name.endswith("weight"))
            parameter.data.normal_(float(scale), 0.2, generator=generator)
        directory = tmp_path_factory.mktemp("model")
        model.save_pretrained(directory)
        return model, directory

    return make


def logits_of(model: Any, ids: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


@pytest.mark.parametrize("case", MODELS)
def test_an_imported_model_computes_the_same(
    case, torch_models, read_model, close, close_gradients
):
    import torch

    cls, settings = MODELS[case]
    theirs, directory = torch_models(cls, **settings)
    ours = read_model(directory)
    close(ours.logits(IDS), logits_of(theirs, IDS))

    tokens = torch.from_numpy(IDS)
    loss = torch.nn.functional.cross_entropy(
        theirs(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()
    )
    loss.backward()
    our_loss, gradients = ours.gradients(IDS)
    assert our_loss == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    close_gradients(gradients, expected)

    prompt = IDS[0, :7].tolist()
    generated = Generator(ours.model, ours.params, max_seq_len=64).generate([prompt], 16)
    sequence = theirs.generate(tokens[:1, :7], max_new_tokens=16, do_sample=False)
    assert generated.tokens[0] == sequence[0, 7:].tolist()


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_scaling_computes_the_same(kind, torch_models, read_model, close):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **ROPES[kind]}
    settings = {"max_position_embeddings": 16} if kind == "dynamic" else {}
    theirs, directory = torch_models("Llama", rope_parameters=rope, **settings)
    close(read_model(directory).logits(IDS), logits_of(theirs, IDS))


def test_a_sequence_past_the_trained_length_takes_the_long_frequencies(
    torch_models, read_model, close
):
    rope = dict(LONGROPE, original_max_position_embeddings=16)
    theirs, directory = torch_models("Phi3", rope_parameters=rope)
    ours = read_model(directory)
    close(ours.logits(IDS), logits_of(theirs, IDS))
    close(ours.logits(IDS[:, :12]), logits_of(theirs, IDS[:, :12]))


@pytest.mark.parametrize(
    ("member", "name"),
    [
        ("fuji-test-v3", "hf:LlamaForCausalLM"),
        ("smollm2-test", "hf:LlamaForCausalLM"),
        ("qwen2.5-test", "hf:Qwen2ForCausalLM"),
        ("qwen3-test", "hf:Qwen3ForCausalLM"),
        ("afm-test", "hf:Qwen3ForCausalLM"),  # the same structure, published elsewhere
        ("gpt2-test", "hf:GPT2LMHeadModel"),
        ("mistral-test", "hf:MistralForCausalLM"),
        ("gemma2-test", "hf:Gemma2ForCausalLM"),
        ("gemma3-test", "hf:Gemma3ForCausalLM"),
        ("olmo2-test", "hf:Olmo2ForCausalLM"),
        ("phi3-test", "hf:Phi3ForCausalLM"),
    ],
)
def test_an_exported_model_computes_the_same(
    member, name, torch_models, of_config, write_model, tmp_path, close
):
    import transformers

    ours = of_config(experiments.get(member), load_family(name))
    directory = write_model(ours, tmp_path / "exported")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, local_files_only=True
    )
    assert type(theirs).__name__ == name.removeprefix("hf:")
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    close(ours.logits(IDS), logits_of(theirs.eval(), IDS))
