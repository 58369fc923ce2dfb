"""``axcore convert``: what people and programs see."""

from __future__ import annotations

import json

import numpy as np
import pytest

from axcore.cli import main


@pytest.fixture
def run(capsys):
    def run(*argv: object) -> tuple[int, str, str]:
        code = main([str(word) for word in argv])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_json_has_the_promised_fields_and_the_result_runs(write_hf, tensors, tmp_path, run):
    out = tmp_path / "out"
    source = write_hf(tensors)
    code, text, err = run("convert", source, "--out", out, "--tokenizer", "byte", "--json")
    assert code == 0, err
    said = json.loads(text)
    assert said["tensors"] == len(tensors)
    assert 0 < said["max_abs_logit_difference"] < 1e-4
    report = json.loads((out / "conversion.json").read_text())
    assert said["report"] == str(out / "conversion.json")
    assert report["max_abs_logit_difference"] == said["max_abs_logit_difference"]
    flags = ("--prompt", "The ", "--max-tokens", 3, "--json")
    code, text, err = run("generate", "--from", out, *flags)
    assert code == 0, err
    assert 1 <= json.loads(text)["tokens"] <= 3
    code, text, err = run(
        "convert", "--export", "hf", out, "--out", tmp_path / "back", "--max-shard-size", "20KB",
        "--verify", "never",
    )  # fmt: skip
    assert code == 0, err
    assert "hf:ToyForCausalLM" in text
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 1


def test_allowed_tensors_and_unread_settings_are_shown(write_hf, tensors, tmp_path, run):
    tensors["extra"] = np.ones(2, np.float32)
    flags = ("--tokenizer", "byte", "--verify", "never", "--allow", "extra")
    source = write_hf(tensors, dropout=0.1)
    code, text, _ = run("convert", source, "--out", tmp_path / "out", *flags)
    assert code == 0
    assert "left unused" in text and "extra" in text and "dropout" in text
    assert "not compared: the comparison was switched off" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--step", "3"), "--step needs --export"),
        (("--export", "hf", "--allow", "x"), "--allow is not for --export"),
        (("--export", "hf", "--allow-nan"), "--allow-nan is not for --export"),
        (("--export", "hf", "--max-shard-size", "big"), "--max-shard-size is 'big'"),
        (("--export", "hf", "--max-shard-size", "0"), "--max-shard-size is '0'"),
        (("--dtype", "int8"), "the dtype 'int8' is not known"),
        (("--tokenizer", "bite"), "no tokenizer named 'bite'"),
        (("--family", "npz:toy"), "no converter knows"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_flags_that_fit_nothing_are_refused(write_hf, tensors, tmp_path, run, flags, words):
    code, _, err = run("convert", write_hf(tensors), "--out", tmp_path / "out", *flags)
    assert code == 2 and words in err, err
    assert not (tmp_path / "out").exists()


def test_nan_goes_through_when_asked_for(write_hf, tensors, tmp_path, run):
    tensors["wpe"][3, 3] = np.nan
    flags = ("--tokenizer", "byte", "--verify", "never", "--allow-nan")
    code, _, err = run("convert", write_hf(tensors), "--out", tmp_path / "out", *flags)
    assert code == 0, err
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["not_finite"] == ["position/weight"]


def test_a_source_without_tokenizer_says_so(write_hf, tensors, tmp_path, run):
    flags = ("--verify", "never")
    code, _, err = run("convert", write_hf(tensors), "--out", tmp_path / "out", *flags)
    assert code == 0 and "no tokenizer" in err
    assert not (tmp_path / "out" / "tokenizer").exists()
    code, _, err = run("generate", "--from", tmp_path / "out", "--prompt", "a", "--max-tokens", 1)
    assert code == 2 and "no tokenizer here" in err
