"""Test members train on this machine in seconds, with no file but the package's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

MEMBERS = ["fuji-test-v1", "fuji-test-v3", "smollm2-test", "qwen2.5-test", "qwen3-test"]
MEMBERS += ["gpt2-test", "mistral-test", "gemma2-test", "gemma3-test", "olmo2-test", "phi3-test"]
MEMBERS += ["afm-test", "qwen3-moe-test", "mixtral-test", "olmoe-test", "qwen2-moe-test"]
MEMBERS += ["gpt-oss-test", "deepseek-V3-test"]


def test_a_test_member_trains_and_generates(cli, tmp_path):
    out = tmp_path / "run"
    done = cli("train", "fuji-test-v2", "--max-step", 3, "--out", out, "--instance", "cpu")
    assert done["step"] == 3
    assert 4.5 < done["loss"] < 6.0  # about ln(264) = 5.6: three steps from a random start
    made = cli("generate", "--from", out, "--prompt", "The ", "--max-tokens", 4)
    assert made["tokens"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MEMBERS)
def test_every_test_member_learns(name, cli, tmp_path):
    out = tmp_path / "run"
    cli("train", name, "--max-step", 60, "--out", out, "--instance", "cpu")
    lines = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[0] > 5.0
    assert sum(losses[-10:]) / 10 < 3.6  # single bytes of this text have about 3.1 nats
