"""Training recipes against bfloat16 at equal steps, for the table in ``docs/quantization.md``.

    python benchmarks/quantization.py --model tiny-lm --steps 400 --seeds 3
    python benchmarks/quantization.py --model 5m --steps 200 --seeds 1
    python benchmarks/quantization.py --model mixture --steps 100 --recipes none int8 fp8 int4-qat
    python benchmarks/quantization.py --predict fuji-7B-v2    # trains nothing; needs no accelerator

Every run has the same data order and initial weights for a seed; only the products differ. What is
compared is the held-out loss at the end, in nats per token.

``--predict`` prints what the cost model expects of a whole step with and without a recipe, on
machines that need not be here, each set up by the rule of its plugin. Products run at the peak of
their dtype times the machine's efficiency of products; quantizing itself is not counted, and
nothing was run: read it as a bound, and measure on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from axcore import experiments
from axcore.errors import AxcoreError
from axcore.parallel.cost import StepPrediction, predict_step
from axcore.train.assemble import assemble
from axcore.train.run import train

RECIPES = ("none", "fp8", "fp8-delayed", "mxfp8", "int8", "int4-qat")
BASE = "none"

#: Modifiers that make a model of ``tiny-lm``; 5m is a larger one.
MODELS = {"tiny-lm": [], "5m": [], "mixture": ["axlearn-moe:moe:num_experts=8,top_k=2"]}

#: Machines of ``--predict`` and the recipe that each multiplies fastest and can run.
MACHINES = (
    ("gpu-h100-256", "fp8"),
    ("gpu-b200-256", "fp8"),
    ("tpu-v5e-256", "int8"),
    ("tpu-v5p-512", "int8"),
    ("tpu-7x-128", "fp8"),
    ("neuron-trn2.48xlarge-64", "neuron-fp8-e4m3"),
)


def heldout_loss(model: str, recipe: str, seed: int, steps: int) -> float:
    """Returns the held-out loss at the end of a run, nats per token."""
    cfg: Any = experiments.get("tiny-lm")
    cfg.set(seed=seed, max_step=steps)
    if model == "5m":
        cfg.model.set(model_dim=256)
        cfg.model.decoder.set(num_layers=6)
        cfg.set_path("learner.optimizer.learning_rate.peak", 1e-3)
    cfg.model.set(compute_dtype="bfloat16")
    modifiers = [*MODELS[model], f"quantize:recipe={recipe}"]
    assembled = assemble(cfg, modifiers=modifiers, instance="cpu")
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


def predicted(model: str, machine: str, recipe: str) -> StepPrediction:
    """Returns what the cost model expects of a step under the machine's own rule.

    Args:
        model: Experiment.
        machine: Instance.
        recipe: In place of the one that the rule states.
    """
    assembled = assemble(
        experiments.get(model), modifiers=[f"quantize:recipe={recipe}"], instance=machine
    )
    return predict_step(assembled.cfg, assembled.instance)


def prediction_table(model: str, machines: Iterable[tuple[str, str]] = MACHINES) -> str:
    """Returns the Markdown table of predicted steps; machines that are not installed are told."""
    lines = [
        f"{model}, predicted; nothing was run",
        "",
        "| machine | recipe | step in bfloat16, s | with the recipe, s | faster "
        "| of it products, s | bound by |",
        "|---|---|---|---|---|---|---|",
    ]
    for machine, recipe in machines:
        try:
            plain, quantized = (predicted(model, machine, name) for name in (BASE, recipe))
        except AxcoreError as error:
            print(f"{machine}, {recipe}: {error}", file=sys.stderr)
            continue
        before, after = (p.seconds["matmul"] for p in (plain, quantized))
        lines.append(
            f"| {machine} | `{recipe}` | {plain.step_seconds:.2f} | {quantized.step_seconds:.2f} "
            f"| {plain.step_seconds / quantized.step_seconds:.2f}x "
            f"| {before:.2f} to {after:.2f} | {quantized.bound_by} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Runs all recipes and prints the table; finished runs are kept in ``--record``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny-lm")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument(
        "--record", type=Path, help="JSON lines of finished runs, read and added to"
    )
    parser.add_argument(
        "--predict", metavar="EXP", help="print predicted steps of an experiment instead"
    )
    args = parser.parse_args()
    if args.predict is not None:
        print(prediction_table(args.predict))
        return
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
