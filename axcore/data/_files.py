"""Finding and reading data files, with errors that say which file and what to do."""

from __future__ import annotations

import codecs
import glob
import gzip
import mmap
import os
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from axcore.errors import DataError, did_you_mean

__all__ = [
    "Buffer",
    "changed_file",
    "check_text",
    "expand_paths",
    "open_file",
    "read_range",
    "read_whole",
    "relative_names",
]

_GZIP_MAGIC = b"\x1f\x8b"
# Larger plain files are mapped instead of read, so that scanning one takes no memory of its size.
_MAP_FROM_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**20

Buffer = bytes | mmap.mmap


def expand_paths(paths: Sequence[str]) -> list[Path]:
    """Returns the files that paths and glob patterns name, sorted within each, without repeats.

    Args:
        paths: Files or patterns (``*``, ``?``, ``[...]``, ``**``); ``~`` is the home directory.

    Raises:
        DataError: No path is given, a path does not exist or is a directory, or a pattern matches
        nothing.
    """
    if not paths:
        raise DataError(
            "got no paths, expected at least one file or pattern",
            code="AX501",
            hint='for example paths=("data/*.txt",)',
        )
    found: dict[Path, None] = {}
    for text in paths:
        pattern = os.path.expanduser(text)
        # A file whose name merely looks like a pattern ("notes [1].txt") is that file.
        if os.path.lexists(pattern) or not glob.has_magic(pattern):
            path = Path(pattern)
            _check_is_file(path)
            found[path] = None
            continue
        matches = sorted(glob.glob(pattern, recursive=True))
        files = [Path(m) for m in matches if not os.path.isdir(m)]
        if not files:
            raise DataError(
                f"the pattern {text!r} matches no file",
                code="AX501",
                where=os.getcwd() if not os.path.isabs(pattern) else None,
                hint="check the directory, and quote it to keep the shell from expanding it; "
                "`**` matches directories at any depth",
            )
        for path in filter(Path.exists, files):  # a broken link is a bad file, which may be skipped
            _check_is_file(path)
        found.update(dict.fromkeys(files))
    return list(found)


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(
            "got a directory, expected a file or a pattern",
            code="AX501",
            where=str(path),
            hint=f"for every text file below it: {path / '**' / '*.txt'}",
        )
    if os.path.exists(path):
        if not path.is_file():
            raise DataError(
                "got a pipe or a device, expected a file",
                code="AX501",
                where=str(path),
                hint="data are read more than once, in random order: write them to a file",
            )
    elif path.is_symlink():
        raise DataError(
            f"the link leads nowhere: {os.readlink(path)} does not exist",
            code="AX501",
            where=str(path),
            hint="make the file that it names, or name another",
        )
    else:
        siblings: list[str] = []
        if path.parent.is_dir():
            siblings = sorted(p.name for p in path.parent.iterdir())
        guess = did_you_mean(path.name, siblings)
        if not path.parent.is_dir():
            guess = f"the directory {path.parent} does not exist either"
        raise DataError(
            "no such file",
            code="AX501",
            where=str(path),
            hint=guess or f"relative paths start at {os.getcwd()}",
        )


def relative_names(files: Sequence[Path]) -> list[str]:
    """Returns names that do not change when the whole data directory moves.

    Document ids, and with them the held-out split, are made of these names.
    """
    root = os.path.commonpath([os.path.abspath(f.parent) for f in files])
    return [Path(os.path.relpath(f, root)).as_posix() for f in files]


def read_whole(path: Path) -> tuple[Buffer, bool]:
    """Returns the content of a file, and whether it is gzip (by content, not by name).

    Returns:
        The content, decompressed; True when it had to be decompressed.

    Raises:
        DataError: The file cannot be read, is a damaged gzip file, or is empty.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            head = file.read(2)
            file.seek(0)
            compressed = head == _GZIP_MAGIC
            if compressed:
                data: Buffer = gzip.decompress(file.read())
            elif stat.S_ISREG(status.st_mode) and status.st_size >= _MAP_FROM_BYTES:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            else:
                data = file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as e:
        raise DataError(
            f"the gzip file is damaged or cut off: {e}",
            code="AX504",
            where=str(path),
            hint="fetch or compress the file again",
        ) from e
    except OSError as e:
        raise _unreadable(path, e) from e
    if len(data) == 0:
        raise DataError(
            "the file is empty",
            code="AX502",
            where=str(path),
            hint='remove it from the paths, or set on_bad_file="skip"',
        )
    return data, compressed


def open_file(path: Path) -> BinaryIO:
    """Returns the file, open for reading.

    Raises:
        DataError: It cannot be opened.
    """
    try:
        return open(path, "rb")
    except OSError as e:
        raise _unreadable(path, e) from e


def read_range(path: Path, file: BinaryIO, start: int, stop: int) -> bytes:
    """Returns bytes ``start`` to ``stop - 1``, fewer where the file ends.

    Raises:
        DataError: They cannot be read.
    """
    try:
        file.seek(start)
        return file.read(stop - start)
    except OSError as e:
        raise _unreadable(path, e) from e


def changed_file(path: Path, expected_bytes: int, got_bytes: int) -> DataError:
    """Returns the error of a file that is no longer what it was when it was checked."""
    sizes = f": got {got_bytes} bytes, expected {expected_bytes}"
    return DataError(
        "the file has changed since it was checked"
        + (sizes if got_bytes != expected_bytes else ""),
        code="AX504",
        where=str(path),
        hint="data must not change during a run; start again with the file complete",
    )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read the file: {error.strerror or error}",
        code="AX504",
        where=str(path),
        hint=f"check its permissions: ls -l {path}",
    )


def check_text(path: Path, data: Buffer) -> None:
    """Checks that data are UTF-8 text without NUL bytes.

    Raises:
        DataError: They are not; the message has the offset of the first offending byte.
    """
    if data[:4] == b"PAR1":
        raise DataError(
            "got a Parquet file, expected UTF-8 text",
            code="AX503",
            where=str(path),
            hint="use axcore.data.Parquet for it",
        )
    skip_hint = 'leave it out of the paths, or set on_bad_file="skip"'
    nul = data.find(b"\0")
    if nul >= 0:
        utf16 = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        raise DataError(
            f"got a binary file (a NUL byte at offset {nul}), expected UTF-8 text",
            code="AX503",
            where=str(path),
            hint=f"it seems to be UTF-16: iconv -f UTF-16 -t UTF-8 {path}" if utf16 else skip_hint,
        )
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data), _CHUNK_BYTES):
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(data[start : start + _CHUNK_BYTES], start + _CHUNK_BYTES >= len(data))
        except UnicodeDecodeError as e:
            offset = start - pending + e.start
            raise DataError(
                f"byte 0x{data[offset]:02x} at offset {offset} is not UTF-8 text",
                code="AX503",
                where=str(path),
                hint=f"convert it, for example: iconv -f LATIN1 -t UTF-8 {path}; or {skip_hint}",
            ) from e
