"""Errors of axcore: one line that says what was got, what was expected and where, then a hint.

Every error a user can meet derives from :class:`AxcoreError`. The command line prints it as
``error: MESSAGE [CODE]`` and ``hint: HINT``; a traceback appears only with ``--debug``.

Codes are stable: AX1xx config, AX2xx plugins, AX3xx modules, AX4xx ops, AX45x sharding,
AX48x compiling without a device, AX49x predicted step times, AX5xx data, AX6xx checkpoints, AX7xx
training, AX8xx command line and inference.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "AotError",
    "AxcoreError",
    "CheckpointError",
    "CliError",
    "ConfigError",
    "DataError",
    "ModuleError",
    "OpError",
    "PlanError",
    "PluginError",
    "PluginLookupError",
    "ShardingError",
    "TrainError",
    "did_you_mean",
    "near_misses",
]


class AxcoreError(Exception):
    """Base of all errors that a user can cause or fix.

    Args:
        message: What was got and what was expected, in one line.
        code: Stable code such as ``"AX101"``.
        hint: The way out, or None.
        where: Config path, file or plugin; appended to the message when given.
        exit_code: Process exit code (2: the user can fix it; 3: does not fit; 4: a failed run;
            5: stopped before the end, resumable).
    """

    default_code = "AX000"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        hint: str | None = None,
        where: str | None = None,
        exit_code: int = 2,
    ):
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.hint = hint
        self.where = where
        self.exit_code = exit_code

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        text = f"{text} [{self.code}]"
        return f"{text}\nhint: {self.hint}" if self.hint else text

    def __reduce__(self):
        # Keyword-only arguments are lost by the default protocol; worker processes raise these.
        state = dict(code=self.code, hint=self.hint, where=self.where, exit_code=self.exit_code)
        return (_rebuild, (type(self), self.message, state))


def _rebuild(cls: type[AxcoreError], message: str, state: dict[str, object]) -> AxcoreError:
    return cls(message, **state)  # pyright: ignore[reportArgumentType]


class ConfigError(AxcoreError, ValueError):
    """A configuration that cannot be: wrong type, unknown field, missing value (AX1xx)."""

    default_code = "AX100"


class PluginError(AxcoreError, ValueError):
    """A plugin that cannot be used, or two that collide (AX2xx)."""

    default_code = "AX200"


class PluginLookupError(PluginError, LookupError):
    """A name that no active plugin provides (AX2xx)."""

    default_code = "AX201"


class ModuleError(AxcoreError, ValueError):
    """A misuse of modules or contexts (AX3xx)."""

    default_code = "AX300"


class OpError(AxcoreError, ValueError):
    """An operation that no acceptable kernel can serve (AX4xx)."""

    default_code = "AX400"


class ShardingError(AxcoreError, ValueError):
    """A mesh, rule or spec that does not fit (AX45x)."""

    default_code = "AX450"


class AotError(AxcoreError, ValueError):
    """A program that cannot be compiled for a machine that is not here (AX480-489)."""

    default_code = "AX480"


class PlanError(AxcoreError, ValueError):
    """What a planner is asked for and cannot look at (AX446-449)."""

    default_code = "AX446"


class DataError(AxcoreError, ValueError):
    """Input data that cannot be read as asked (AX5xx)."""

    default_code = "AX500"


class CheckpointError(AxcoreError, ValueError):
    """A checkpoint that cannot be saved or restored as asked (AX6xx)."""

    default_code = "AX600"


class TrainError(AxcoreError, ValueError):
    """A training run that cannot start or go on (AX7xx)."""

    default_code = "AX700"


class CliError(AxcoreError, ValueError):
    """A command that cannot be carried out as given (AX8xx)."""

    default_code = "AX800"


def near_misses(name: str, known: Iterable[str]) -> list[str]:
    """Returns up to three known names close to ``name``, best first."""
    return difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns ``"did you mean 'x'?"`` for the nearest known names, or an empty string."""
    found = near_misses(name, known)
    if not found:
        return ""
    return "did you mean " + " or ".join(repr(n) for n in found) + "?"
