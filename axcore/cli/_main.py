"""Finds the command, runs it, prints what it returns or why it failed."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import axcore
from axcore.cli._parser import Parser, parse
from axcore.cli._result import CommandResult
from axcore.errors import CliError, did_you_mean

__all__ = ["main"]

# name -> (module with add_parser, one line for --help). The module is imported when it is needed.
COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("axcore.cli.train", "train an experiment, or go on with it"),
    "aot": ("axcore.cli.aot", "compile a training step for a machine that need not be here"),
    "plan": ("axcore.cli.plan", "find the mesh, remat and microbatches that suit a machine"),
    "kernels": ("axcore.cli.kernels", "list kernels, and explain which ones serve a program"),
    "eval": ("axcore.cli.eval", "evaluate a model directory"),
    "generate": ("axcore.cli.generate", "continue a text with a model directory"),
    "tokenizer": ("axcore.cli.tokenizer", "train a tokenizer, and see what tokens it makes"),
    "convert": ("axcore.cli.convert", "turn another framework's model into ours, or ours into it"),
    "peft": ("axcore.cli.peft", "merge, export and attach trained adapters"),
    "quantize": ("axcore.cli.quantize", "store a trained model in few bits, to serve it"),
    "config": ("axcore.cli.config", "show, compare and explain configs"),
    "loc": ("axcore.cli.loc", "measure the lines of code that adding a feature changes"),
    "plugins": ("axcore.cli.plugins", "list, inspect, check and start plugins"),
    "doctor": ("axcore.cli.doctor", "show what is installed, what works and what to fix"),
}
_EPILOG = """\
example: axcore train tiny-lm --out runs/tiny-lm

`axcore COMMAND --help` shows a command's arguments and an example. Plugins may add commands:
`axcore plugins list` names them (this help imports no plugin, so that it stays quick)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
        argv: The arguments; None takes the process's.

    Returns:
        The exit code.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in argv
    from axcore.cli._console import console

    with console(debug="--debug" in argv):
        try:
            with _stdout_kept(as_json):
                parser = _parser(argv)
            try:
                args = parse(parser, argv)
            except SystemExit as error:  # --help and --version
                return error.code if isinstance(error.code, int) else 0
            args.argv = argv
            with _stdout_kept(as_json):
                if args.no_plugins:
                    _switch_off_plugins()
                result: CommandResult = args.run(args)
            _print(_json_text(result.data) if as_json else result.text)
            return result.exit_code
        except BrokenPipeError:
            # The reader has seen enough. Python flushes stdout at exit: give it somewhere to go.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            from axcore.cli._failures import Failure

            failure = Failure.of(error)
            if as_json:
                _print(_json_text({"error": failure.to_json()}))
            failure.print(traceback_of=error if "--debug" in argv else None)
            return failure.exit_code


def _parser(argv: Sequence[str]) -> Parser:
    """Returns the parser, with the arguments of the given command only."""
    parser = Parser(
        prog="axcore",
        description="Train and serve large models on any hardware that JAX runs on.",
        epilog=_EPILOG,
    )
    parser.add_argument("-V", "--version", action="version", version=f"axcore {axcore.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    given = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, help_line) in COMMANDS.items():
        if name == given:
            importlib.import_module(module).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=help_line)
    if given is not None and given not in COMMANDS:
        _add_plugin_command(subparsers, given, argv)
    return parser


def _add_plugin_command(subparsers: Any, name: str, argv: Sequence[str]) -> None:
    """Adds a plugin's command; plugins are imported only for a name that core does not know."""
    from axcore.plugins import host

    if "--no-plugins" in argv:
        _switch_off_plugins()
    commands = host().commands
    if name in commands:
        commands.load(name)(subparsers)
        return
    known = [*COMMANDS, *commands.names()]
    failed = [r.label for r in host().records if r.status not in ("active", "disabled")]
    hints = [did_you_mean(name, known)]
    hints += [f"plugins that are not active: {', '.join(failed)}"] if failed else []
    raise CliError(
        f"no command {name!r}; known: {', '.join(known)}",
        code="AX800",
        hint="; ".join(h for h in hints if h)
        or "see `axcore --help`; plugins add commands, and are distributions of their own (keyword "
        "axcore): `axcore plugins list` shows the installed ones",
    )


def _switch_off_plugins() -> None:
    from axcore.plugins import switch_off_plugins

    switch_off_plugins()


def _stdout_kept(as_json: bool) -> contextlib.AbstractContextManager[Any]:
    """Keeps stdout for the JSON document: what anyone else prints goes to stderr."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _json_text(data: Any) -> str:
    return json.dumps(_plain(data), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    """Returns a value in JSON's types; what JSON lacks is null or text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(_plain(item) for item in value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
