"""``axcore train``, and what reads its directory: ``generate`` and ``eval``."""

from __future__ import annotations

import json
import math
import shutil
import signal

import numpy as np
import pytest

from axcore.cli import train as command
from axcore.inference import load_model
from axcore.train import read_metrics


def test_the_document_has_the_keys_of_the_contract(trained):
    report = trained.done.json
    keys = "step loss eval tokens_per_second step_seconds compile_seconds out".split()
    assert set(keys) <= set(report)
    assert (report["step"], report["out"]) == (3, str(trained.out))
    assert set(report["eval"]) >= {"loss", "bits_per_byte"}
    assert report["reference"]["uniform_bits_per_byte"] == 8.0
    assert json.loads((trained.out / "report.json").read_text())["loss"] == report["loss"]


def test_both_mfus_are_reported_and_printed_with_tokens_per_second_of_a_device(trained):
    report = trained.done.json
    assert 0 < report["mfu"]["causal"] < report["mfu"]["noncausal"]
    assert report["tokens_per_second_per_device"] == report["tokens_per_second"]  # one device
    assert report["predicted_step_seconds"] > 0 and report["bound_by"]
    speed = next(line for line in command._text(report).splitlines() if "tokens/s" in line)
    parts = ["per device", "% (causal)", f"by {report['bound_by']}"]
    for part in (*parts, "% (noncausal) of the peak of float32 ("):
        assert part in speed


def test_tokens_per_second_and_the_time_of_a_step_are_of_the_same_steps(trained, train, tmp_path):
    report = trained.done.json
    assert report["tokens_per_second"] * report["step_seconds"] == pytest.approx(2 * 16)
    again = tmp_path / "run"
    shutil.copytree(trained.out, again)
    found = train(again, "--json").json  # finished: no step was timed this time
    assert found["tokens_per_second"] * found["step_seconds"] == pytest.approx(2 * 16)
    once = train(tmp_path / "once", "--max-step", "1", "--json").json
    assert (once["tokens_per_second"], once["step_seconds"]) == (None, None)


def test_everything_is_under_one_directory(trained):
    names = {p.name for p in trained.out.iterdir()}
    assert names >= {"config.txt", "checkpoints", "tokenizer", "metrics.jsonl", "report.json"}


def test_parameters_and_tokens_are_told_at_the_start(trained):
    # 264*8 embedding + 16*8 positions + one layer of width 8, by hand: 3,128
    assert trained.done.err.splitlines()[0].startswith(
        "3,128 parameters, 96 tokens (3 steps of 2 x 16) on cpu"
    )


