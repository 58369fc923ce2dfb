"""Mixtures that cannot be, through the commands: one error with the way out, before any work."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import jax
import pytest

from axcore.cli import main
from axcore.train._program import Program

MICRO = (
    "--set model.model_dim=8 --set model.decoder.num_layers=1"
    " --set model.decoder.layer.attention.num_heads=2 --set batch_size=8 --set seq_len=16"
    " --instance cpu-8"
).split()
LAYER = "model.decoder.layer.feed_forward"
# Modifier's arguments, --set flags, code, and what is said: the numbers, and the nearest that work.
CASES = {
    "top_k": ("num_experts=4,top_k=5", (), "AX910", "top_k=5 of num_experts=4", "nearest: top_k=4"),
    "top_k by --set": (
        "num_experts=4",
        (f"{LAYER}.top_k=5",),
        "AX910",
        "top_k=5 of num_experts=4",
        "nearest: top_k=4, or num_experts=5",
    ),
    "no experts": ("num_experts=0", (), "AX910", "num_experts=0", "num_experts=2"),
    "axis": (
        "num_experts=6",
        ('mesh_shape={"expert": 4, "data": 2}',),
        "AX458",
        "size 6 does not divide into 4 parts (expert=4)",
        "nearest sizes that do: 4 or 8; or split it into 2 or 3 parts",
    ),
    "capacity zero": (
        "num_experts=4,moe.capacity_factor=0.0",
        (),
        "AX912",
        "capacity_factor=0.0",
        "1.0 is an equal share",
    ),
    "capacity negative, by --set": (
        "num_experts=4",
        (f"{LAYER}.capacity_factor=-1.5",),
        "AX912",
        "capacity_factor=-1.5",
        "1.0 is an equal share",
    ),
    "capacity in evaluation": (
        "num_experts=4,moe.eval_capacity_factor=0",
        (),
        "AX912",
        "eval_capacity_factor=0",
        "None drops nothing",
    ),
    "groups": (
        "num_experts=6,moe.router.num_groups=4",
        (),
        "AX913",
        "6 experts do not divide into num_groups=4",
        "nearest that do: 2 or 3 groups",
    ),
    "chosen groups, by --set": (
        "num_experts=8,top_k=4",
        (f"{LAYER}.router.num_groups=4",),
        "AX913",
        "the 4 experts of a token are chosen from 4 groups of 2",
        "expected 2 to 4",
    ),
}
COMMANDS = {"train": ["train"], "aot": ["aot"], "show": ["config", "show"]}


@pytest.fixture
def no_work(monkeypatch):
    """Nothing is compiled, and no parameter is made."""

    def refused(*args, **kwargs):
        raise AssertionError("work began")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refused)
    monkeypatch.setattr(Program, "initial_state", refused)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_refused_with_the_numbers_and_the_nearest(
    case: str, command: str, tmp_path: Path, no_work
):
    arguments, sets, code, numbers, nearest = CASES[case]
    words = [*COMMANDS[command], "tiny-lm", *MICRO, "--modifier", f"axlearn-moe:moe:{arguments}"]
    for text in sets:
        words += ["--set", text]
    directory = tmp_path / "run"
    if command == "train":
        words += ["--out", str(directory)]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        exit_code = main(words)
    said = err.getvalue().splitlines()
    errors = [line for line in said if line.startswith("error: ")]
    assert (exit_code, out.getvalue(), len(errors)) == (2, "", 1), err.getvalue()
    assert numbers in errors[0] and f"[{code}]" in errors[0]
    assert said[-1].startswith("hint: ") and nearest in said[-1]
    assert not directory.exists()


def test_what_can_be_is_not_refused(no_work):
    """The mesh that was too large for six experts has a place for eight."""
    words = ["config", "show", "tiny-lm", *MICRO, "--modifier", "axlearn-moe:moe:num_experts=8"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main([*words, "--set", 'mesh_shape={"expert": 4, "data": 2}']) == 0
