"""``axcore train``: run an experiment to its end, from its newest checkpoint if there is one."""

from __future__ import annotations

import argparse
import shlex
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
from axcore.cli._parser import named
from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import CliError

__all__ = ["add_parser", "train"]

_STOPPED = 5


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``train``."""
    command = add_command(
        subparsers,
        "train",
        train,
        help="train an experiment, or go on with it",
        example="axcore train tiny-lm --out runs/tiny-lm\n"
        "axcore train tiny-lm --out runs/wide --set model.model_dim=128 --max-step 500",
    )
    add_experiment(command)
    command.add_argument(
        "--out",
        metavar="DIR",
        type=named,
        required=True,
        help="the run's directory; given again, the run goes on from its newest checkpoint",
    )
    command.add_argument("--max-step", metavar="N", type=int, help="steps of the whole run")
    command.add_argument(
        "--extend", action="store_true", help="go on to a higher --max-step than the run had"
    )
    command.add_argument(
        "--init-from",
        metavar="DIR",
        type=named,
        help="start a new run with the parameters of a model directory",
    )
    add_edits(command)
    add_instance(command)


def train(args: argparse.Namespace) -> CommandResult:
    """Trains.

    Raises:
        CliError: ``--max-step`` is not positive.
        AxcoreError: Whatever the run meets.
    """
    sets: tuple[str, ...] = ()
    if args.max_step is not None:
        if args.max_step < 1:
            raise CliError(
                f"--max-step is {args.max_step}, expected 1 or more",
                code="AX830",
                hint="leave it out to train for as long as the experiment says",
            )
        sets = (f"max_step={args.max_step}",)
    again = shlex.join(["axcore", *args.argv])
    try:
        with _sigterm_interrupts():
            from axcore.cli._jax import can_keep, jax_started
            from axcore.train import train as run

            a = assembled(args, sets=sets)
            with jax_started(cache=can_keep(a.instance)):
                result = run(
                    a.cfg,
                    out=args.out,
                    instance=a.instance,
                    extend=args.extend,
                    notes={"rules": a.rules.to_json()},
                    init_from=args.init_from,
                )
    except KeyboardInterrupt:
        # Before the first step, or after the last: what is saved is all there is.
        raise CliError(
            "interrupted outside of the training steps",
            code="AX831",
            hint=f"to start or go on: {again}",
            exit_code=_STOPPED,
        ) from None
    report = result.report
    if result.stopped_by is not None:
        text = (
            f"stopped by {result.stopped_by} after step {report['step']} of {report['max_step']}, "
            f"saved in {args.out}\nto continue: {again}"
        )
        if args.json:
            say(text)  # whoever sent the signal looks at the log
        return CommandResult({**report, "continue": again}, text, _STOPPED)
    return CommandResult(report, _text(report))


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Makes SIGTERM end the command like Ctrl-C where the training loop does not handle it."""

    def interrupt(number: int, frame: Any) -> None:
        del number, frame
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _text(report: Mapping[str, Any]) -> str:
    """Returns what people see when a run has finished."""
    out = report["out"]
    lines = [f"finished: step {report['step']} of {report['max_step']}"]
    facts: list[tuple[str, str]] = []
    if report["loss"] is not None:
        facts.append(("training loss", f"{report['loss']:.4f} nats per token"))
    facts += _quality(report)
    if report["tokens_per_second"]:
        facts.append(("speed", _speed(report)))
    if report["step_seconds"]:
        facts.append(
            (
                "time",
                f"{report['step_seconds'] * 1e3:.1f} ms per step, "
                f"{report['compile_seconds']:.1f} s compiling",
            )
        )
    lines.append(rows(facts))
    sample = report.get("sample")
    if sample:
        lines += ["", f"a continuation of {sample['prompt']!r}:"]
        text = "".join(map(_printable, sample["prompt"] + sample["text"]))
        lines += [f"  | {line}" for line in text.split("\n")]
    lines += ["", f"all of it is in {out}:", rows(_places(report))]
    missing = _missing(report)
    if missing:
        lines += ["", "not written:", *(f"  {line}" for line in missing)]
    place = shlex.quote(out)
    lines.append("")
    if sample:
        lines.append(f'try: axcore generate --from {place} --prompt "The " --max-tokens 50')
    else:  # encoders and models of images make no text
        lines.append(f"try: axcore eval --from {place}")
    return "\n".join(lines)


def _speed(report: Mapping[str, Any]) -> str:
    """Returns tokens per second and both MFUs, which differ by the attention that a mask hides."""
    parts = [f"{report['tokens_per_second']:,.0f} tokens/s"]
    if (each := report["tokens_per_second_per_device"]) is not None:
        parts.append(f"{each:,.0f} per device")
    shares = report["mfu"]
    if shares["causal"] is not None:
        parts.append(
            f"MFU {100 * shares['causal']:.1f} % (causal), "
            f"{100 * shares['noncausal']:.1f} % (noncausal) {peaks(report['peak_flops'])}"
        )
    if report["bound_by"] is not None:
        parts.append(f"expected to be bound by {report['bound_by']}")
    return ", ".join(parts)


def _printable(char: str) -> str:
    """Returns a character that does no harm to a terminal: a young model writes any byte."""
    return char if char.isprintable() or char in "\n\t" else "\ufffd"


def _quality(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    bits = report["eval"].get("bits_per_byte")
    if bits is None:
        return []
    reference = report.get("reference") or {}
    beside = ""
    if reference:
        beside = (
            f"  (xz {reference['xz_bits_per_byte']:.2f}, "
            f"uniform {reference['uniform_bits_per_byte']:.2f})"
        )
    return [("held-out bits per byte", f"{bits:.3f}{beside}")]


def _places(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    places = [
        ("config.txt", "the config it ran with"),
        ("checkpoints/", "saved steps; `eval`, `generate` and `train` read them"),
        ("tokenizer/", "what makes tokens of text"),
        ("metrics.jsonl", "one line per logged step"),
        ("report.json", "the numbers above and more"),
    ]
    if not _plot_reason(report):
        places.append(("plots/loss.png", "the loss curve"))
    if "tensorboard" not in report["failed_writers"]:
        places.append(("tensorboard/", "for `tensorboard --logdir`"))
    return places


def _missing(report: Mapping[str, Any]) -> list[str]:
    """Returns what was not written, why, and what to install."""
    lines = [f"{name}: {reason}" for name, reason in report["failed_writers"].items()]
    plot = _plot_reason(report)
    return [*lines, f"plots/loss.png: {plot}"] if plot else lines


def _plot_reason(report: Mapping[str, Any]) -> str:
    plot = str(report.get("plot") or "")
    return "" if plot.endswith("loss.png") else plot
