"""``axcore upcycle``: a mixture of experts made of a trained dense model."""

from __future__ import annotations

import argparse

from axcore.cli import CommandResult, Subparsers, add_command, jax_started

__all__ = ["add_parser", "upcycle"]

_MODIFIER = "axlearn-moe:moe"


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``upcycle``."""
    command = add_command(
        subparsers,
        "upcycle",
        upcycle,
        help="make a mixture of experts of a trained dense model: a model directory",
        example=f"axcore upcycle --from runs/dense --modifier {_MODIFIER}:num_experts=8,top_k=2 "
        "--drop-ratio 0.5 --out runs/upcycled\n"
        "axcore train runs/upcycled/config.txt --init-from runs/upcycled --out runs/moe",
    )
    command.add_argument(
        "--from", dest="directory", metavar="DIR", required=True, help="a dense model directory"
    )
    command.add_argument(
        "--modifier",
        dest="modifiers",
        metavar="NAME[:key=value,...]",
        action="append",
        help=f"places the mixtures; repeatable (default: {_MODIFIER}, 8 experts in every layer)",
    )
    command.add_argument("--out", metavar="DIR", required=True, help="the directory to make")
    command.add_argument(
        "--noise",
        metavar="S",
        type=float,
        default=0.0,
        help="add noise to each expert, relative to each weight's deviation (default: 0)",
    )
    command.add_argument(
        "--drop-ratio",
        metavar="R",
        type=float,
        default=0.0,
        help="share of each expert's hidden units that begin anew (default: 0, exact copies)",
    )
    command.add_argument(
        "--seed", metavar="N", type=int, default=0, help="of routers, noise and units (default: 0)"
    )
    command.add_argument("--ema", action="store_true", help="take the parameters' moving average")
    command.add_argument(
        "--step", metavar="N", type=int, help="a saved step (default: the newest good one)"
    )


def upcycle(args: argparse.Namespace) -> CommandResult:
    """Upcycles. Raises AxcoreError: the modifier does not apply, or a directory is not usable."""
    with jax_started():
        from axcore.train import parse_modifier
        from axlearn_moe._upcycling import upcycle_directory

        data = upcycle_directory(
            args.directory,
            [parse_modifier(text) for text in args.modifiers or (_MODIFIER,)],
            args.out,
            noise=args.noise,
            drop_ratio=args.drop_ratio,
            seed=args.seed,
            step=args.step,
            use_ema=args.ema,
            trusted=args.trust,
        )
    difference = data["max_abs_logit_difference"]
    lines = [
        f"{data['mixtures']} mixtures: {len(data['copied'])} arrays copied, "
        f"{len(data['initialized'])} initialized",
        f"{data['parameters_before']:,} parameters before, {data['parameters_after']:,} now",
        "logits were not compared with the dense model"
        if difference is None
        else f"logits differ from the dense model by at most {difference:.2e} "
        f"(the largest is {data['max_abs_logit']:.2e})",
    ]
    return CommandResult(data, "\n".join([f"written to {data['out']}", *lines]))
