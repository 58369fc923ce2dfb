"""A process that dies during a save, at any point, leaves a good checkpoint and says what it cost.

The children are real processes that end by SIGKILL, on a full disk, or without closing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.checkpoint import OrbaxCheckpointer

PRELUDE = """
import os, signal, sys
import jax, jax.numpy as jnp, numpy as np
from axcore.checkpoint import OrbaxCheckpointer
from axcore.checkpoint import _failure, _manifest, _orbax
from pathlib import Path
import shutil

def state(step, mb):
    return {str(i): jnp.full((mb << 18,), step * 10 + i, jnp.float32) for i in range(2)}

def make(directory, **kw):
    cfg = {"save_every_n_steps": 1, "keep_last_n": 2, **kw}
    ckpt = OrbaxCheckpointer.Config(**cfg).instantiate()
    ckpt.open(directory)
    return ckpt

def die():
    os.kill(os.getpid(), signal.SIGKILL)

directory = sys.argv[1]
"""


@contextlib.contextmanager
def child(body: str, directory: Path):
    """A process that runs ``body``; it is killed at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-c", PRELUDE + body, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(body: str, directory: Path) -> tuple[int, str, str]:
    with child(body, directory) as process:
        out, err = process.communicate()
    return process.returncode, out, err


def reader(directory: Path) -> OrbaxCheckpointer:
    cfg = OrbaxCheckpointer.Config(save_every_n_steps=1, keep_last_n=2)
    ckpt = cfg.instantiate()
    ckpt.open(directory)
    return ckpt


def restored(ckpt: OrbaxCheckpointer, step: int) -> list[np.ndarray]:
    shapes = {p: jax.ShapeDtypeStruct(s.shape, s.dtype) for p, s in ckpt.describe(step).items()}
    arrays, extra = ckpt.restore(step, shapes)
    assert extra == {"position": step}
    return [np.asarray(arrays[str(i)]) for i in range(2)]


def assert_is_step(ckpt: OrbaxCheckpointer, step: int) -> None:
    for i, array in enumerate(restored(ckpt, step)):
        assert (array == step * 10 + i).all()


KILLED_AT = {
    # name -> (patch that kills in the save of step 3, newest good step afterwards)
    "while arrays are written": ("", 2),
    "before the manifest": ("_manifest.write = lambda *a, **k: die()", 2),
    "inside the manifest": ("_manifest.atomic_write = lambda *a: die()", 2),
    "before the rename": ("Path.rename = lambda *a: die()", 2),
    "after the rename": ("_orbax.sync_directory = lambda *a: die()", 3),
    "while an old step is removed": ("shutil.rmtree = lambda *a, **k: die()", 3),
}


@pytest.mark.parametrize("point", KILLED_AT)
def test_a_kill_at_any_point_of_a_save(tmp_path, point):
    patch, expected = KILLED_AT[point]
    if point == "while arrays are written":
        final = "ckpt.save(3, state(3, 16), {'position': 3}); die()"
    else:
        # The partial directory is cleared before the patch is in force.
        final = f"""
original = ckpt._commit
def commit(*a):
    global _manifest
{os.linesep.join("    " + line for line in [patch])}
    original(*a)
ckpt._commit = commit
ckpt.save(3, state(3, 1), {{'position': 3}}); ckpt.wait()"""
    body = f"""
ckpt = make(directory)
for step in (1, 2):
    ckpt.save(step, state(step, 1), {{'position': step}})
ckpt.wait()
{final}
"""
    code, _, err = run(body, tmp_path)
    assert code == -signal.SIGKILL, err
    ckpt = reader(tmp_path)
    assert ckpt.latest_good() == expected
    assert (3 in ckpt.skipped) == (expected == 2)
    assert_is_step(ckpt, expected)
    # The next run goes on in the same directory, and what the kill left behind is gone.
    arrays = {str(i): jnp.full((8,), 40 + i, jnp.float32) for i in range(2)}
    ckpt.save(4, arrays, {"position": 4})
    ckpt.close()
    assert {p.name for p in tmp_path.iterdir()} == {str(expected), "4"}
    assert ckpt.latest_good() == 4
    assert_is_step(ckpt, 4)


def test_kills_at_random_moments_lose_at_most_the_save_under_way(tmp_path):
    body = """
ckpt = make(directory)
step = ckpt.latest_good() or 0
print("from", step, flush=True)
while True:
    step += 1
    ckpt.save(step, state(step, 8), {'position': step})
    ckpt.wait()
    print(step, flush=True)
"""
    rng = np.random.default_rng(0)
    finished = 0
    for _ in range(4):
        with child(body, tmp_path) as process:
            assert process.stdout is not None
            assert process.stdout.readline().split() == ["from", str(finished)]
            for _ in range(2):
                finished = int(process.stdout.readline())
            time.sleep(float(rng.uniform(0, 0.15)))
            process.kill()
            rest = process.stdout.read().split()
        finished = int(rest[-1]) if rest else finished
        ckpt = reader(tmp_path)
        good = ckpt.latest_good()
        assert good in (finished, finished + 1)  # the next may be whole before it is announced
        assert_is_step(ckpt, good)
        finished = good


FILL = """
ckpt = make(directory)
ckpt.save(1, state(1, 1), {'position': 1})
ckpt.wait()
%s
try:
    ckpt.save(2, state(2, 16), {'position': 2})
    ckpt.wait()
except Exception as error:
    print(type(error).__name__, error.code, error.exit_code, error)
try:
    ckpt.close()
finally:
    print("closed")
"""


def assert_disk_full(out: str, directory: Path) -> None:
    assert out.startswith("CheckpointError AX602 2 "), out
    assert "the disk is full: saving step 2 needs 33.6 MB" in out
    assert "step 1 is the newest good checkpoint" in out
    assert "hint: free some space" in out
    assert out.rstrip().endswith("closed")
    ckpt = reader(directory)
    assert ckpt.latest_good() == 1
    assert_is_step(ckpt, 1)
    assert [p.name for p in directory.iterdir()] == ["1"]


@contextlib.contextmanager
def small_disk(directory: Path, size: str):
    """A file system of a given size, or a skip where mounting is not allowed."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "axcore-test", str(directory)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs the command mount")
    if done.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {done.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.mark.parametrize(
    "patch", ["", "_failure.free_bytes = lambda path: 1 << 40"], ids=["foreseen", "met on the way"]
)
def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path, patch):
    with small_disk(tmp_path / "disk", "12m") as disk:
        code, out, err = run(FILL % patch, disk / "checkpoints")
        assert code == 0, err
        assert_disk_full(out, disk / "checkpoints")
        assert "ERROR:absl" not in err, err


def test_a_file_size_limit_counts_as_a_full_disk(tmp_path):
    limit = """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, 1 << 22))
"""
    code, out, err = run(FILL % limit, tmp_path)
    assert code == 0, err
    assert_disk_full(out, tmp_path)


@pytest.mark.parametrize("end", ["ckpt.close()", "raise SystemExit(3)", "1 / 0"])
def test_the_process_ends(tmp_path, end):
    """Even without ``close`` the last save is finished, and no thread keeps the process."""
    body = f"""
ckpt = make(directory)
for step in (1, 2):
    ckpt.save(step, state(step, 1), {{'position': step}})
{end}
"""
    code, _, err = run(body, tmp_path)
    assert code == {"ckpt.close()": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[end], err
    ckpt = reader(tmp_path)
    assert ckpt.latest_good() == 2
    assert_is_step(ckpt, 2)
