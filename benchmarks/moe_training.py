"""Experts against a dense layer at equal active work, for the tables in ``docs/moe.md``.

    python benchmarks/moe_training.py --record moe.jsonl --out pictures

Byte-level language models of ``tiny-lm``'s kind on the Python standard library's ``*.py``, without
its tests; files are held out by the hash of their path. The dense layer has 4 d hidden units. The
mixtures have 8 experts of 2 d, of which a token uses two: the same products for each token (beside
the router's, 8 d), four times the layer's parameters. Two experts of half the width instead of one
of the full width, since the weights of two are made to sum to 1: one expert's weight is its
probability, about 1/8 at first, so the layer would start an eighth as strong as the dense one, and
a short run would measure that.

``auxiliary`` balances loads by the load-balance loss at its usual weight of 0.01, ``auxiliary_x10``
at ten times that, ``loss_free`` by a bias of the choice and no such loss. For a seed all see the
same batches. ``--record`` keeps finished runs, so that the script goes on where it was interrupted;
``--out`` gets a picture of the loads (extra ``plots``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from axcore import experiments
from axcore.collection import OutputCollection
from axcore.data import TextFiles
from axcore.train import Evaler, Trainer
from axcore.train.evaler import combine
from axlearn_moe import LoadBalanceLoss, MoE, RouterZLoss, TopKRouter

# Weights of the load-balance loss.
AUXILIARY = {"auxiliary": 0.01, "auxiliary_x10": 0.1}
VARIANTS = ("dense", *AUXILIARY, "loss_free")
NUM_EXPERTS, TOP_K = 8, 2
WINDOW = 10  # steps whose loads are recorded together
_OUTSIDE = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of the models and of a run."""

    dim: int = 64
    layers: int = 2
    seq: int = 128
    batch: int = 8
    steps: int = 1000
    heldout_files: int = 20

    @property
    def key(self) -> str:
        """Name in the record."""
        return "/".join(str(v) for v in dataclasses.astuple(self))


