"""What a command returns, and the flags that every command takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = Any

__all__ = ["CommandResult", "Subparsers", "add_command"]


@dataclass(frozen=True)
class CommandResult:
    """The outcome of a command; the program prints one of its two forms.

    Attributes:
        data: The JSON document of ``--json``; numbers that JSON lacks are written as null.
        text: What people see on stdout otherwise.
        exit_code: 0 finished, 2 the user can fix it, 3 does not fit, 4 failed, 5 resumable.
    """

    data: Any
    text: str
    exit_code: int = 0


def add_command(
    subparsers: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], CommandResult],
    *,
    help: str,
    example: str,
) -> argparse.ArgumentParser:
    """Adds a command with the flags that all commands share; ``args.run`` carries it out.

    Args:
        subparsers: Where to add it.
        name: The command's name.
        run: Carries out the command.
        help: One line, in lower case, without a full stop.
        example: A command line for ``--help``; several are separated by newlines.

    Returns:
        The parser, to which the command adds its own arguments.
    """
    lines = example.splitlines()
    parser = subparsers.add_parser(
        name,
        help=help,
        description=f"{help[:1].upper()}{help[1:]}.",
        epilog="\n  ".join(["examples:", *lines]) if len(lines) > 1 else f"example: {example}",
    )
    shared = parser.add_argument_group("flags of every command")
    shared.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    shared.add_argument("--debug", action="store_true", help="show tracebacks")
    shared.add_argument("--no-plugins", action="store_true", help="run with core alone")
    shared.add_argument(
        "--trust",
        metavar="PACKAGE",
        action="append",
        default=[],
        help="let config texts name things of this package too; repeatable",
    )
    parser.set_defaults(run=run, parser=parser)
    return parser
