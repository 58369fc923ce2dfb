"""The program ``axcore``: one thin module per command, imported only when that command is given.

A plugin adds a command with the hook ``axcore_commands``; its target is a function
``add_parser(subparsers)`` that calls :func:`add_command` and returns nothing::

    def add_parser(subparsers):
        command = add_command(subparsers, "greet", run, help="...", example="axcore greet")
        command.add_argument("name")

    def run(args):
        with jax_started():  # where the command uses JAX
            return CommandResult({"greeted": args.name}, f"hello, {args.name}")

Exit codes: 0 finished; 2 what the user can fix; 3 does not fit; 4 a failed run; 5 stopped before
the end, resumable; 130 interrupted.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from axcore.cli._main import main
from axcore.cli._result import CommandResult, Subparsers, add_command

__all__ = ["CommandResult", "Subparsers", "add_command", "jax_started", "main"]


def jax_started() -> AbstractContextManager[None]:
    """Returns the context that a command's JAX part runs in: with the compile cache on."""
    from axcore.cli import _jax

    return _jax.jax_started()
