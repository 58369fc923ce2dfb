"""Checkpoint throughput against raw files and orbax's defaults, in one interleaved run.

    python benchmarks/checkpoint.py [--size-mb 1074] [--repeats 5] [--dir /path/on/the/disk]

Prints MB/s and ratios (medians). Budgets: save >= 0.7x raw write with fsync, restore >= 1.2x
orbax's default and >= 0.5x raw read, training held <= 30 ms. The page cache is warm for reads:
the ratios compare the work of the programs, not the disk.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from axcore.checkpoint import OrbaxCheckpointer


def timed(function: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def state_of(size_mb: int, num_arrays: int) -> dict[str, jax.Array]:
    """Random float32 matrices of ``size_mb`` in all: what trained weights look like to a codec."""
    rows = size_mb * 1_000_000 // (4 * 1024 * num_arrays)
    keys = jax.random.split(jax.random.key(0), num_arrays)
    return {f"w{i}": jax.random.normal(k, (rows, 1024)) for i, k in enumerate(keys)}


def abstract(state: dict[str, jax.Array]) -> dict[str, jax.ShapeDtypeStruct]:
    """The same tree as shapes and shardings."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def main() -> None:
    """Runs all variants ``--repeats`` times and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-mb", type=int, default=1074)
    parser.add_argument("--arrays", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dir", type=Path, default=None)
    args = parser.parse_args()

    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    state = jax.block_until_ready(state_of(args.size_mb, args.arrays))
    shapes = abstract(state)
    seconds: dict[str, list[float]] = defaultdict(list)
    place = Path(tempfile.mkdtemp(prefix="axcore-bench-", dir=args.dir))

    def raw_write() -> None:
        with open(place / "raw", "wb") as file:
            for array in state.values():
                file.write(memoryview(np.asarray(array)).cast("B"))
            file.flush()
            os.fsync(file.fileno())

    def raw_read() -> None:
        out = []
        with open(place / "raw", "rb") as file:
            for array in state.values():
                buffer = np.empty(array.shape, array.dtype)
                file.readinto(memoryview(buffer).cast("B"))
                out.append(jnp.asarray(buffer))
        jax.block_until_ready(out)

    def ours() -> None:
        ckpt = OrbaxCheckpointer.Config(save_every_n_steps=1).instantiate()
        ckpt.open(place / "ours")
        start = time.perf_counter()
        ckpt.save(1, state)
        seconds["ours: training held"].append(time.perf_counter() - start)
        ckpt.wait()
        seconds["ours: save"].append(time.perf_counter() - start)
        ckpt.close()
        ckpt = OrbaxCheckpointer.Config(save_every_n_steps=1).instantiate()
        ckpt.open(place / "ours")
        start = time.perf_counter()
        step = ckpt.latest_good()
        seconds["ours: verify"].append(time.perf_counter() - start)
        jax.block_until_ready(ckpt.restore(step, shapes))
        seconds["ours: verify + restore"].append(time.perf_counter() - start)
        ckpt.close()

    def orbax() -> None:
        ckpt = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        start = time.perf_counter()
        ckpt.save(place / "orbax", args=ocp.args.StandardSave(state))
        seconds["orbax default: training held"].append(time.perf_counter() - start)
        ckpt.wait_until_finished()
        seconds["orbax default: save"].append(time.perf_counter() - start)
        request = ocp.args.StandardRestore(shapes)
        restore = lambda: jax.block_until_ready(ckpt.restore(place / "orbax", args=request))  # noqa: E731
        seconds["orbax default: restore"].append(timed(restore))
        ckpt.close()

    try:
        for _ in range(args.repeats):
            for name in ("raw", "ours", "orbax"):
                path = place / name
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            os.sync()
            seconds["raw: write + fsync"].append(timed(raw_write))
            seconds["raw: read"].append(timed(raw_read))
            os.sync()
            ours()
            os.sync()
            orbax()
    finally:
        shutil.rmtree(place)
    report(seconds, sum(x.nbytes for x in state.values()))


def report(seconds: dict[str, list[float]], size: int) -> None:
    """Prints the table and the ratios that have a budget."""
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{size / 1e6:.0f} MB float32, median of {len(seconds['raw: read'])}")
    for name, value in median.items():
        rate = "" if name.endswith("held") else f"{size / 1e6 / value:8.0f} MB/s"
        print(f"  {name:32} {value * 1e3:8.1f} ms {rate}")

    def ratio(name: str, over: str, under: str, budget: float) -> None:
        # Interleaved, so each repeat gives a ratio of its own.
        pairs = zip(seconds[over], seconds[under], strict=True)
        value = statistics.median(a / b for a, b in pairs)
        print(f"  {name:42} {value:5.2f}x   budget >= {budget}x")

    ratio("save / raw write with fsync", "raw: write + fsync", "ours: save", 0.7)
    ratio("restore / orbax default", "orbax default: restore", "ours: verify + restore", 1.2)
    ratio("restore / raw read", "raw: read", "ours: verify + restore", 0.5)
    held = median["ours: training held"] * 1e3
    print(f"  {'training held':42} {held:5.1f} ms  budget <= 30 ms")


if __name__ == "__main__":
    main()
