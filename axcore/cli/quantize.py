"""``axcore quantize``: a model directory with weights, activations or caches of few bits."""

from __future__ import annotations

import argparse

from axcore.cli._console import say
from axcore.cli._experiment import rows
from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import CliError

__all__ = ["add_parser", "quantize"]

_STORING = (
    "int8-weights, int4-weights, fp8-weights, int8-serving, fp8-serving, int8-static, fp8-static, "
    "int8-kv, fp8-kv"
)


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``quantize``."""
    command = add_command(
        subparsers,
        "quantize",
        quantize,
        help="store a trained model in few bits: a model directory to serve",
        example="axcore quantize --from runs/tiny-lm --recipe int8-weights --recipe int8-kv "
        "--out runs/int8\n"
        "axcore quantize --from runs/tiny-lm --recipe int8-static "
        "--data text.txt --percentile 99.99 --out runs/static",
    )
    command.add_argument(
        "--from", dest="directory", metavar="DIR", required=True, help="a run's --out directory"
    )
    command.add_argument(
        "--recipe",
        metavar="NAME[:key=value,...]",
        action="append",
        required=True,
        help=f"{_STORING}, or a plugin's; repeatable",
    )
    command.add_argument("--out", metavar="DIR", required=True, help="the directory to make")
    command.add_argument(
        "--data", metavar="FILE", help="a text to calibrate static scales with, and to compare on"
    )
    command.add_argument(
        "--batches", metavar="N", type=int, default=16, help="most batches of it (default: 16)"
    )
    command.add_argument(
        "--percentile",
        metavar="P",
        type=float,
        help="of activations' magnitudes, in percent (default: the largest)",
    )
    command.add_argument("--ema", action="store_true", help="take the parameters' moving average")
    command.add_argument(
        "--step", metavar="N", type=int, help="a saved step (default: the newest good one)"
    )


def quantize(args: argparse.Namespace) -> CommandResult:
    """Quantizes. Raises AxcoreError: a recipe does not apply, or a directory is not what it is."""
    from axcore.cli._jax import jax_started

    if args.batches < 1:
        raise CliError(
            f"--batches is {args.batches}, expected 1 or more",
            code="AX974",
            hint="16 batches of 4 x 128 tokens are the default",
        )
    if args.percentile is not None and not 0 < args.percentile <= 100:
        raise CliError(
            f"--percentile is {args.percentile}, expected one above 0 and at most 100",
            code="AX974",
            hint="99.99 clips the largest hundredth of a percent",
        )
    with jax_started():
        from axcore.inference import quantize_directory
        from axcore.quantization import Recipe
        from axcore.train.assemble import parse_modifier

        recipes = []
        for text in args.recipe:
            name, colon, arguments = text.partition(":")
            modifier = parse_modifier(f"quantize:recipe={name}{',' if colon else ''}{arguments}")
            recipe = modifier.instantiate().recipe_config()
            if issubclass(recipe.target, Recipe) and not recipe.target.for_trained:
                raise CliError(
                    f"the recipe {name!r} is for training: it stores nothing in few bits",
                    code="AX973",
                    where=f"--recipe {text}",
                    hint=f"recipes that do: {_STORING}; for training: `axcore train EXP "
                    f"--modifier quantize:recipe={name}`",
                )
            recipes.append(recipe)
        data = quantize_directory(
            args.directory,
            recipes,
            args.out,
            data=args.data,
            num_batches=args.batches,
            percentile=args.percentile,
            step=args.step,
            use_ema=args.ema,
            trusted=args.trust,
        )
    if args.percentile is not None and not data["calibrated"]:
        say("warning: --percentile has no effect: no recipe has static scales of activations")
    difference, agreement = data["max_abs_logit_difference"], data["next_token_agreement"]
    facts = [
        ("products", f"{data['products']} quantized, {data['calibrated']} calibrated"),
        ("size", f"{data['bytes_before']:,} bytes before, {data['bytes_after']:,} now"),
        ("largest logit difference", "not compared" if difference is None else f"{difference:.2e}"),
        ("same next token", "not compared" if agreement is None else f"{agreement:.1%}"),
    ]
    if data["dropped"]:
        facts.append(("dropped", f"{len(data['dropped'])} states of training recipes"))
    return CommandResult(data, f"written to {data['out']}\n{rows(facts)}")
