"""BERT and MiniLM: published sizes, training, and transformers' outputs, both directions."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from axcore import experiments
from axcore.checkpoint.convert import load_family
from axcore.data import ByteTokenizer
from axcore.errors import CheckpointError, DataError
from axcore.layers import RMSNorm
from axcore.module import flatten_specs

# config.json of google-bert/bert-base-uncased.
BERT_BASE = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "transformers_version": "4.6.0.dev0",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
BERT_LARGE = dict(
    BERT_BASE,
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
)


def count(cfg: Any) -> int:
    model = cfg.instantiate(name="trainer").model
    return sum(math.prod(spec.shape) for spec in flatten_specs(model.parameter_specs()).values())


@pytest.mark.parametrize(
    ("settings", "published"), [(BERT_BASE, 109_482_240), (BERT_LARGE, 335_141_888)]
)
def test_the_encoder_with_its_pooler_has_the_published_size(settings, published):
    assert count(load_family("hf:BertModel").config(settings, {})) == published


def test_published_settings_give_the_member_of_the_catalog():
    cfg = load_family("hf:BertForMaskedLM").config(BERT_BASE, {})
    ours = experiments.get("bert-base")
    assert cfg.model.set(compute_dtype="bfloat16").lines() == ours.model.lines()


@pytest.mark.parametrize(
    ("family", "members"),
    [
        ("hf:BertForMaskedLM", ["bert-base", "bert-large", "bert-test"]),
        ("hf:BertModel", ["minilm-L6-v2", "minilm-test"]),
    ],
)
def test_members_survive_the_way_through_foreign_settings(family, members):
    for name in members:
        cfg = experiments.get(name)
        back = load_family(family).config(load_family(family).foreign_config(cfg), {})
        assert count(back) == count(cfg)


@pytest.mark.parametrize(
    "change",
    [
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"hidden_act": "mish"},
        {"surprise": 1},
        {"model_type": "roberta"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_implemented_is_refused_by_name(change):
    with pytest.raises(CheckpointError, match=next(iter(change))) as caught:
        load_family("hf:BertForMaskedLM").config({**BERT_BASE, **change}, {})
    assert caught.value.code == "AX614"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("encoder.layer.attention_norm", RMSNorm.Config(eps=1e-12)),
        ("encoder.layer.attention.logit_cap", 5.0),
        ("encoder.layer.feed_forward.activation", "squared_relu"),
        ("encoder.layer.attention.output.bias", False),
        ("position", None),
    ],
    ids=lambda value: value.rsplit(".", 1)[-1] if isinstance(value, str) else "",
)
def test_what_a_foreign_config_cannot_say_is_not_exported(path, value):
    cfg = experiments.get("bert-test")
    cfg.model.set_path(path, value)
    with pytest.raises(CheckpointError) as caught:
        load_family("hf:BertForMaskedLM").foreign_config(cfg)
    assert caught.value.code == "AX622"


def test_the_full_members_ask_for_a_tokenizer_with_a_mask():
    cfg = experiments.get("bert-base").set(max_step=1)
    data = cfg.instantiate(name="trainer").cfg.input.instantiate()
    assert isinstance(data.tokenizer, ByteTokenizer)
    with pytest.raises(DataError, match=r"\[MASK\]"):
        data.prepare()


def test_a_test_member_trains_and_evaluates(cli, tmp_path):
    out = tmp_path / "run"
    few = ("--set", "evalers.heldout.max_documents=2")
    done = cli("train", "bert-test", "--max-step", 3, "--out", out, *few)
    assert done["step"] == 3
    assert 3.0 < done["eval"]["loss"] < 6.5  # near the logarithm of 264
    assert 0 <= done["eval"]["accuracy"] <= 1
    assert "bits_per_byte" not in done["eval"]
    again = cli("eval", "--from", out)
    assert again["metrics"]["loss"] == pytest.approx(done["eval"]["loss"], rel=1e-5)
    (tmp_path / "text.txt").write_text("Some bytes are hidden and have to be told. " * 50)
    text = cli("eval", "--from", out, "--text", tmp_path / "text.txt")
    # Hidden bytes of 2,151 in all, not the next one of each; the end that closes the text is cut.
    assert text["metrics"]["num_targets"] == pytest.approx(0.15 * 2150, rel=0.1)
    assert "bits_per_byte" not in text["metrics"]


# -- against transformers --------------------------------------------------------------------------

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=24,
    hidden_act="gelu",
)


def inputs() -> dict[str, np.ndarray]:
    """Ids of three rows, of which two end in padding, in two kinds of tokens."""
    rng = np.random.default_rng(1)
    lengths = np.array([[16], [11], [6]])
    places = np.arange(16)[None]
    return {
        "input_ids": rng.integers(3, 96, (3, 16)).astype(np.int32),
        "segment_ids": (places < lengths).astype(np.int32),
        "token_types": (places >= lengths // 2).astype(np.int32),
    }


def run(model: Any, data: dict[str, np.ndarray]) -> Any:
    import torch

    tensors = {name: torch.from_numpy(array.astype(np.int64)) for name, array in data.items()}
    return model(
        input_ids=tensors["input_ids"],
        attention_mask=tensors["segment_ids"],
        token_type_ids=tensors["token_types"],
    )


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
def test_an_imported_head_computes_the_same(
    activation, random_model, close, close_gradients, read_model
):
    import torch

    theirs, directory = random_model(
        "BertForMaskedLM", "BertConfig", **{**SIZES, "hidden_act": activation}
    )
    ours, data = read_model(directory), inputs()
    valid = data["segment_ids"] != 0
    logits = run(theirs, data).logits
    close(ours.call("logits", **data)[valid], logits.detach().numpy()[valid])

    rng = np.random.default_rng(2)
    targets = rng.integers(0, 96, (3, 16)).astype(np.int32)
    mask = valid & (rng.random((3, 16)) < 0.5)
    chosen = torch.from_numpy(mask)
    loss = torch.nn.functional.cross_entropy(
        logits[chosen], torch.from_numpy(targets.astype(np.int64))[chosen]
    )
    loss.backward()
    our_loss, gradients = ours.loss_and_gradients(**data, target_ids=targets, target_mask=mask)
    assert our_loss == pytest.approx(loss.item(), rel=1e-5)
    expected = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    close_gradients(gradients, expected)


@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
def test_an_imported_encoder_and_its_pooler_compute_the_same(random_model, close, read_model):
    theirs, directory = random_model("BertModel", "BertConfig", **SIZES)
    ours, data = read_model(directory), inputs()
    expected = run(theirs, data)
    valid = data["segment_ids"] != 0
    close(ours.call("hidden", **data)[valid], expected.last_hidden_state.detach().numpy()[valid])
    close(ours.call("pooled", **data), expected.pooler_output.detach().numpy())


@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
def test_a_file_of_the_first_release_is_read(random_model, close, read_model, tmp_path):
    """Norms with gamma and beta, and the tensors of the task of two sentences."""
    from safetensors.numpy import load_file, save_file

    theirs, directory = random_model("BertForPreTraining", "BertConfig", **SIZES)
    arrays = load_file(directory / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): array
        for name, array in arrays.items()
    }
    assert any("gamma" in name for name in old)
    save_file(old, tmp_path / "model.safetensors")
    settings = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**settings, "architectures": ["BertForMaskedLM"]})
    )
    ours, data = read_model(tmp_path), inputs()
    valid = data["segment_ids"] != 0
    expected = run(theirs, data).prediction_logits.detach().numpy()
    close(ours.call("logits", **data)[valid], expected[valid])


@pytest.mark.parametrize(
    ("member", "name"), [("bert-test", "BertForMaskedLM"), ("minilm-test", "BertModel")]
)
@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
def test_an_exported_model_computes_the_same(
    member, name, transformers, of_config, write_model, close, tmp_path
):
    ours = of_config(experiments.get(member), load_family(f"hf:{name}"))
    directory = write_model(ours, tmp_path / "exported")
    theirs, report = getattr(transformers, name).from_pretrained(
        directory, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    data = inputs()
    valid = data["segment_ids"] != 0
    result = run(theirs.eval(), data)
    if name == "BertModel":
        close(ours.call("pooled", **data), result.pooler_output.detach().numpy())
        expected, method = result.last_hidden_state, "hidden"
    else:
        expected, method = result.logits, "logits"
    close(ours.call(method, **data)[valid], expected.detach().numpy()[valid])


@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
def test_the_command_converts_both_ways_with_evidence(random_model, cli, tmp_path):
    _, directory = random_model("BertForMaskedLM", "BertConfig", **SIZES)
    done = cli("convert", directory, "--out", tmp_path / "ours", "--verify", "always")
    assert done["family"] == "hf:BertForMaskedLM"
    assert done["max_abs_logit_difference"] < 1e-4
    back = cli("convert", tmp_path / "ours", "--export", "hf", "--out", tmp_path / "back")
    assert back["max_abs_logit_difference"] < 1e-4
