"""Does the planner rank as a stopwatch does? Candidates on simulated CPU devices, both ways.

    python benchmarks/planner.py [--devices 8] [--candidates 24] [--rounds 7]

Takes candidates spread over the planner's ranking of a small decoder, compiles each, runs them in
turn, round after round, and compares the medians with the predicted order (Spearman's rank
correlation). Simulated devices share the cores of this machine: what differs between candidates is
the work they repeat, what they move through memory and how often they have to wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from axcore import experiments
from axcore.parallel import prepare_host, resolve_instance


def experiment(dim: int, layers: int, rows: int, seq_len: int):
    """Returns a small decoder in float32; tiny-lm with other sizes."""
    cfg = experiments.get("tiny-lm")
    cfg.model.model_dim = dim
    cfg.model.decoder.num_layers = layers
    cfg.model.decoder.layer.attention.num_heads = 8
    return cfg.set(batch_size=rows, seq_len=seq_len, sample_prompt=None)


def compiled(cfg, instance, devices):
    """Returns a function that runs one step of a config and waits for it."""
    import jax
    import numpy as np

    from axcore.train._program import Program

    trainer = cfg.instantiate(name="trainer")
    program = Program(trainer, instance, devices)
    state = program.initial_state()
    rng = np.random.default_rng(0)
    example = trainer.cfg.input.instantiate().example()
    rows = {
        name: rng.integers(1, 200, (cfg.batch_size, *np.shape(x)[1:])).astype(np.asarray(x).dtype)
        if np.asarray(x).dtype.kind == "i"
        else np.ones((cfg.batch_size, *np.shape(x)[1:]), np.asarray(x).dtype)
        for name, x in example.items()
    }
    batch = program.put(rows)
    step = program.compile_train(state, batch)
    holder = [state]

    def run() -> None:
        holder[0], out = step.call(holder[0], batch)
        jax.block_until_ready((holder[0], out))

    return run


def ranks(values: list[float]) -> list[float]:
    """Returns ranks from 0, equal values sharing their mean rank."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    i = 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in order[i : j + 1]:
            found[k] = (i + j) / 2
        i = j + 1
    return found


def spearman(a: list[float], b: list[float]) -> float:
    """Returns the correlation of ranks."""
    return statistics.correlation(ranks(a), ranks(b))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--candidates", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    instance = resolve_instance(f"cpu-{args.devices}")
    prepare_host(instance)
    from axcore.config import apply_modifier
    from axcore.parallel import select_devices
    from axcore.parallel.plan import search

    cfg = experiment(args.dim, args.layers, args.rows, args.seq_len)
    # By memory nothing is skipped: candidates that recompute more than they need are there too.
    plan = search(cfg, instance, objective="memory")
    ranked = sorted(plan.ranked, key=lambda r: r.prediction.step_seconds)
    step = max(1, (len(ranked) - 1) // max(args.candidates - 1, 1))
    chosen = ranked[::step][: args.candidates]
    devices = select_devices(instance)
    runs = []
    for i, r in enumerate(chosen):
        made = cfg
        for modifier in r.candidate.modifiers():
            made = apply_modifier(made, modifier)
        print(f"compiling {i + 1}/{len(chosen)}: {r.candidate.describe()}", file=sys.stderr)
        runs.append(compiled(made, instance, devices))
    times: list[list[float]] = [[] for _ in runs]
    for run in runs:
        run()
    for _ in range(args.rounds):
        for i, run in enumerate(runs):
            start = time.perf_counter()
            run()
            times[i].append(time.perf_counter() - start)
    measured = [statistics.median(t) for t in times]
    predicted = [r.prediction.step_seconds for r in chosen]
    rho = spearman(predicted, measured)
    if args.json:
        rows = [
            {"candidate": r.candidate.describe(), "predicted": p, "measured": m}
            for r, p, m in zip(chosen, predicted, measured, strict=True)
        ]
        print(json.dumps({"spearman": rho, "candidates": rows}, indent=2))
        return
    for r, p, m in sorted(zip(chosen, predicted, measured, strict=True), key=lambda x: x[2]):
        print(f"{1e3 * m:8.1f} ms measured  {1e3 * p:8.1f} ms predicted  {r.candidate.describe()}")
    print(f"Spearman's rank correlation of {len(chosen)} candidates: {rho:.2f}")


if __name__ == "__main__":
    main()
