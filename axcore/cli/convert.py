"""``axcore convert``: foreign models in, foreign models out."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axcore.cli._experiment import rows
from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import CliError

if TYPE_CHECKING:
    from axcore.checkpoint.convert import ConversionReport, Progress

__all__ = ["add_parser", "convert"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SHOW_AFTER_SECONDS = 2.0


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``convert``."""
    command = add_command(
        subparsers,
        "convert",
        convert,
        help="turn another framework's model into a model directory, or the reverse",
        example="axcore convert downloads/a-model --out models/a-model\n"
        "axcore convert a-model.Q4_K_M.gguf --out models/a-model --json\n"
        "axcore convert --export hf runs/a-model --out exported",
    )
    command.add_argument(
        "source",
        metavar="SRC",
        help="a directory with config.json and safetensors, a .gguf or .npz file; "
        "with --export: a model directory",
    )
    command.add_argument(
        "--out", metavar="DIR", required=True, help="the directory to write; must not exist"
    )
    command.add_argument(
        "--export",
        metavar="FORMAT",
        choices=("hf",),
        help="write another framework's format instead: hf (safetensors, config.json, tokenizer)",
    )
    command.add_argument(
        "--format", choices=("hf", "gguf", "npz"), help="what SRC is (default: by its name)"
    )
    command.add_argument(
        "--family",
        metavar="NAME",
        help="the converter (default: by the architecture that SRC states)",
    )
    command.add_argument(
        "--dtype",
        metavar="DTYPE",
        help="dtype of the parameters: float32, bfloat16, float16, or source (default: float32; "
        "with --export: as stored)",
    )
    command.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="use this tokenizer instead of SRC's: a registered name such as byte, or the path of "
        "one",
    )
    command.add_argument(
        "--allow",
        metavar="PATTERN",
        action="append",
        default=[],
        help="tensors of SRC that may stay unused, or parameters of ours that may be missing; "
        "repeatable",
    )
    command.add_argument(
        "--allow-nan", action="store_true", help="take values that are NaN or infinite as they are"
    )
    command.add_argument(
        "--verify",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether to run SRC and compare its outputs (default: if it is small enough)",
    )
    command.add_argument(
        "--step", metavar="N", type=int, help="with --export: a saved step (default: the newest)"
    )
    command.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default="5GB",
        help="with --export: split files from this size on (default: 5GB)",
    )


def convert(args: argparse.Namespace) -> CommandResult:
    """Converts.

    Raises:
        CliError: A flag has a wrong value, or is one of the other direction.
        AxcoreError: The source is damaged, unknown or unsafe, or cannot be converted.
    """
    _check_flags(args)
    shard_bytes = _size(args.max_shard_size)
    from axcore.cli._jax import jax_started

    with jax_started(), _progress() as progress:
        report = _run(args, shard_bytes, progress)
    where = str(Path(args.out) / "conversion.json")
    data = {
        "tensors": len({name for m in report.mapped for name in m.foreign}),
        "max_abs_logit_difference": report.comparison.max_abs_difference,
        "report": where,
        "comparison": {
            "reason": report.comparison.reason,
            "max_abs_output": report.comparison.max_abs_output,
            "same_top": report.comparison.same_top,
        },
        "family": report.family["name"],
        "parameters": len({path for m in report.mapped for path in m.path}),
        "unused": list(report.unused),
        "unmapped": list(report.unmapped),
        "settings_unread": list(report.settings_unread),
        "out": args.out,
    }
    return CommandResult(data, _text(args, report, data))


def _run(args: argparse.Namespace, shard_bytes: int, progress: Progress) -> ConversionReport:
    from axcore.checkpoint import convert as engine

    if args.export:
        return engine.export(
            args.source,
            args.out,
            format=args.export,
            family=args.family,
            dtype=args.dtype,
            step=args.step,
            max_shard_bytes=shard_bytes,
            verify=args.verify,
            trusted=args.trust,
            progress=progress,
        )
    return engine.convert(
        args.source,
        args.out,
        format=args.format,
        family=args.family,
        dtype=args.dtype,
        tokenizer=_tokenizer(args.tokenizer, args.trust),
        allow=args.allow,
        allow_nan=args.allow_nan,
        verify=args.verify,
        progress=progress,
    )


def _check_flags(args: argparse.Namespace) -> None:
    """Flags of the other direction are refused rather than ignored."""
    importing = {
        "--format": args.format,
        "--tokenizer": args.tokenizer,
        "--allow": args.allow,
        "--allow-nan": args.allow_nan,
    }
    exporting = {"--step": args.step, "--max-shard-size": args.max_shard_size != "5GB"}
    wrong = importing if args.export else exporting
    for flag, value in wrong.items():
        if value not in (None, False, []):
            needs = "is not for --export" if args.export else "needs --export"
            raise CliError(f"{flag} {needs}", code="AX858", hint="leave it out")


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match and match[2] != "B" else 0
    if match and match[2] == "B":
        size = int(float(match[1]))
    if size < 1:
        raise CliError(
            f"--max-shard-size is {text!r}, expected a size", code="AX858", hint="such as 5GB"
        )
    return size


def _tokenizer(name: str | None, trusted: list[str]) -> Any:
    if name is None:
        return None
    from axcore.data import find_tokenizer
    from axcore.plugins import host

    registry = host().tokenizers
    if name in registry:
        return registry.load(name).Config().instantiate()
    if not Path(name).exists() and "/" not in name:
        registry.get(name)  # raises with the known names
    return find_tokenizer(name, (*host().trusted_packages(), *trusted))


@contextmanager
def _progress() -> Iterator[Progress]:
    """Shows a bar on stderr, where that is a terminal, once it takes more than two seconds."""
    if not sys.stderr.isatty():
        yield lambda done, total, name: None
        return
    from rich import progress as bars
    from rich.console import Console

    bar = bars.Progress(
        bars.TextColumn("{task.fields[name]}"),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    task = bar.add_task("", total=None, name="")
    begin = time.monotonic()

    def show(done: int, total: int, name: str) -> None:
        if not bar.live.is_started and time.monotonic() - begin > _SHOW_AFTER_SECONDS:
            bar.start()
        bar.update(task, completed=done, total=total, name=name)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def _text(args: argparse.Namespace, report: ConversionReport, data: dict[str, Any]) -> str:
    found = report.comparison
    if found.max_abs_difference is None:
        evidence = f"not compared: {found.reason}"
    else:
        evidence = (
            f"{found.max_abs_difference:.3g} at most (outputs reach {found.max_abs_output:.3g})"
        )
    facts = [
        ("converter", report.family["name"]),
        ("tensors", f"{data['tensors']:,} foreign, {data['parameters']:,} of ours"),
        ("difference of outputs", evidence),
    ]
    if report.direction == "import":
        made = report.tokenizer
        facts.append(("tokenizer", "none" if made is None else str(made["class"])))
    facts += [
        (what, ", ".join(names))
        for what, names in (
            ("left unused", report.unused),
            ("kept at initial values", report.unmapped),
            ("settings not looked at", report.settings_unread),
        )
        if names
    ]
    lines = [f"converted: {args.source} -> {args.out}", rows(facts), f"evidence: {data['report']}"]
    if report.direction == "import" and report.tokenizer is not None:
        out = shlex.quote(args.out)
        lines += ["", f'try: axcore generate --from {out} --prompt "The " --max-tokens 50']
    return "\n".join(lines)
