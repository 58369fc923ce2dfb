"""What to say when a save has failed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from axcore.errors import CheckpointError

__all__ = ["explain", "free_bytes"]

_FULL = ("No space left on device", "Disk quota exceeded", "File too large")
_FULL_ERRNO = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def explain(
    error: BaseException, *, step: int, size_bytes: int, root: Path, last_good: int | None
) -> CheckpointError:
    """Returns the error that a user sees for a failed save.

    Args:
        error: What was raised on the way.
        step: The step that was to be saved.
        size_bytes: Size of its arrays.
        root: Directory of the steps.
        last_good: The newest step that can be restored.
    """
    state = "there is no good checkpoint yet"
    if last_good is not None:
        state = f"step {last_good} is the newest good checkpoint"
    if _is_full(error):
        return CheckpointError(
            f"the disk is full: saving step {step} needs {_size(size_bytes)}, "
            f"{_size(free_bytes(root))} are free; {state}",
            code="AX602",
            where=str(root),
            hint="free some space (or lower checkpointer.keep_last_n), then run the same command "
            "again to go on from there",
        )
    return CheckpointError(
        f"saving step {step} failed: {_first_line(error)}; {state}",
        code="AX601",
        where=str(root),
        hint="run the same command again to go on from there",
    )


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write to the file system of ``path``."""
    while not path.exists():
        path = path.parent
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_full(error: BaseException) -> bool:
    return any(
        (isinstance(e, OSError) and e.errno in _FULL_ERRNO) or any(t in str(e) for t in _FULL)
        for e in _chain(error)
    )


def _size(count: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}" if unit != "bytes" else f"{count} bytes"
        count = count / 1000  # pyright: ignore[reportAssignmentType]
    return f"{count:.3g} GB"


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
