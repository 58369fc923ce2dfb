"""The argument parser: usage errors are errors like any other, with near misses."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from axcore.errors import CliError, did_you_mean

__all__ = ["Parser", "named", "parse"]

_CHOICE = re.compile(r"invalid choice: '(?P<got>[^']*)' \(choose from (?P<known>.*)\)")
_OPTION = re.compile(r"--[a-z][a-z-]*")


class _StoreOnce(argparse.Action):
    """Stores the value of a flag that has one: the last of two would win without a word."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, Parser)
        if option_string is not None:  # not an argument without a flag
            if self in parser.stored:
                raise CliError(
                    f"{option_string} is given twice: {parser.stored[self]!r}, then {values!r}",
                    code="AX983",
                    hint=f"give {option_string} once",
                )
            parser.stored[self] = values
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Raises CliError instead of printing and exiting; options are written out in full.

    A flag that takes one value is given once; repeatable ones say ``action="append"``.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **kwargs)
        self._given: list[str] = []
        self.stored: dict[argparse.Action, Any] = {}
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        """Parses, and remembers what was given, to name a misspelt flag that was required."""
        self._given = list(args or ())
        self.stored = {}
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises the error of a wrong command line."""
        hint = ""
        choice = _CHOICE.search(message)
        if message.startswith("the following arguments are required"):
            known = _options(self)
            words = [word.partition("=")[0] for word in self._given if word.startswith("--")]
            guesses = [did_you_mean(word, known) for word in words if word not in known]
            hint = next(filter(None, guesses), "")
        if choice is not None:
            known = [name.strip().strip("'") for name in choice["known"].split(",")]
            hint = did_you_mean(choice["got"], known)
        raise CliError(message, code="AX800", hint=hint or f"see `{self.prog} --help`")


def named(text: str) -> str:
    """Returns an argument that must not be empty, as one from an unset shell variable is."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty (a shell variable that is not set?)")
    return text


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """Returns the parsed command line.

    Raises:
        CliError: It is wrong; an unknown option comes with near misses.
    """
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command: argparse.ArgumentParser = getattr(args, "parser", parser)
        known = _options(command)
        option = unknown[0].partition("=")[0]
        raise CliError(
            f"unknown argument {unknown[0]!r}",
            code="AX800",
            hint=f"give {option} after the command: `{command.prog} {option}`"
            if option in known
            else did_you_mean(option, known) or f"see `{command.prog} --help`",
        )
    return args


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return sorted(set(_OPTION.findall(parser.format_usage())))
