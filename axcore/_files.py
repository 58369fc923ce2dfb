"""Files that survive a kill: written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["atomic_write", "locked", "sync_directory"]


def atomic_write(path: Path, content: str | bytes) -> None:
    """Writes a file so that a reader finds the old content or the new, never a part."""
    data = content.encode() if isinstance(content, str) else content
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes renames and removals in a directory durable, where the file system can."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:  # some network file systems do not open directories
        return
    try:
        os.fsync(descriptor)
    except OSError:
        return
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Holds a lock on a file, which is made where it is not there and stays.

    The system takes the lock back when the process dies, however it does.

    Yields:
        False if another process (or another call in this one) holds it. Where the system or the
        file system has no locks, always True.

    Raises:
        OSError: The file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield _try_lock(descriptor)
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True
