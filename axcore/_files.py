"""Files that survive a kill: written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["atomic_write", "sync_directory"]


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