def test_the_last_line_of_an_evaluated_step_has_its_loss_too(trained):
    rows = read_metrics(trained.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all("loss" in row and "tokens" in row for row in rows)
    assert "heldout/loss" in rows[-1]


def test_the_same_command_again_finds_the_run_finished(train, trained, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(trained.out, out)
    done = train(out)
    assert done.code == 0, done.err
    assert "finished: step 3 of 3" in done.out
    assert "resuming from step 3" in done.err
    assert "held-out bits per byte" in done.out and "uniform 8.00" in done.out
    assert "a continuation of 'The '" in done.out
    assert f"all of it is in {out}" in done.out and "axcore generate --from" in done.out


def test_a_runs_own_config_file_goes_on_with_it(cli, trained, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(trained.out, out)
    done = cli("train", out / "config.txt", "--out", out, "--instance", "cpu", "--json")
    assert done.code == 0, done.err
    assert done.json["step"] == 3 and "resuming from step 3" in done.err


def test_extend_goes_on_to_a_higher_end(train, trained, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(trained.out, out)
    done = train(out, "--max-step", "4", "--extend", "--json")
    assert done.code == 0, done.err
    assert done.json["step"] == 4
    assert "max_step: 3 -> 4" in done.err


def test_missing_extras_are_named_with_what_to_install():
    report = {
        "failed_writers": {"tensorboard": "needs it (pip install 'axcore[tensorboard]')"},
        "plot": "plots need matplotlib: pip install 'axcore[plots]'",
    }
    assert command._missing(report) == [
        "tensorboard: needs it (pip install 'axcore[tensorboard]')",
        "plots/loss.png: plots need matplotlib: pip install 'axcore[plots]'",
    ]
    assert not {"plots/loss.png", "tensorboard/"} & {n for n, _ in command._places(report)}


def test_a_samples_control_characters_do_not_reach_the_terminal():
    assert "".join(map(command._printable, "a\x1b[2J\tb\n")) == "a\ufffd[2J\tb\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_step_says_how_to_go_on(train, tmp_path, monkeypatch, number):
    def stop(*args, **kwargs):
        signal.raise_signal(number)
        raise AssertionError("the handler did not raise")

    monkeypatch.setattr(command, "assembled", stop)
    before = signal.getsignal(signal.SIGTERM)
    # Python's own, which a process that a shell starts in the background does not get.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        done = train(tmp_path / "run dir")
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert done.code == 5
    assert f"axcore train tiny-lm --out '{tmp_path / 'run dir'}'" in done.err
    assert signal.getsignal(signal.SIGTERM) == before


LAYERS = """
from axcore import experiments
from axcore.config import REQUIRED, Required
from axcore.layers import {base}

class Wrong({base}):
    class Config({base}.Config):
        pass

    def forward(self, x, *args):
        import jax.numpy as jnp
        return x @ jnp.ones((7, 7))

def exp():
    cfg = experiments.get("tiny-lm")
    cfg.model.decoder.layer.feed_forward = Wrong.Config()
    return cfg
"""


def test_a_shape_error_in_a_users_layer_names_the_layer_and_the_line(train, tmp_path, module):
    name = module("wrong_layer", LAYERS.format(base="FeedForward"))
    done = train(tmp_path / "run", experiment=f"{name}:exp")
    assert done.code == 4
    error, note, hint = done.err.splitlines()[-3:]
    assert error.startswith("error: ") and "wrong_layer.py:" in error and "TypeError" in error
    assert "feed_forward" in note and "Wrong.forward" in note and "float32[2, 16, 8]" in note
    assert "config path: model.decoder" in note
    assert "--debug" in hint


def test_simulated_devices_share_the_parameters(train, tmp_path):
    report = train(
        tmp_path / "run", "--instance", "cpu-2", "--set", "sample_prompt=None", "--json"
    ).json
    assert report["instance"] == "cpu-2" and report["mesh"]["fsdp"] == 2


# generate -------------------------------------------------------------------------------------


def test_generation_has_the_keys_of_the_contract(cli, trained):
    data = cli(
        "generate", "--from", trained.out, "--prompt", "The ", "--max-tokens", 4, "--json"
    ).json
    assert set(data) >= {"text", "tokens", "ttft_seconds", "tokens_per_second"}
    assert data["tokens"] == len(data["token_ids"]) <= 4
    assert data["text"] == load_model(trained.out).tokenizer.decode(data["token_ids"])
    assert data["step"] == 3


def test_generation_as_text_is_the_prompt_and_what_follows(cli, trained):
    flags = ("generate", "--from", trained.out, "--prompt", "The ", "--max-tokens", 4)
    assert cli(*flags).out == f"The {cli(*flags, '--json').json['text']}\n"


def test_greedy_generation_takes_the_likeliest_token_of_the_whole_text(cli, trained):
    import jax.numpy as jnp

    from axcore import functional

    loaded = load_model(trained.out)
    ids = loaded.tokenizer.encode("The ").tolist()
    for _ in range(3):
        logits, _ = functional(
            loaded.model,
            state=loaded.state,
            inputs=(jnp.asarray([ids]),),
            method="logits",
            is_training=False,
        )
        ids.append(int(np.argmax(np.asarray(logits)[0, -1])))
    data = cli(
        "generate", "--from", trained.out, "--prompt", "The ", "--max-tokens", 3, "--json"
    ).json
    assert data["token_ids"] == ids[-3:]


def test_a_seed_gives_the_same_draws_again(cli, trained):
    flags = ("generate", "--from", trained.out, "--prompt", "The ", "--max-tokens", 8)
    draws = [
        cli(*flags, "--temperature", 1.0, "--seed", seed, "--json").json["token_ids"]
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


def test_sliding_goes_past_the_models_longest_text(cli, trained):
    data = cli(
        *("generate", "--from", trained.out, "--prompt", "The ", "--max-tokens", 30),
        *("--temperature", 1.0, "--json"),
    ).json
    assert 0 < data["tokens"] <= 30


def test_a_tokenizer_with_a_chat_template_answers(cli, trained, monkeypatch):
    from axcore.data import ByteTokenizer

    def encode_chat(self, messages):
        assert messages == [{"role": "user", "content": "hi"}]
        return self.encode("<hi>")

    monkeypatch.setattr(ByteTokenizer, "encode_chat", encode_chat, raising=False)
    done = cli("generate", "--from", trained.out, "--chat", "hi", "--max-tokens", 2, "--json")
    assert done.json["prompt_tokens"] == 4


# eval -----------------------------------------------------------------------------------------


def test_evaluation_repeats_what_training_reported(cli, trained):
    data = cli("eval", "--from", trained.out, "--json").json
    reported = trained.done.json["eval"]
    assert data["metrics"].keys() == reported.keys()
    np.testing.assert_allclose(data["metrics"]["loss"], reported["loss"], rtol=1e-6)
    assert data["step"] == 3 and data["reference"]["uniform_bits_per_byte"] == 8.0


def test_evaluation_of_texts_counts_all_their_bytes(cli, trained, tmp_path):
    text = "Größe matters. " * 20
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt").write_text(text, encoding="utf-8")
    metrics = cli(
        "eval", "--from", trained.out, "--text", tmp_path / "a.txt", tmp_path / "b.txt", "--json"
    ).json["metrics"]
    num_bytes = 2 * len(text.encode())
    assert metrics["num_targets"] == num_bytes + 2  # and each document's end
    nats = metrics["loss"] * metrics["num_targets"]
    assert metrics["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes)


def test_evaluation_of_texts_takes_no_batch_of_a_pod(cli, trained, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("Some words.\n")
    copy = tmp_path / "copy"
    shutil.copytree(trained.out, copy)
    config = (copy / "config.txt").read_text().splitlines()
    lines = ["batch_size: 65536" if x.startswith("batch_size: ") else x for x in config]
    (copy / "config.txt").write_text("\n".join(lines) + "\n")
    data = cli("eval", "--from", copy, "--text", text, "--json").json
    assert data["batch_size"] * data["context"] <= 8192
    same = cli("eval", "--from", trained.out, "--text", text, "--json").json
    assert data["metrics"]["bits_per_byte"] == pytest.approx(same["metrics"]["bits_per_byte"])


def test_evaluation_as_text(cli, trained):
    done = cli("eval", "--from", trained.out)
    assert done.code == 0 and "bits_per_byte" in done.out and "uniform" in done.out
