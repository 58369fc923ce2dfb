"""What people see on stderr while a command runs. Logging is set up here and nowhere else."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["console", "say"]

# They report on themselves; what matters of it reaches the user as an error of ours.
_QUIET = ("jax", "absl", "orbax", "grain", "matplotlib", "tensorboardX", "etils")


class _Stderr(logging.Handler):
    """Writes to whatever stderr is at that time, so that progress bars can step aside."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def say(text: str) -> None:
    """Writes a line for people to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def console(*, debug: bool = False) -> Iterator[None]:
    """Shows axcore's own log lines and warnings on stderr, and silences other libraries.

    Args:
        debug: Lets the other libraries speak.
    """
    ours = logging.getLogger("axcore")
    handler = _Stderr()
    former = (ours.level, ours.propagate)
    others = [(logging.getLogger(name), logging.getLogger(name).level) for name in _QUIET]
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG if debug else logging.INFO)
    ours.propagate = False
    if not debug:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's C++ side; read when it starts
        for logger, _ in others:
            logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            if not debug:
                warnings.showwarning = _show_warning
            yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(former[0])
        ours.propagate = former[1]
        for logger, level in others:
            logger.setLevel(level)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Shows warnings of ours and of the user's own code in one line each."""
    del lineno, file, line
    is_ours = category.__module__.partition(".")[0] == "axcore"
    if is_ours or (issubclass(category, UserWarning) and "site-packages" not in filename):
        say(f"warning: {' '.join(str(message).split())}")
