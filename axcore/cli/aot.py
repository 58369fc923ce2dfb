"""``axcore aot``: compile an experiment's training step for a machine that need not be here."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from axcore.cli._console import say
from axcore.cli._experiment import (
    add_edits,
    add_experiment,
    add_instance,
    assembled,
    peaks,
    rows,
)
from axcore.cli._result import CommandResult, Subparsers, add_command

__all__ = ["add_parser", "aot"]

_DOES_NOT_FIT = 3
_SHOWN = 6


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``aot``."""
    command = add_command(
        subparsers,
        "aot",
        aot,
        help="compile a training step for a machine that need not be here: does it fit, how fast",
        example="axcore aot tiny-lm --instance cpu-8\n"
        "axcore aot tiny-lm --instance cpu-8 --set batch_size=512 --no-advice --json",
    )
    add_experiment(command)
    add_edits(command)
    add_instance(command)
    command.add_argument(
        "--stand-in",
        action="store_true",
        help="compile another kernel in place of one that this machine's compiler cannot build",
    )
    command.add_argument(
        "--no-advice", action="store_true", help="try nothing when the step does not fit"
    )
    command.add_argument(
        "--no-cache", action="store_true", help="compile anew, whatever is known from before"
    )


def aot(args: argparse.Namespace) -> CommandResult:
    """Compiles.

    Raises:
        AxcoreError: Whatever cannot be compiled.
    """
    from axcore.cli._jax import aot_cache_dir, jax_started
    from axcore.train import aot as compile_ahead

    a = assembled(args)

    def reassemble(instance: str) -> Any:
        other = argparse.Namespace(**vars(args))
        other.instance = instance
        return assembled(other)

    with jax_started(cache=False):
        report = compile_ahead(
            a,
            experiment=args.experiment,
            stand_in=args.stand_in,
            advice=not args.no_advice,
            cache=None if args.no_cache else aot_cache_dir(),
            progress=say,
            reassemble=reassemble,
        )
    data = report.to_json()
    return CommandResult(data, _text(data), 0 if report.fits else _DOES_NOT_FIT)


def _text(report: Mapping[str, Any]) -> str:
    """Returns what people see."""
    fits = "fits" if report["fits"] else "does not fit"
    if report["with_stand_ins"]:
        fits += " with stand-ins"
    if not report["compiled"]:
        fits += " by the memory model"
    name = f"{report['experiment']}: " if report["experiment"] else ""
    mesh = " ".join(f"{axis}={n}" for axis, n in report["mesh"].items() if n > 1) or "one device"
    memory = report["hbm_bytes"]
    lines = [f"{name}{fits} on {report['instance']} ({report['devices']} devices, {mesh})"]
    lines += ["", f"memory of one device: {_bytes(memory['total'])} needed, "
              f"{_bytes(report['hbm_limit_bytes'])} available"]  # fmt: skip
    kinds = {**memory, "in host memory": report["host_bytes"]}
    lines.append(
        rows(
            [
                (kind.replace("_", " "), _bytes(n))
                for kind, n in kinds.items()
                if kind != "total" and (n or kind in ("parameters", "optimizer"))
            ]
        )
    )
    if report["largest_buffers"]:
        lines += ["", "largest buffers (approximate):"]
        lines.append(rows([_buffer(b) for b in report["largest_buffers"][:_SHOWN]]))
    if report["collectives"]:
        lines += ["", "collectives of a step, bytes on one device:"]
        lines.append(
            rows(
                [
                    (f"{c['kind']} over {c['mesh_axes']}", f"{_bytes(c['bytes'])} in {c['count']}")
                    for c in report["collectives"][:_SHOWN]
                ]
            )
        )
    lines += ["", "FLOPs of a step on all devices:", rows(_flops(report["flops"]))]
    lines += ["", *_prediction(report)]
    for row in report["substituted"]:
        lines.append(
            f"substituted: {row['site']}: {row['compiled']} for {row['op']}.{row['chosen']} "
            f"({row['reason']})"
        )
    lines += ["", *_compiler(report)]
    lines += _advice(report)
    lines += [f"not seen: {line}" for line in report["blind_spots"]]
    lines += [f"note: {line}" for line in report["notes"]]
    return "\n".join(lines)


def _buffer(row: Mapping[str, Any]) -> tuple[str, str]:
    where = row["path"] or "(no module)"
    phase = "" if row["phase"] == "other" else f" {row['phase']}"
    times = f" x {row['count']}" if row["count"] > 1 else ""
    return f"{_bytes(row['bytes'])}{times}", f"{row['shape']} {where}{phase} ({row['op']})"


def _flops(flops: Mapping[str, float]) -> list[tuple[str, str]]:
    return [
        ("model, attention causal", f"{flops['model_causal']:.3e}"),
        ("model, attention in full", f"{flops['model_noncausal']:.3e}"),
        ("hardware", f"{flops['hardware']:.3e} ({flops['recompute']:.3e} recomputed)"),
    ]


def _prediction(report: Mapping[str, Any]) -> list[str]:
    predicted = report["predicted"]
    if predicted is None:
        return []
    return [
        "predicted by the cost model:",
        rows(
            [
                ("step", f"{predicted['step_seconds']:.3f} s, bound by {predicted['bound_by']}"),
                (
                    "tokens/s/device",
                    f"{predicted['tokens_per_second_per_device']:,.0f}",
                ),
                (
                    "MFU",
                    f"{predicted['mfu_causal']:.1%} with attention causal, "
                    f"{predicted['mfu_noncausal']:.1%} in full, {peaks(predicted['peak_flops'])}",
                ),
            ]
        ),
    ]


def _compiler(report: Mapping[str, Any]) -> list[str]:
    compiler = f"{report['compiler']['name']} {report['compiler']['version']}"
    if not report["compiled"]:
        return [f"not compiled ({compiler})"]
    seconds = f"{report['compile_seconds']:.1f} s"
    if report["cached"]:
        return [f"known from an earlier compilation with {compiler} ({seconds} then)"]
    rss = report["compile_peak_rss_bytes"]
    memory = "" if rss is None else f", {_bytes(rss)} of this machine's memory"
    return [f"compiled with {compiler} in {seconds}{memory}"]


def _advice(report: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for knob in report["advice"]:
        sets = " ".join(f"--set {text}" for text in knob["sets"])
        needed = "" if knob["needed_bytes"] is None else f", needs {_bytes(knob['needed_bytes'])}"
        outcome = {True: "fits", False: "does not fit", None: f"failed: {knob['error']}"}
        lines.append(f"tried: {sets} ({knob['reason']}): {outcome[knob['fits']]}{needed}")
    if report["advice"] and not any(knob["fits"] for knob in report["advice"]):
        lines.append("nothing that was tried makes it fit")
    if report["smallest_instance"]:
        lines.append(
            f"by the memory model the smallest of the family that fits is "
            f"{report['smallest_instance']}"
        )
    return lines


def _bytes(count: int) -> str:
    """Returns bytes in the unit that reads best."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:,.0f} B" if unit == "B" else f"{value:,.2f} {unit}"
