"""The manifest of a checkpoint: what makes damage visible, and what marks a save as finished.

A step directory is complete once it holds ``manifest.json``, which is written last, atomically. It
names every file with its size and checksum, every array with its shape and dtype, and carries a
checksum of its own.

The checksum of a file is the CRC-32 over the 64-bit sums of its 4 KiB blocks. It is meant for
accidents (kills, full disks, flipped bits), not for forgers: any damage within one 64-bit word is
found, other damage to a block is missed once in 2**64. On one core it reads and sums 5-7 GB/s where
reading with plain CRC-32 runs at 1.7-2.7 and BLAKE2b at 0.7 (measured together); a checkpoint is
written at 1-2 GB/s.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from axcore._files import atomic_write

__all__ = ["MANIFEST", "ArrayRecord", "FileRecord", "Manifest", "read", "verify", "write"]

MANIFEST = "manifest.json"
_FORMAT = 1
_BLOCK_WORDS = 512
_BUFFER_BYTES = 1 << 18  # stays in the L2 cache between the read and the sum
_SEGMENT_BYTES = 1 << 26  # what one thread takes at a time
_THREADS = min(8, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class FileRecord:
    """Size in bytes and checksum (None when checksums are switched off) of one file."""

    size_bytes: int
    checksum: int | None


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """One stored array.

    Attributes:
        name: Name under which orbax stores it (a directory below ``arrays/``).
        shape: Global shape as stored (key data for PRNG keys).
        dtype: Dtype name as stored, such as ``"bfloat16"``.
        key_impl: PRNG implementation when the array holds the data of typed keys, else None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Content of ``manifest.json``."""

    step: int
    arrays: Mapping[str, ArrayRecord]
    files: Mapping[str, FileRecord]

    @property
    def size_bytes(self) -> int:
        """Total size of the step's files."""
        return sum(record.size_bytes for record in self.files.values())


def write(
    directory: Path, step: int, arrays: Mapping[str, ArrayRecord], *, checksums: bool
) -> Manifest:
    """Records all files below ``directory`` and marks the step as finished.

    Args:
        directory: The step directory, complete but for its manifest.
        step: Step number.
        arrays: Path in the state tree -> stored array.
        checksums: Whether contents are hashed, or sizes only.

    Returns:
        The manifest, which is on the disk when this returns.
    """
    names = sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path.name != MANIFEST
    )
    sums = _checksums(directory, names) if checksums else [None] * len(names)
    files = {
        name: FileRecord((directory / name).stat().st_size, checksum)
        for name, checksum in zip(names, sums, strict=True)
    }
    manifest = Manifest(step=step, arrays=dict(arrays), files=files)
    atomic_write(directory / MANIFEST, _dumps(manifest))
    return manifest


def read(directory: Path) -> Manifest | str:
    """Returns the manifest of a step directory, or the reason why there is no usable one."""
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return f"it has no {MANIFEST}: the save did not finish"
    except (OSError, UnicodeDecodeError) as error:
        return f"{MANIFEST} cannot be read: {error}"
    try:
        return _loads(text)
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"


def verify(directory: Path, manifest: Manifest, *, contents: bool = True) -> str | None:
    """Compares the files of a step with its manifest.

    Args:
        directory: The step directory.
        manifest: What should be there.
        contents: Whether checksums are compared too, or sizes only.

    Returns:
        None when all is well, else the first reason found, naming the file.
    """
    hashed: list[str] = []
    for name, record in manifest.files.items():
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if size != record.size_bytes:
            return f"{name} has {size} bytes, {record.size_bytes} were written"
        if record.checksum is not None:
            hashed.append(name)
    if not contents:
        return None
    try:
        sums = _checksums(directory, hashed)
    except OSError as error:
        return f"{error.filename or directory} cannot be read: {error.strerror}"
    for name, checksum in zip(hashed, sums, strict=True):
        if checksum != manifest.files[name].checksum:
            return f"{name} differs from its checksum"
    return None


def _checksums(directory: Path, names: list[str]) -> list[int]:
    """Checksum of each file; files, and segments of large ones, several at a time."""
    segments = [
        (directory / name, offset)
        for name in names
        for offset in range(0, max(1, (directory / name).stat().st_size), _SEGMENT_BYTES)
    ]
    if len(segments) < 2:
        parts = [_block_sums(*segment) for segment in segments]
    else:
        with concurrent.futures.ThreadPoolExecutor(_THREADS, "axcore-checksum") as pool:
            parts = list(pool.map(lambda segment: _block_sums(*segment), segments))
    found: dict[Path, int] = {}
    for (path, _), sums in zip(segments, parts, strict=True):
        found[path] = zlib.crc32(sums, found.get(path, 0))
    return [found[directory / name] for name in names]


def _block_sums(path: Path, offset: int) -> bytes:
    """Sums (uint64, modulo 2**64) of the blocks of one segment of a file, little-endian."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    words = np.frombuffer(buffer, "<u8")
    sums: list[bytes] = []
    left = _SEGMENT_BYTES
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        while left and (count := _fill(file, buffer)):
            buffer[count:] = bytes(len(buffer) - count)
            blocks = words[: -(-count // (8 * _BLOCK_WORDS)) * _BLOCK_WORDS]
            total = np.add.reduce(blocks.reshape(-1, _BLOCK_WORDS), axis=1)
            sums.append(total.astype("<u8", copy=False).tobytes())
            left -= count
    return b"".join(sums)


def _fill(file: io.FileIO, buffer: memoryview) -> int:
    """Reads until the buffer is full or the file ends; the operating system may give less."""
    count = 0
    while count < len(buffer) and (more := file.readinto(buffer[count:])):
        count += more
    return count


def _dumps(manifest: Manifest) -> str:
    arrays = {p: [r.name, list(r.shape), r.dtype, r.key_impl] for p, r in manifest.arrays.items()}
    files = {n: [r.size_bytes, r.checksum] for n, r in manifest.files.items()}
    data = {"format": _FORMAT, "step": manifest.step, "arrays": arrays, "files": files}
    return json.dumps({**data, "crc32": _checksum_of(data)}, indent=1) + "\n"


def _loads(text: str) -> Manifest | str:
    data: dict[str, Any] = json.loads(text)
    if data.pop("crc32") != _checksum_of(data):
        return f"{MANIFEST} differs from its checksum"
    if data["format"] != _FORMAT:
        return f"{MANIFEST} has format {data['format']}, this version reads {_FORMAT}"
    return Manifest(
        step=data["step"],
        arrays={
            path: ArrayRecord(name, tuple(shape), dtype, key_impl)
            for path, (name, shape, dtype, key_impl) in data["arrays"].items()
        },
        files={
            name: FileRecord(size, checksum) for name, (size, checksum) in data["files"].items()
        },
    )


def _checksum_of(data: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(data, separators=(",", ":")).encode())
