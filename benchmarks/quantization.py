"""Training recipes against bfloat16 at equal steps, for the table in ``docs/quantization.md``.

    python benchmarks/quantization.py --model tiny-lm --steps 400 --seeds 3
    python benchmarks/quantization.py --model 5m --steps 200 --seeds 1

Every run has the same data order and initial weights for a seed; only the products differ. What is
compared is the held-out loss at the end, in nats per token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from axcore import experiments
from axcore.train.assemble import assemble
from axcore.train.run import train

RECIPES = ("none", "fp8", "fp8-delayed", "mxfp8", "int8", "int4-qat")
BASE = "none"


def heldout_loss(model: str, recipe: str, seed: int, steps: int) -> float:
    """Returns the held-out loss at the end of a run, nats per token."""
    cfg: Any = experiments.get("tiny-lm")
    cfg.set(seed=seed, max_step=steps)
    if model == "5m":
        cfg.model.set(model_dim=256)
        cfg.model.decoder.set(num_layers=6)
        cfg.set_path("learner.optimizer.learning_rate.peak", 1e-3)
    cfg.model.set(compute_dtype="bfloat16")
    assembled = assemble(cfg, modifiers=[f"quantize:recipe={recipe}"], instance="cpu")
    with tempfile.TemporaryDirectory() as out:
        report = train(assembled.cfg, out=Path(out) / "run", instance=assembled.instance).report
    return float(report["eval"]["loss"])


def table(model: str, steps: int, losses: dict[str, list[float]]) -> str:
    """Returns the Markdown table of losses by recipe."""
    lines = [
        f"{model}, {steps} steps, {len(losses[BASE])} seed(s)",
        "",
        "| recipe | held-out loss, mean | against bfloat16, mean | worst seed |",
        "|---|---|---|---|",
    ]
    for recipe, values in losses.items():
        ratios = [100 * (v / b - 1) for v, b in zip(values, losses[BASE], strict=False)]
        name = "bfloat16" if recipe == BASE else f"`{recipe}`"
        mean, worst = statistics.mean(ratios), max(ratios, key=abs)
        lines.append(f"| {name} | {statistics.mean(values):.4f} | {mean:+.2f} % | {worst:+.2f} % |")
    return "\n".join(lines)


def main() -> None:
    """Runs all recipes and prints the table; finished runs are kept in ``--record``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("tiny-lm", "5m"), default="tiny-lm")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument(
        "--record", type=Path, help="JSON lines of finished runs, read and added to"
    )
    args = parser.parse_args()
    done: dict[str, float] = {}
    if args.record is not None and args.record.exists():
        for line in args.record.read_text().splitlines():
            done.update(json.loads(line))
    losses: dict[str, list[float]] = {recipe: [] for recipe in args.recipes}
    for seed in range(args.seeds):
        for recipe in args.recipes:
            key = f"{args.model}/{args.steps}/{recipe}/{seed}"
            if key not in done:
                done[key] = heldout_loss(args.model, recipe, seed, args.steps)
                if args.record is not None:
                    with args.record.open("a") as file:
                        file.write(json.dumps({key: done[key]}) + "\n")
            losses[recipe].append(done[key])
            print(f"{key}: {done[key]:.4f}", file=sys.stderr, flush=True)
    print(table(args.model, args.steps, losses))


if __name__ == "__main__":
    main()
