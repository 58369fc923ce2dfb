"""``axcore tokenizer``, and training with what it makes."""

from __future__ import annotations

import json

import pytest


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from tests.cli.conftest import run_command

    out = tmp_path_factory.mktemp("tokenizer")
    text = out / "a.txt"
    text.write_text("the cat sat on the mat with the other cat " * 20)
    done = run_command(
        "tokenizer", "train", "--text", text, "--vocab-size", 280, "--out", out / "t", "--json"
    )
    assert done.code == 0, done.err
    assert done.json["vocab_size"] <= 280 and done.json["bytes_per_token"] > 2
    return out / "t"


def test_the_default_corpus_is_the_python_reference(cli, tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    done = cli("tokenizer", "train", "--vocab-size", 300, "--out", tmp_path / "t", "--json")
    assert done.code == 0 and done.json["vocab_size"] == 300 and done.json["documents"] > 50


def test_text_to_ids_and_back(cli, directory):
    ids = cli("tokenizer", "encode", "--from", directory, "the cat é", "--json").json["ids"]
    assert len(ids) < len("the cat é")
    done = cli("tokenizer", "decode", "--from", directory, *ids)
    assert done.out == "the cat é\n"
    marked = cli("tokenizer", "encode", "--from", directory, "--markup", "<|bos|>")
    assert marked.out == "0\n"
    assert len(cli("tokenizer", "encode", "--from", directory, "<|bos|>").out.split()) > 1


def test_show_names_the_special_tokens(cli, directory):
    shown = cli("tokenizer", "show", "--from", directory / "tokenizer.json", "--json").json
    assert shown["special_tokens"] == {"<|bos|>": 0, "<|eos|>": 1, "<|pad|>": 2}
    assert shown["kind"] == "HFTokenizer" and shown["chat_template"] is None
    assert "<|eos|> 1" in cli("tokenizer", "show", "--from", directory).out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["show", "--from", "nowhere"], "AX530"),
        (["decode", "--from", "DIR", "100000"], "AX850"),
        (["train", "--text", "nowhere.txt", "--vocab-size", "300", "--out", "OUT"], "AX5"),
        (["train", "--vocab-size", "10", "--out", "OUT"], "AX539"),
    ],
)
def test_what_cannot_be_is_refused(cli, directory, tmp_path, words, code):
    places = {"DIR": str(directory), "OUT": str(tmp_path / "out")}
    done = cli("tokenizer", *(places.get(word, word) for word in words))
    assert done.code == 2 and code in done.err and not (tmp_path / "out").exists()


def test_a_trained_tokenizer_trains_a_model(cli, train, directory, tmp_path):
    """The vocabulary is checked against the model's, and the run keeps its own copy."""
    use = ["--set", 'input.tokenizer=config("axcore.data.HFTokenizer")']
    use += ["--set", f"input.tokenizer.path={directory}"]
    refused = train(tmp_path / "r", *use, "--set", "model.vocab_size=100")
    assert refused.code == 2 and "AX702" in refused.err
    size = cli("tokenizer", "show", "--from", directory, "--json").json["vocab_size"]
    done = train(tmp_path / "run", *use, "--set", f"model.vocab_size={size}", "--json")
    assert done.code == 0, done.err
    shown = cli("tokenizer", "show", "--from", tmp_path / "run", "--json").json
    first = cli("tokenizer", "show", "--from", directory, "--json").json
    assert shown["fingerprint"] == first["fingerprint"]
    made = cli("generate", "--from", tmp_path / "run", "--prompt", "the", "--max-tokens", 2)
    assert made.code == 0 and made.out.startswith("the")
    assert json.loads((tmp_path / "run/report.json").read_text())
