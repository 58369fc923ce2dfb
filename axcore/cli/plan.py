"""``axcore plan``: search for the way to run an experiment on a machine, or for the machine."""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axcore._files import atomic_write
from axcore.cli._console import say
from axcore.cli._experiment import add_edits, add_experiment, assembled, peaks, rows
from axcore.cli._failures import Failure
from axcore.cli._parser import named
from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import CliError

if TYPE_CHECKING:
    from axcore.train import Compared, PlanReport

__all__ = ["add_parser", "plan"]

_ANY = "any"
_DOES_NOT_FIT = 3
_SHOWN = 10
_VERIFIED = 3
_GIB = 2**30


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``plan``."""
    command = add_command(
        subparsers,
        "plan",
        plan,
        help="find the mesh, rematerialization and microbatches that suit a machine",
        example="axcore plan tiny-lm --instance cpu-8 --verify 1 --emit rule.txt\n"
        "axcore train tiny-lm --out runs/planned --instance cpu-8 --rules rule.txt\n"
        'axcore plan tiny-lm --instance any --price "tpu-v5p-*=4.2"',
    )
    add_experiment(command)
    add_edits(command)
    # It writes rules, and what it finds must not hang on options that a rule cannot say.
    command.set_defaults(rules=None, xla=())
    command.add_argument(
        "--instance",
        metavar="T",
        type=named,
        required=True,
        help="the machine; `any` compares all known families, each run as its own rule says",
    )
    command.add_argument(
        "--objective",
        choices=("tokens_per_second", "cost", "memory"),
        help="what to rank by (default: tokens_per_second; on one machine cost ranks alike)",
    )
    command.add_argument(
        "--quantize",
        metavar="RECIPE",
        action="append",
        default=[],
        help="a quantization recipe that may be used; repeatable (default: none)",
    )
    command.add_argument(
        "--verify",
        metavar="N",
        type=int,
        help="compile the N best with the machine's compiler (default: 3; 0 compiles none)",
    )
    command.add_argument(
        "--emit", metavar="FILE", help="write the best as a file of rules, for --rules"
    )
    command.add_argument(
        "--price",
        metavar="PATTERN=USD",
        action="append",
        default=[],
        help="US dollars per device and hour of the instances of a pattern; repeatable",
    )
    command.add_argument(
        "--no-cache", action="store_true", help="compile anew, whatever is known from before"
    )


def plan(args: argparse.Namespace) -> CommandResult:
    """Plans.

    Raises:
        AxcoreError: Whatever cannot be planned.
    """
    if args.verify is not None and args.verify < 0:
        raise CliError(
            f"--verify got {args.verify}, expected 0 or more",
            code="AX804",
            hint="0 compiles nothing and trusts the cost model",
        )
    if args.instance == _ANY:
        return _compare(args)
    if args.price:
        raise CliError(
            f"--price compares machines, got --instance {args.instance}",
            code="AX804",
            hint="give it with --instance any; on one machine the cheapest is the fastest",
        )
    return _plan(args)


def _plan(args: argparse.Namespace) -> CommandResult:
    from axcore.cli._jax import aot_cache_dir, jax_started
    from axcore.train import plan as make_plan

    if args.emit:
        _check_writable(Path(args.emit))
    with jax_started(cache=False):
        report = make_plan(
            lambda rules: assembled(args, rules=rules),
            args.instance,
            objective=args.objective or "tokens_per_second",
            quantizations=args.quantize,
            verify=_VERIFIED if args.verify is None else args.verify,
            cache=None if args.no_cache else aot_cache_dir(),
            progress=say,
        )
    if args.emit and report.chosen is not None:
        atomic_write(Path(args.emit), report.rule_text)
    failure = _failure(report)
    data = {
        "experiment": args.experiment,
        **report.to_json(),
        "error": None if failure is None else failure.to_json(),
    }
    exit_code = 0 if report.chosen is not None else _DOES_NOT_FIT
    if failure is not None:
        failure.print()
        exit_code = exit_code or failure.exit_code
    return CommandResult(data, _plan_text(args, report), exit_code)


def _failure(report: PlanReport) -> Failure | None:
    """Returns why what should have been verified was not; None when all of it was."""
    if not report.failed:
        return None
    # A compiler that failed is worse than one that is not installed.
    error = max((v.error for v in report.failed if v.error), key=lambda e: e.exit_code)
    failure = Failure.of(error)
    hints = [failure.hint or "", "--verify 0 trusts the cost model"]
    return dataclasses.replace(
        failure,
        message=f"{len(report.failed)} of {len(report.verified)} candidates to verify could not "
        f"be: {failure.message}",
        hint="; ".join(filter(None, hints)),
    )


def _check_writable(path: Path) -> None:
    """Raises CliError for a file that cannot be written: a search is too long to learn it after."""
    folder = path.parent
    if path.is_dir():
        why = "is a directory"
    elif not folder.is_dir():
        why = f"has no directory {str(folder)!r} to be in"
    elif not os.access(folder, os.W_OK):
        why = f"cannot be written to {str(folder)!r}"
    else:
        return
    raise CliError(
        f"--emit got {str(path)!r}, which {why}",
        code="AX804",
        hint="name a file in a directory that can be written to",
    )


def _plan_text(args: argparse.Namespace, report: PlanReport) -> str:
    found = report.plan
    lines = [
        f"{args.experiment} on {found.instance}, by {found.objective}: {len(found.ranked)} "
        f"candidates fit into {found.limit_bytes / _GIB:.1f} GiB a device, "
        f"{len(found.rejected)} do not ({found.seconds:.1f} s)"
    ]
    best = found.ranked[:_SHOWN]
    if best:
        of = peaks({d: rate for r in best for d, rate in r.prediction.peak_flops.items()})
        lines += ["", f"a step, MFU with attention in full {of}, memory of a device:"]
    lines += _table(
        [
            (
                f"{r.prediction.step_seconds:.4g} s",
                f"{r.prediction.mfu_noncausal:.1%}",
                f"{r.prediction.memory.total / _GIB:.2f} GiB",
                f"{r.candidate.describe()}; "
                + (r.reason or f"best, bound by {r.prediction.bound_by}"),
            )
            for r in best
        ]
    )
    if len(found.ranked) > _SHOWN:
        lines.append(f"  and {len(found.ranked) - _SHOWN} slower ones (--json has all)")
    lines += _rejections(report)
    for v in report.verified:
        name = found.ranked[v.number].candidate.describe()
        if v.fits is None:
            lines.append(f"not verified: {name}: {v.reason}")
            continue
        if v.reason:
            lines.append(f"refused: {name}: {v.reason}")
            continue
        needed = "" if v.needed_bytes is None else f", needs {v.needed_bytes / _GIB:.2f} GiB"
        fits = "fits" if v.fits else "does not fit"
        seconds = f"{v.compile_seconds or 0:.1f} s"
        lines.append(f"compiled: {name}: {fits}{needed} ({seconds})")
    if report.chosen is None:
        lines.append(_nothing(report))
    else:
        chosen = report.chosen.candidate
        unverified = any(
            v.fits is None and found.ranked[v.number].candidate == chosen for v in report.verified
        )
        note = " (by prediction alone: it was not verified, see above)" if unverified else ""
        lines += ["", f"chosen: {chosen.describe()}{note}"]
        lines.append(
            f"the rule is in {args.emit}: give it with --rules {args.emit}"
            if args.emit
            else "--emit FILE writes it as a rule"
        )
    return "\n".join(lines)


def _nothing(report: PlanReport) -> str:
    """Returns what to do when there is no candidate."""
    refused = [v for v in report.verified if v.fits is False]
    if refused or any(_for_memory(rejected.reason) for rejected in report.plan.rejected):
        return "nothing fits: take a larger machine, or a smaller batch_size or seq_len"
    if report.plan.rejected:
        return "no mesh works: change what the reasons above name"
    return (
        "no mesh works: the devices do not divide the rows, layers and tensors of the model; take "
        "another number of devices or another batch_size"
    )


def _for_memory(reason: str) -> bool:
    return "GiB" in reason


def _rejections(report: PlanReport) -> list[str]:
    """Returns a line for the nearest miss of each kind of reason."""
    kinds: dict[str, tuple[int, str]] = {}
    for rejected in report.plan.rejected:
        kind = (
            rejected.reason.rpartition(" for ")[2] if _for_memory(rejected.reason) else "the mesh"
        )
        count, example = kinds.get(kind, (0, f"{rejected.candidate.describe()}: {rejected.reason}"))
        kinds[kind] = (count + 1, example)
    return [
        f"rejected for {kind}: {count}, such as {example}"
        for kind, (count, example) in sorted(kinds.items(), key=lambda item: -item[1][0])
    ]


def _compare(args: argparse.Namespace) -> CommandResult:
    from axcore.cli._jax import jax_started
    from axcore.train import compare, parse_prices

    single = {
        "--emit": args.emit is not None,
        "--quantize": bool(args.quantize),
        "--verify": args.verify is not None,
        "--objective memory": args.objective == "memory",
    }
    for flag, given in single.items():
        if given:
            raise CliError(
                f"{flag} needs one instance, got --instance any",
                code="AX804",
                hint="choose a machine from the comparison first",
            )
    prices = parse_prices(args.price)
    with jax_started(cache=False):
        found = compare(lambda name: assembled(args, instance=name), prices=prices, progress=say)
    data: dict[str, Any] = {
        "experiment": args.experiment,
        "instance": _ANY,
        "compared": [row.to_json() for row in found],
    }
    return CommandResult(data, _compare_text(found), 0)


def _compare_text(found: tuple[Compared, ...]) -> str:
    lines = ["each machine as its own rule uses it, cheapest tokens first:", ""]
    for row in found:
        if row.prediction is None:
            continue
        usd = row.usd_per_million_tokens
        cost = "no price (--price)" if usd is None else f"{usd:.4f} USD/M tokens"
        p = row.prediction
        devices = 1e6 * row.devices / p.tokens_per_second
        lines += _table(
            [
                (
                    row.instance.ljust(28),
                    cost,
                    f"{devices:,.1f} device-s/M tokens",
                    f"{p.step_seconds:.3g} s a step, MFU {p.mfu_noncausal:.1%} of "
                    f"{'/'.join(p.peak_flops)}, "
                    f"{p.memory.total / _GIB:.1f} GiB",
                )
            ]
        )
    missing = [(row.instance, row.reason) for row in found if row.prediction is None]
    if missing:
        lines += ["", "not possible:", rows(missing)]
    return "\n".join(lines)


def _table(cells: list[tuple[str, ...]]) -> list[str]:
    """Returns rows whose columns are aligned."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))] if cells else []
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
