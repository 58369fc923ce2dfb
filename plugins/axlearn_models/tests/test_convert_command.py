"""``axcore convert`` on whole models: in, compared by itself, out again, the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axcore.checkpoint.convert import export
from axcore.errors import CheckpointError
from axcore.inference import load_model

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("torch-models")]

SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_model_goes_in_and_comes_out_with_the_same_bits(family, cli, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reason = "the oracle: pip install torch transformers"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    torch.manual_seed(0)
    first = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    first.save_pretrained(tmp_path / "first", max_shard_size="20KB")

    done = cli("convert", tmp_path / "first", "--out", tmp_path / "ours", "--verify", "always")
    assert done["tensors"] == len(first.state_dict())
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
    assert last.config.rope_parameters == first.config.rope_parameters


def test_the_text_of_a_model_with_images_is_read(cli, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    reason = "the oracle: pip install torch transformers"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    text = SIZES | dict(
        head_dim=16, sliding_window=8, num_hidden_layers=3, sliding_window_pattern=3
    )
    images = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    images |= dict(image_size=28, patch_size=14)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(text_config=text, vision_config=images, mm_tokens_per_image=4)
    )
    model.save_pretrained(tmp_path / "first")
    settings = json.loads((tmp_path / "first" / "config.json").read_text())
    for name in ("rms_norm_eps", "query_pre_attn_scalar"):  # as published files do
        del settings["text_config"][name]
    (tmp_path / "first" / "config.json").write_text(json.dumps(settings))

    done = cli("convert", tmp_path / "first", "--out", tmp_path / "ours", "--verify", "always")
    assert done["max_abs_logit_difference"] < 1e-4
    report = json.loads((tmp_path / "ours" / "conversion.json").read_text())
    assert not report["settings_unread"]
    assert "vision_tower.head.probe" in report["ignored"]
    with pytest.raises(CheckpointError, match="part for images"):
        export(tmp_path / "ours", tmp_path / "back")
    export(tmp_path / "ours", tmp_path / "back", family="Gemma3ForCausalLM", verify="never")


def test_an_npz_archive_becomes_a_model_directory_with_evidence(cli, tmp_path):
    glassllm = pytest.importorskip("glassllm", reason="the oracle: pip install glassllm==0.1.0")
    source = Path(glassllm.__file__).parent / "weights" / "en.npz"
    done = cli("convert", source, "--out", tmp_path / "ours")
    assert done["max_abs_logit_difference"] < 1e-4
    with np.load(source) as archive:
        assert done["tensors"] == len(archive.files) - 1  # one of them holds the settings
        embedding = archive["E"].astype(np.float32)
    loaded = load_model(tmp_path / "ours")
    np.testing.assert_array_equal(loaded.state["embedding"]["weight"], embedding)

    ours, theirs = loaded.tokenizer, glassllm.load_pretrained("en")[1]
    text = "It was\n\n  the best of times, “said” the naïve 日本 cafe\u0301; <eos> is text"
    assert ours.encode(text).tolist() == theirs.encode(text)
    known = "Alice was beginning\n to get very  tired"
    assert ours.decode(ours.encode(known)) == known == theirs.decode(theirs.encode(known))
    assert (ours.vocab_size, ours.pad_id, ours.bos_id, ours.eos_id) == (1024, 0, 2, 3)
    answer = cli("generate", "--from", tmp_path / "ours", "--prompt", "Alice", "--max-tokens", 12)
    ids = np.asarray([theirs.encode("Alice")])
    model = glassllm.load_pretrained("en")[0]
    for _ in range(12):
        ids = np.append(ids, [[model(ids).data[0, -1].argmax()]], axis=1)
    assert answer["text"] == theirs.decode(ids[0, -12:].tolist())


def test_a_damaged_tokenizer_beside_an_archive_is_named(tmp_path):
    from axlearn_models.glassllm.tokenizer import tokenizer_beside

    (tmp_path / "en.tokenizer.json").write_text('{"alphabet": ["a"], "merges": [["a"]]}')
    with pytest.raises(CheckpointError, match=r"en\.tokenizer\.json"):
        tokenizer_beside(tmp_path / "en.npz")
    assert tokenizer_beside(tmp_path / "pt.npz") is None
