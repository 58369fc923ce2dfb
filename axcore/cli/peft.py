"""``axcore peft``: merge adapters into a model, export them, attach them to a base."""

from __future__ import annotations

import argparse
from typing import Any

from axcore.cli._experiment import rows
from axcore.cli._result import CommandResult, Subparsers, add_command

__all__ = ["add_parser", "attach", "export", "merge"]


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``peft merge|export|attach``."""
    parser = subparsers.add_parser("peft", help="merge, export and attach trained adapters")
    inner = parser.add_subparsers(dest="peft_command", required=True, metavar="COMMAND")
    command = add_command(
        inner,
        "merge",
        merge,
        help="fold the adapters of a run into its weights: a plain model directory",
        example="axcore peft merge --from runs/tuned --out runs/merged",
    )
    _add_from(command)
    command = add_command(
        inner,
        "export",
        export,
        help="write the adapters of a run and nothing of its base",
        example="axcore peft export --from runs/tuned --out adapters/tuned",
    )
    _add_from(command)
    command = add_command(
        inner,
        "attach",
        attach,
        help="put exported adapters onto their base: a model directory",
        example="axcore peft attach --base runs/base --adapter adapters/tuned --out runs/again",
    )
    command.add_argument("--base", metavar="DIR", required=True, help="a model directory")
    command.add_argument(
        "--adapter", metavar="DIR", required=True, help="what `axcore peft export` wrote"
    )
    command.add_argument("--out", metavar="DIR", required=True, help="the directory to make")
    command.add_argument(
        "--allow-other-base",
        action="store_true",
        help="take a base whose weights are not those that the adapters were trained on",
    )


def _add_from(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--from", dest="directory", metavar="DIR", required=True, help="a run's --out directory"
    )
    command.add_argument("--out", metavar="DIR", required=True, help="the directory to make")
    command.add_argument(
        "--step", metavar="N", type=int, help="a saved step (default: the newest good one)"
    )


def merge(args: argparse.Namespace) -> CommandResult:
    """Merges. Raises AxcoreError: there are no adapters, or a directory is not what it should."""
    from axcore.cli._jax import jax_started

    with jax_started():
        from axcore.peft import merge_adapter

        data = merge_adapter(args.directory, args.out, step=args.step, trusted=args.trust)
    difference = data["max_abs_logit_difference"]
    facts = [
        ("adapters", f"{data['adapters']} merged"),
        ("largest logit difference", "not compared" if difference is None else f"{difference:.2e}"),
    ]
    return _result(data, facts)


def export(args: argparse.Namespace) -> CommandResult:
    """Exports. Raises AxcoreError: there are no adapters, or a directory is not what it should."""
    from axcore.cli._jax import jax_started

    with jax_started():
        from axcore.peft import export_adapter

        data = export_adapter(args.directory, args.out, step=args.step, trusted=args.trust)
    facts = [
        ("adapters", str(data["adapters"])),
        ("size", f"{data['size_bytes']:,} bytes in {data['tensors']} tensors"),
    ]
    return _result(data, facts)


def attach(args: argparse.Namespace) -> CommandResult:
    """Attaches. Raises AxcoreError: the adapters do not fit the base, or a directory is wrong."""
    from axcore.cli._jax import jax_started

    with jax_started():
        from axcore.peft import attach_adapter

        data = attach_adapter(
            args.base,
            args.adapter,
            args.out,
            allow_other_base=args.allow_other_base,
            trusted=args.trust,
        )
    base = "the one they were trained on" if data["same_base"] else "another than trained on"
    return _result(data, [("adapters", str(data["adapters"])), ("base", base)])


def _result(data: dict[str, Any], facts: list[tuple[str, str]]) -> CommandResult:
    return CommandResult(data, f"written to {data['out']}\n{rows(facts)}")
