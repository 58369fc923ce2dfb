"""``axcore kernels``: what implementations there are, and which serve an experiment's sites."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from axcore.cli._experiment import add_edits, add_experiment, add_instance, assembled
from axcore.cli._result import CommandResult, Subparsers, add_command

__all__ = ["add_parser", "explain", "list_"]

_PURPOSES = ("train", "prefill", "decode")


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``kernels list|explain``."""
    parser = subparsers.add_parser("kernels", help="list kernels, and explain which ones serve")
    inner = parser.add_subparsers(dest="kernels_command", required=True, metavar="COMMAND")
    command = add_command(
        inner,
        "list",
        list_,
        help="list every implementation of every op, the preferred first",
        example="axcore kernels list --op attention",
    )
    command.add_argument("--op", metavar="OP", help="of this op only")
    command = add_command(
        inner,
        "explain",
        explain,
        help="show which kernel serves each site of a program, and why others do not",
        example="axcore kernels explain tiny-lm --instance cpu-8\n"
        "axcore kernels explain tiny-lm --instance cpu"
        " --set model.decoder.layer.attention.kernel=xla --purpose decode --json",
    )
    add_experiment(command)
    add_edits(command)
    add_instance(command)
    command.add_argument(
        "--purpose",
        choices=_PURPOSES,
        default="train",
        help="the training step (default), or the model's prefill or decode",
    )


def list_(args: argparse.Namespace) -> CommandResult:
    """Lists kernels of all installed plugins.

    Raises:
        OpError: There is no such op.
    """
    from axcore.errors import OpError, did_you_mean
    from axcore.plugins import host

    items = [(spec, owner) for _, spec, owner in host().kernels.items()]
    ops = sorted({spec.op for spec, _ in items})
    if args.op is not None and args.op not in ops:
        raise OpError(
            f"no op named {args.op!r}; known: {', '.join(ops)}",
            code="AX404",
            hint=did_you_mean(args.op, ops) or None,
        )
    items = [(spec, owner) for spec, owner in items if args.op in (None, spec.op)]
    items.sort(key=lambda item: (item[0].op, -item[0].priority, item[0].implementation))
    data = [
        {
            "op": spec.op,
            "implementation": spec.implementation,
            "platforms": list(spec.platforms),
            "distribution": owner,
            "priority": spec.priority,
            "communicates": list(spec.communicates),
            "description": spec.description,
        }
        for spec, owner in items
    ]
    header = ("op", "implementation", "platforms", "distribution", "description")
    table = [header] + [
        (
            row["op"],
            row["implementation"],
            ", ".join(row["platforms"]),
            row["distribution"],
            row["description"],
        )
        for row in data
    ]
    return CommandResult(data, _aligned(table))


def explain(args: argparse.Namespace) -> CommandResult:
    """Explains an experiment's choices on an instance.

    Raises:
        AxcoreError: A site has no acceptable kernel, or the config does not fit the machine.
    """
    from axcore.cli._jax import jax_started
    from axcore.train.kernels import explain_kernels

    a = assembled(args)
    with jax_started(cache=False):
        choices = explain_kernels(a, purpose=args.purpose)
    sites = [choice.to_json() for choice in choices]
    data = {"instance": a.instance.name, "purpose": args.purpose, "sites": sites}
    return CommandResult(data, _text(data))


def _text(data: Mapping[str, Any]) -> str:
    table: list[Sequence[str]] = [("site", "op", "chosen")]
    notes: list[str] = []
    absent: dict[str, str] = {}
    for row in data["sites"]:
        below = " (below the acceptable list)" if row["fallback"] else ""
        below += " (not installed here)" if row["absent"] else ""
        table.append((row["site"] or "(no module)", row["op"], row["chosen"] + below))
        notes += [
            f"{row['site']}: {row['op']}: {r['implementation']} refused: {r['reason']}"
            for r in row["refused"]
        ]
        if row["absent"]:
            absent.setdefault(f"{row['op']}.{row['chosen']}", row["absent"])
    notes += [
        f"{kernel} cannot run from this installation: {reason}" for kernel, reason in absent.items()
    ]
    return "\n".join([_aligned(table), *([""] if notes else []), *notes])


def _aligned(table: Sequence[Sequence[str]]) -> str:
    """Returns rows as text, all columns but the last padded."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
    return "\n".join(
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]
        ).rstrip()
        for row in table
    )
