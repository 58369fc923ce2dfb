"""A run that is killed at any moment and started again ends bitwise like one that was not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from axcore.checkpoint import OrbaxCheckpointer
from axcore.train import read_metrics

pytestmark = pytest.mark.xdist_group("resume")  # one worker makes the reference run
HERE = Path(__file__).parent
MICRO = "experiments_for_tests:micro"
LAST = 12


def train(out, *flags, instance="cpu", **env):
    """Runs ``axcore train`` in its own process and returns the finished process."""
    command = [sys.executable, "-m", "axcore", "train", MICRO, "--out", str(out)]
    command += ["--instance", instance, "--json", *flags]
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(HERE), **{k: str(v) for k, v in env.items()}},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def weights(out, step=LAST):
    checkpointer = OrbaxCheckpointer.Config(save_every_n_steps=1).instantiate()
    checkpointer.open(out / "checkpoints")
    shapes = checkpointer.describe(step)
    tree = {}
    for path, shape in shapes.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = shape
    arrays, extra = checkpointer.restore(step, tree)
    checkpointer.close()
    return arrays, extra


def losses(out):
    rows = read_metrics(out / "metrics.jsonl")
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def assert_same(out, reference):
    import jax

    assert losses(out) == losses(reference)
    (a, extra_a), (b, extra_b) = weights(out), weights(reference)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), a, b)
    assert extra_a["data"] == extra_b["data"]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    out = tmp_path_factory.mktemp("reference") / "run"
    done = train(out)
    assert done.returncode == 0, done.stderr
    assert list(losses(out)) == list(range(1, LAST + 1))
    return out


@pytest.mark.parametrize("step", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 11))])
def test_kill_at_a_step_and_again(tmp_path, reference, step):
    out = tmp_path / "run"
    killed = train(out, AXTEST_AT_STEP=step, AXTEST_SIGNAL=int(signal.SIGKILL))
    assert killed.returncode == -signal.SIGKILL
    done = train(out)
    assert done.returncode == 0, done.stderr
    assert_same(out, reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "delay", [0.01, *(pytest.param(d, marks=pytest.mark.slow) for d in (0.0, 0.05))]
)
def test_kill_during_a_save(tmp_path, reference, delay):
    out = tmp_path / "run"
    killed = train(out, AXTEST_IN_SAVE_OF=6, AXTEST_DELAY=delay)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = train(out)
    assert done.returncode == 0, done.stderr
    assert_same(out, reference)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, reference, number):
    out = tmp_path / "run"
    stopped = train(out, AXTEST_AT_STEP=4, AXTEST_SIGNAL=int(number))
    assert stopped.returncode == 5, stopped.stderr
    assert number.name in stopped.stderr
    assert f"--out {out}" in stopped.stderr  # the command that goes on
    document = json.loads(stopped.stdout)
    assert 4 <= document["step"] < LAST
    assert (out / "checkpoints" / str(document["step"])).is_dir()
    done = train(out)
    assert done.returncode == 0, done.stderr
    assert_same(out, reference)


def test_a_second_signal_exits_at_once(tmp_path):
    done = train(
        tmp_path / "run", AXTEST_AT_STEP=4, AXTEST_SIGNAL=int(signal.SIGTERM), AXTEST_TWICE=1
    )
    assert done.returncode == 128 + signal.SIGTERM
    assert "exiting at once" in done.stderr


def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path, reference):
    import shutil

    out = tmp_path / "run"
    shutil.copytree(reference, out)
    newest = out / "checkpoints" / str(LAST)
    files = [p for p in newest.rglob("*") if p.is_file() and p.parent != newest]
    largest = max(files, key=lambda p: (p.stat().st_size, p))
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(bytes(data))
    done = train(out)
    assert done.returncode == 0, done.stderr
    assert str(LAST) in done.stderr and "resuming from step 9" in done.stderr
    assert json.loads(done.stdout)["damaged_checkpoints"].keys() == {str(LAST)}
    assert_same(out, reference)


@pytest.mark.slow
def test_resuming_on_another_topology_gives_the_same_batches(tmp_path, reference):
    out = tmp_path / "run"
    killed = train(out, AXTEST_AT_STEP=8, AXTEST_SIGNAL=int(signal.SIGKILL))
    assert killed.returncode == -signal.SIGKILL
    done = train(out, instance="cpu-4")
    assert done.returncode == 0, done.stderr
    got, expected = losses(out), losses(reference)
    # Sums over four devices round differently: float32 over 6 steps.
    np.testing.assert_allclose([*got.values()], [*expected.values()], rtol=2e-5)
    assert weights(out)[1]["data"] == weights(reference)[1]["data"]
