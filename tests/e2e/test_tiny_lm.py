"""The main job as a user runs it: tiny-lm learns, and everything it promises is there."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from axcore.train import read_metrics

# One worker, so that the run that all tests read is made once.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("tiny-lm")]


def axcore(*args):
    return subprocess.run(
        [sys.executable, "-m", "axcore", *map(str, args)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What ``make train`` runs, elsewhere."""
    out = tmp_path_factory.mktemp("main") / "tiny-lm"
    done = axcore("train", "tiny-lm", "--out", out)
    assert done.returncode == 0, done.stderr
    return out, done


def test_it_reaches_2_6_bits_per_byte_and_says_what_that_compares_with(run):
    out, done = run
    report = json.loads((out / "report.json").read_text())
    assert 1.0 < report["eval"]["bits_per_byte"] <= 2.6
    assert report["reference"]["uniform_bits_per_byte"] == 8.0
    # xz on the reference text: 1.63 on Python 3.11, a little more or less on others.
    assert 1.4 < report["reference"]["xz_bits_per_byte"] < 1.9
    assert "(xz 1." in done.stdout and "uniform 8.00)" in done.stdout
    assert 100_000 < report["num_parameters"] < 140_000


def test_everything_that_a_run_produces_is_under_its_directory(run):
    pytest.importorskip("matplotlib", reason="needs axcore[plots]")
    pytest.importorskip("tensorboardX", reason="needs axcore[tensorboard]")
    out, done = run
    for name in ("config.txt", "metrics.jsonl", "plots/loss.png", "report.json"):
        assert (out / name).stat().st_size > 0, name
        assert name in done.stdout
    for name in ("checkpoints", "tensorboard", "tokenizer"):
        assert any((out / name).iterdir()), name
    assert (out / "plots/loss.png").read_bytes().startswith(b"\x89PNG")
    assert str(out) in done.stdout


def test_every_step_is_logged(run):
    rows = read_metrics(run[0] / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert all({"loss", "tokens"} <= set(row) for row in rows)


def test_a_continuation_is_shown(run):
    out, done = run
    sample = json.loads((out / "report.json").read_text())["sample"]
    assert "a continuation of 'The '" in done.stdout
    assert "  | The " in done.stdout
    # A byte model of 2.6 bits has learned that text is words.
    assert sample["text"].count(" ") > 10


def test_the_readmes_further_commands_work_on_it(run, tmp_path):
    lines = (Path(__file__).parents[2] / "README.md").read_text().splitlines()
    told = [shlex.split(line) for line in lines if "--from runs/tiny-lm" in line]
    said = {}
    for _, command, *words in told:
        # What a command reads is the trained run, what it writes lies elsewhere.
        places = {word: tmp_path / word for word in words if word.startswith("runs/")}
        places["runs/tiny-lm"] = run[0]
        done = axcore(command, *(places.get(word, word) for word in words), "--json")
        assert done.returncode == 0, done.stderr
        said[command] = json.loads(done.stdout)
    assert set(said) == {"generate", "eval", "upcycle", "quantize"}

    assert 0 < said["generate"]["tokens"] <= 200
    report = json.loads((run[0] / "report.json").read_text())
    bits = report["eval"]["bits_per_byte"]
    assert said["eval"]["metrics"]["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    # Four experts where one layer was: three more copies of it, and routers.
    assert said["upcycle"]["mixtures"] == 2
    assert said["upcycle"]["parameters_after"] > 2 * report["num_parameters"]
    assert said["quantize"]["bytes_after"] < said["quantize"]["bytes_before"] / 2
