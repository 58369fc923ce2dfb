"""A directory that appears whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from axcore._files import locked, sync_directory
from axcore.checkpoint import _failure
from axcore.errors import CheckpointError

__all__ = ["check_new", "new_directory"]

_LOCK = ".lock"


@contextlib.contextmanager
def new_directory(out: Path, *, size_bytes: int = 0) -> Iterator[Path]:
    """Yields ``OUT.partial``, which becomes ``OUT`` when all went well; else nothing is left.

    Args:
        out: The directory to make.
        size_bytes: About how much will be written.

    Raises:
        CheckpointError: It exists (AX618), another process is writing it (AX618), the disk is full
            (AX602), or it cannot be written (AX618).
    """
    check_new(out)
    partial = out.with_name(f"{out.name}.partial")
    made = [parent for parent in reversed(out.parents) if not parent.exists()]
    try:
        with contextlib.ExitStack() as held:
            try:
                partial.mkdir(parents=True, exist_ok=True)
                if not held.enter_context(_alone(partial)):
                    raise CheckpointError(
                        "another process is writing it",
                        code="AX618",
                        where=str(partial),
                        hint="wait until it has ended, or choose another --out",
                    )
                _clear(partial)
            except OSError as error:
                raise _unwritable(out, error) from error
            try:
                if (free := _failure.free_bytes(out.parent)) < size_bytes:
                    raise CheckpointError(
                        f"the disk is full: {size_bytes:,} bytes are needed, {free:,} are free",
                        code="AX602",
                        where=str(out),
                        hint="free some space, or choose another --out",
                    )
                yield partial
                (partial / _LOCK).unlink()
                check_new(out)
                partial.rename(out)
                sync_directory(out.parent)
            except OSError as error:
                shutil.rmtree(partial, ignore_errors=True)
                raise _unwritable(out, error) from error
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
    except BaseException:
        for parent in reversed(made):
            with contextlib.suppress(OSError):  # someone else has put something there
                parent.rmdir()
        raise


def check_new(out: Path) -> None:
    """Raises CheckpointError when ``out`` exists, or nothing can have its name."""
    try:
        exists = out.is_symlink() or out.exists()
    except OSError as error:  # a name that is too long
        raise _unwritable(out, error) from error
    if exists:
        raise CheckpointError(
            "the output directory exists already; nothing was written",
            code="AX618",
            where=str(out),
            hint="choose another --out, or move it away",
        )


@contextlib.contextmanager
def _alone(partial: Path) -> Iterator[bool]:
    foreign = any(path.name != _LOCK for path in partial.iterdir())
    if foreign and not (partial / _LOCK).exists():
        raise CheckpointError(
            "it holds files that are not ours",
            code="AX618",
            where=str(partial),
            hint="move it away: it is where the output is written first",
        )
    with locked(partial / _LOCK) as got:
        yield got


def _clear(partial: Path) -> None:
    """Removes what a conversion that was killed has left."""
    for path in partial.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


def _unwritable(out: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"the output directory cannot be written: {error.strerror or error}",
        code="AX618",
        where=str(out),
        hint="check the permissions and the free space, or choose another --out",
    )