def library_files() -> tuple[str, ...]:
    """Returns the paths of the standard library's modules, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (p for p in root.rglob("*.py") if not _OUTSIDE & set(p.relative_to(root).parts))
    return tuple(str(p) for p in sorted(found))


def config_of(variant: str, seed: int, size: Size) -> Trainer.Config:
    """Returns one run's experiment."""
    cfg: Any = experiments.get("tiny-lm")
    cfg.set(seed=seed, max_step=size.steps, batch_size=size.batch, seq_len=size.seq)
    cfg.input.source = TextFiles.Config(paths=library_files(), on_bad_file="skip")
    cfg.model.model_dim = size.dim
    cfg.model.decoder.num_layers = size.layers
    if variant == "dense":
        return cfg
    moe = MoE.Config(num_experts=NUM_EXPERTS, top_k=TOP_K, hidden_dim=4 * size.dim // TOP_K)
    moe.losses = (RouterZLoss(),)
    if variant in AUXILIARY:
        moe.losses += (LoadBalanceLoss(weight=AUXILIARY[variant]),)
    else:
        moe.router = TopKRouter.Config(choice_bias=True)
    cfg.model.decoder.layer.feed_forward = moe
    return cfg


class _Evaluation:
    """The compiled evaluation of one set of parameters, which remembers the loads that it saw."""

    def __init__(self, trainer: Trainer, params: Any, num_rows: int):
        self._step = jax.jit(trainer.eval_step)
        self._params = params
        self.rows = tuple(range(num_rows))
        self.seen: list[OutputCollection] = []

    def __call__(self, batch: Any) -> OutputCollection:
        self.seen.append(jax.device_get(self._step(self._params, batch)))
        return self.seen[-1]

    def loads(self) -> list[list[float]]:
        """Returns the share of each expert by layer."""
        entries = combine(self.seen).summaries.items()
        return _loads({path: entry.result() for path, entry in entries})


def _loads(summaries: Mapping[str, Any]) -> list[list[float]]:
    """Returns (layers, experts) of shares, [] for a dense model."""
    found = [np.asarray(v, np.float64) for path, v in summaries.items() if path.endswith("/load")]
    return [row.tolist() for array in found for row in array.reshape(-1, NUM_EXPERTS)]


def run(variant: str, seed: int, size: Size) -> dict[str, Any]:
    """Trains one model; returns its held-out loss and its loads."""
    trainer = config_of(variant, seed, size).instantiate(name="trainer")
    data = trainer.cfg.input.instantiate()
    batches = data.iterator()
    state = jax.jit(trainer.init_state)()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.model))
    step = jax.jit(trainer.train_step, donate_argnums=0)
    cpu, losses = time.process_time(), []
    loads: list[np.ndarray] = []
    for number in range(size.steps):
        state, logged = step(state, next(batches))
        losses.append(float(logged["loss"]))
        if variant != "dense":
            loads.append(np.array(_loads(logged["summaries"])))
        if number % 200 == 199:
            print(f"{variant} {seed}: step {number + 1}, loss {losses[-1]:.3f}", file=sys.stderr)
    batches.close()
    evaluation = _Evaluation(trainer, state.model, size.batch)
    evaler = Evaler.Config(every_n_steps=1, max_documents=size.heldout_files).instantiate()
    metrics = evaler.evaluate(evaluation, data)
    result = {
        "parameters": parameters,
        "bits_per_byte": metrics["bits_per_byte"],
        "targets": metrics["num_targets"],
        "training_loss": statistics.mean(losses[-100:]),
        "cpu_seconds": time.process_time() - cpu,
    }
    if loads:
        windows = np.array(loads)[: size.steps // WINDOW * WINDOW]
        windows = windows.reshape(-1, WINDOW, *windows.shape[1:])
        result |= {
            "loads": windows.mean(axis=1).round(5).tolist(),  # (windows, layers, experts)
            # Of single batches: (windows, layers).
            "batch_max": (windows.max(-1).mean(1) * NUM_EXPERTS).round(4).tolist(),
            "batch_min": (windows.min(-1).mean(1) * NUM_EXPERTS).round(4).tolist(),
            "heldout_loads": evaluation.loads(),
        }
    return result


def quality_table(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Returns the Markdown table of held-out bits per byte."""
    seeds = range(len(runs["dense"]))
    lines = [
        "| | parameters | " + " | ".join(f"seed {s}" for s in seeds) + " | mean | against dense |",
        "|---" * (len(seeds) + 4) + "|",
    ]
    for variant, results in runs.items():
        values = [r["bits_per_byte"] for r in results]
        pairs = zip(results, runs["dense"], strict=True)
        ratios = [100 * (r["bits_per_byte"] / d["bits_per_byte"] - 1) for r, d in pairs]
        against = "" if variant == "dense" else ", ".join(f"{r:+.2f} %" for r in ratios)
        row = (
            variant,
            f"{results[0]['parameters']:,}",
            *(f"{v:.4f}" for v in values),
            f"{statistics.mean(values):.4f}",
            against,
        )
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _extremes(results: Sequence[Mapping[str, Any]], start: int, stop: int) -> tuple[float, float]:
    """Largest and smallest load of any layer and seed, as multiples of the equal share."""
    shares = np.array([r["loads"][start:stop] for r in results]).mean(axis=1) * NUM_EXPERTS
    return float(shares.max()), float(shares.min())


def load_table(runs: Mapping[str, Sequence[Mapping[str, Any]]], steps: int) -> str:
    """Returns the Markdown table of the extreme loads of all layers and seeds over steps."""
    names = [v for v in runs if v != "dense"]
    ends = sorted({min(e, steps) for e in (10, 50, 100, 200, 400, 800, steps)})
    lines = ["| steps | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        cells = []
        for name in names:
            high, low = _extremes(runs[name], start // WINDOW, stop // WINDOW)
            cells.append(f"{high:.2f} / {low:.2f}")
        lines.append(f"| {start + 1}-{stop} | " + " | ".join(cells) + " |")
    for title, pick in (
        ("held-out files", lambda r: np.array(r["heldout_loads"]) * NUM_EXPERTS),
        ("one batch, mean of the last 100", None),
    ):
        cells = []
        for name in names:
            if pick is None:
                last = 100 // WINDOW
                highs = [np.array(r["batch_max"][-last:]).mean(0).max() for r in runs[name]]
                lows = [np.array(r["batch_min"][-last:]).mean(0).min() for r in runs[name]]
                cells.append(f"{max(highs):.2f} / {min(lows):.2f}")
            else:
                shares = np.array([pick(r) for r in runs[name]])
                cells.append(f"{shares.max():.2f} / {shares.min():.2f}")
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(runs: Mapping[str, Sequence[Mapping[str, Any]]], target: Path) -> None:
    """Draws the largest and the smallest load over steps, a line for each layer and seed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [v for v in runs if v != "dense"]
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(1, len(names), place)
        for result in runs[name]:
            shares = np.array(result["loads"]) * NUM_EXPERTS
            steps = (np.arange(len(shares)) + 1) * WINDOW
            axes.plot(steps, shares.max(-1), color="C0", alpha=0.5, linewidth=0.8)
            axes.plot(steps, shares.min(-1), color="C1", alpha=0.5, linewidth=0.8)
        axes.axhspan(0.8, 1.2, color="0.9")
        axes.set(xlabel="step", ylabel="load / equal share", title=name, ylim=(0, 3))
    target.mkdir(parents=True, exist_ok=True)
    figure.savefig(target / "moe_loads.png", dpi=120)


def main() -> None:
    """Runs what the record lacks and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(Size):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--record", type=Path, help="JSON lines of finished runs")
    parser.add_argument("--out", type=Path, help="folder for the picture")
    args = parser.parse_args()
    size = Size(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Size)})
    done: dict[str, Any] = {}
    if args.record is not None and args.record.exists():
        for line in args.record.read_text().splitlines():
            done.update(json.loads(line))
    runs: dict[str, list[Any]] = {variant: [] for variant in args.variants}
    for seed in range(args.seeds):
        for variant in args.variants:
            key = f"{size.key}/{variant}/{seed}"
            if key not in done:
                done[key] = run(variant, seed, size)
                if args.record is not None:
                    with args.record.open("a") as file:
                        file.write(json.dumps({key: done[key]}) + "\n")
            runs[variant].append(done[key])
            bits, cpu = done[key]["bits_per_byte"], done[key]["cpu_seconds"]
            print(f"{key}: {bits:.4f} bits per byte, {cpu:.0f} CPU-s", file=sys.stderr, flush=True)
    if "dense" in runs:
        print(quality_table(runs), end="\n\n")
    if len(runs) > ("dense" in runs):
        print(load_table(runs, size.steps))
        if args.out is not None:
            plot(runs, args.out)


if __name__ == "__main__":
    main()
