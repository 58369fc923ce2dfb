"""``axcore config``: show, compare, explain and pin configs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axcore.cli._experiment import (
    add_edits,
    add_experiment,
    add_instance,
    assembled,
    edited_config,
)
from axcore.cli._result import CommandResult, Subparsers, add_command
from axcore.errors import CliError

if TYPE_CHECKING:
    from axcore.train import Trainer

__all__ = ["add_parser", "diff", "explain", "golden", "show"]

_SHOWN = 10


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``config show|diff|explain|golden``."""
    parser = subparsers.add_parser("config", help="show, compare and explain configs")
    inner = parser.add_subparsers(dest="config_command", required=True, metavar="COMMAND")
    command = add_command(
        inner,
        "show",
        show,
        help="print an experiment's config; with --json who set each value",
        example="axcore config show tiny-lm --set batch_size=2\n"
        "axcore config show tiny-lm --instance cpu-8 --json",
    )
    command.add_argument(
        "experiment",
        metavar="EXP",
        nargs="?",
        help="a catalog name, package.module:function, or a config text file",
    )
    add_edits(command)
    add_instance(command, default="none: no machine's rule is applied")
    command = add_command(
        inner,
        "diff",
        diff,
        help="print what differs between two experiments",
        example="axcore config diff tiny-lm runs/wide/config.txt",
    )
    add_experiment(command, "first")
    add_experiment(command, "second")
    add_edits(command)
    command = add_command(
        inner,
        "explain",
        explain,
        help="print every value with who set it, for a machine",
        example="axcore config explain tiny-lm --instance cpu-8 --set batch_size=16",
    )
    add_experiment(command)
    add_edits(command)
    add_instance(command)
    command = add_command(
        inner,
        "golden",
        golden,
        help="write a config's text to a file, or check it against one",
        example="axcore config golden tiny-lm --out golden/tiny-lm.txt\n"
        "axcore config golden tiny-lm --check golden/tiny-lm.txt",
    )
    add_experiment(command)
    where = command.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", metavar="FILE", help="write the text here")
    where.add_argument("--check", metavar="FILE", help="exit with 2 if the text differs from this")
    add_edits(command)
    add_instance(command, default="none: no machine's rule is applied")


def show(args: argparse.Namespace) -> CommandResult:
    """Shows a config.

    Raises:
        CliError: No experiment is named; the error lists the catalog.
    """
    if args.experiment is None:
        from axcore import experiments

        raise CliError(
            f"no experiment given; known: {', '.join(experiments.names())}",
            code="AX800",
            hint=f"for example: axcore config show {experiments.names()[0]}",
        )
    from axcore.cli._explain import fields

    cfg = _config(args)
    return CommandResult({"fields": fields(cfg)}, cfg.to_text().rstrip("\n"))


def diff(args: argparse.Namespace) -> CommandResult:
    """Compares two configs; edits of the flags are made to the second."""
    from axcore import config

    first = edited_config(args, args.first, flags=False)
    found = config.diff(first, edited_config(args, args.second))
    data = {
        "differences": {path: {"first": old, "second": new} for path, (old, new) in found.items()}
    }
    lines = [_difference(path, old, new) for path, (old, new) in found.items()]
    return CommandResult(data, "\n".join(lines) or "no differences")


def explain(args: argparse.Namespace) -> CommandResult:
    """Explains every value of a config on a machine."""
    from axcore.cli import _explain

    a = assembled(args)
    data = _explain.explained(a)
    return CommandResult(data, _explain.text(data))


def golden(args: argparse.Namespace) -> CommandResult:
    """Writes or checks a golden file.

    Raises:
        CliError: The file differs, cannot be read, or is no config text and would be overwritten.
    """
    text = _config(args).to_text()
    if args.out is not None:
        return _write(Path(args.out), text)
    from axcore.train.rundir import text_changes

    path = Path(args.check)
    changes = text_changes(_read(path), text)
    if changes:
        more = len(changes) - _SHOWN
        shown = "; ".join(map(str, changes[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")
        raise CliError(
            f"the config differs from the golden text: {shown}",
            code="AX841",
            where=str(path),
            hint="if that is meant, write it anew with --out in place of --check",
        )
    return CommandResult({"file": str(path), "matches": True}, f"{path} matches")


def _config(args: argparse.Namespace) -> Trainer.Config:
    if args.instance is None and args.rules is None:
        return edited_config(args)
    from axcore.train.assemble import check_layout

    a = assembled(args)
    check_layout(a)
    return a.cfg


def _difference(path: str, old: str | None, new: str | None) -> str:
    name = path or "(type)"
    if old is None:
        return f"{name}: {new} (only in the second)"
    return f"{name}: {old} (only in the first)" if new is None else f"{name}: {old} -> {new}"


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CliError(
            f"the golden text cannot be read: {reason}",
            code="AX840",
            where=str(path),
            hint="write it first, with --out in place of --check",
        ) from error


def _write(path: Path, text: str) -> CommandResult:
    from axcore._files import atomic_write

    if path.exists() and (path.is_dir() or not _read(path).startswith("config(")):
        raise CliError(
            "this is no config text, so it was left alone",
            code="AX842",
            where=str(path),
            hint="choose another file, or remove it first",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, text)
    data: dict[str, Any] = {"file": str(path), "lines": len(text.splitlines())}
    return CommandResult(data, f"wrote {data['lines']} lines to {path}")
