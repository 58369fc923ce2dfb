"""From an exception to the one line that a user sees, its hint and the exit code."""

from __future__ import annotations

import dataclasses
import errno
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import axcore
from axcore.errors import AxcoreError

__all__ = ["Failure"]

_MAX_CHARS = 2000
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_ACCESS = {errno.EACCES, errno.EPERM}
_DEBUG_HINT = "--debug shows the traceback"


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a command failed.

    Attributes:
        message: What was got and what was expected, one line.
        code: Stable code.
        hint: The way out, or None.
        where: Config path, file or plugin, or None.
        exit_code: The process's exit code.
        notes: What exception notes say: module path, shapes, config path.
    """

    message: str
    code: str
    hint: str | None
    where: str | None
    exit_code: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Returns the failure that an exception stands for."""
        notes = tuple(dict.fromkeys(_notes(error)))
        if isinstance(error, AxcoreError):
            return cls(
                _one_line(error.message),
                error.code,
                None if error.hint is None else _one_line(error.hint),
                error.where,
                error.exit_code,
                notes,
            )
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", "AX890", None, None, 130)
        if isinstance(error, SystemExit):  # an experiment or a layer is no program of its own
            code = error.code if isinstance(error.code, int) and error.code else 4
            message = f"the code that was called ends the program: SystemExit({error.code!r})"
            return cls(message, "AX894", _DEBUG_HINT, _users_line(error), code, notes)
        text = _one_line(str(error)) or type(error).__name__
        if isinstance(error, OSError) and error.errno in _DISK | _ACCESS:
            hint = "free some space" if error.errno in _DISK else "check the permissions"
            where = None if error.filename is None else str(error.filename)
            return cls(error.strerror or text, "AX891", hint, where, 2, notes)
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
            hint = "lower batch_size or seq_len, raise accumulation_steps, or use more devices"
            return cls(f"out of memory: {text}", "AX892", hint, None, 3, notes)
        where = _users_line(error)
        if where is not None:  # an experiment, layer or source of the user's raised
            named = f"{type(error).__name__}: {text}"
            return cls(named, "AX893", _DEBUG_HINT, where, 4, notes)
        named = f"internal error: {type(error).__name__}: {text}"
        return cls(named, "AX899", f"{_DEBUG_HINT}; please report it", None, 4, notes)

    def to_json(self) -> dict[str, Any]:
        """Returns the object under ``error`` in the JSON document."""
        return {**dataclasses.asdict(self), "notes": list(self.notes)}

    def print(self, traceback_of: BaseException | None = None) -> None:
        """Writes the failure to stderr, after the traceback if there is one to show."""
        lines: list[str] = []
        if traceback_of is not None:
            lines += "".join(traceback.format_exception(traceback_of)).rstrip().splitlines()
        place = f"{self.where}: " if self.where else ""
        lines.append(f"error: {place}{self.message} [{self.code}]")
        lines += [f"  {note}" for note in self.notes]
        lines += [f"hint: {self.hint}"] if self.hint else []
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_CHARS else f"{line[: _MAX_CHARS - 3]}..."


def _notes(error: BaseException | None) -> list[str]:
    """Returns the notes of an error and of its causes; JAX's remark on its frames is left out."""
    notes: list[str] = []
    while error is not None:
        for note in getattr(error, "__notes__", ()):
            if "JAX has removed its internal frames" not in note:
                notes.append(_one_line(note))
        error = error.__cause__
    return notes


def _users_line(error: BaseException) -> str | None:
    """Returns ``file:line`` of the innermost frame that is neither ours nor an installed one's."""
    paths = sysconfig.get_paths()
    ours = Path(axcore.__file__).parent
    installed = [Path(paths[name]) for name in ("stdlib", "purelib", "platlib")]
    found: str | None = None
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if frame.filename.startswith("<") or "site-packages" in path.parts:
            continue
        if not any(path.is_relative_to(place) for place in (ours, *installed)):
            found = f"{frame.filename}:{frame.lineno}"
    return found
