"""Foreign model files: what they hold, read one tensor at a time."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import ml_dtypes
import numpy as np

from axcore.errors import CheckpointError

__all__ = ["OpenFiles", "TensorInfo", "TensorSource", "bad_source", "dtype_named", "plain_file"]


class Digest(Protocol):
    """What ``hashlib`` makes."""

    def update(self, data: Any, /) -> object: ...


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read.

    Attributes:
        name: Its name in the file.
        shape: Shape of what :meth:`TensorSource.read` returns.
        dtype: Dtype as stored: a numpy name (``bfloat16``), or a block format (``Q4_1``).
        size_bytes: Bytes it takes in the file.
        file: Name of the file that holds it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    file: str

    @property
    def num_values(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class TensorSource(abc.ABC):
    """A foreign model: tensors by name, settings and metadata.

    Making one reads and checks all headers and no tensor. Readers never run code of the files and
    never unpickle. Close it, or use it as a context manager.

    Attributes:
        path: The file or directory.
        infos: Every tensor by name, in the order of the files.
        config: The model's settings: ``config.json``, GGUF metadata without the tokenizer's, or
            the JSON in an npz archive's ``__config__``.
        metadata: Everything else the files say (GGUF: all key-value pairs, tokenizer included).
    """

    format: str = ""

    def __init__(self, path: Path):
        self.path = path
        self.infos: Mapping[str, TensorInfo] = {}
        self.config: Mapping[str, Any] = {}
        self.metadata: Mapping[str, Any] = {}

    @property
    @abc.abstractmethod
    def architecture(self) -> str | None:
        """Name of the architecture as the files state it, or None when they do not."""

    @abc.abstractmethod
    def read(self, name: str, digest: Digest | None = None) -> np.ndarray:
        """Reads one tensor.

        Args:
            name: A key of ``infos``.
            digest: Is given the tensor's bytes as they are stored, such as ``hashlib.sha256()``.

        Returns:
            An array of the info's shape. Block formats come dequantized, as float32.

        Raises:
            CheckpointError: The file has become shorter, or cannot be read.
        """

    @property
    def size_bytes(self) -> int:
        """Bytes that all tensors take in the files."""
        return sum(info.size_bytes for info in self.infos.values())

    @property
    def num_values(self) -> int:
        """Number of elements of all tensors."""
        return sum(info.num_values for info in self.infos.values())

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold tensors."""
        return tuple(dict.fromkeys(info.file for info in self.infos.values()))

    def close(self) -> None:
        """Releases the files."""
        return

    def __enter__(self) -> TensorSource:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def bad_source(
    message: str, path: Path | str, *, code: str = "AX612", hint: str | None = None
) -> CheckpointError:
    """Returns the error for a source that cannot be converted."""
    return CheckpointError(message, code=code, where=str(path), hint=hint)


def plain_file(path: Path) -> os.stat_result:
    """Returns the status of a regular file.

    Raises:
        CheckpointError: There is none, or it is a directory, pipe or device.
    """
    try:
        status = path.stat()
    except OSError as error:
        what = "there is no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise bad_source(f"cannot be read: {what}", path, code="AX610") from error
    if not stat.S_ISREG(status.st_mode):
        raise bad_source("is no regular file", path, code="AX610")
    return status


class OpenFiles:
    """Files of a source, each opened once: what was checked is what is read."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._files: dict[Path, BinaryIO] = {}

    def open(self, path: Path) -> tuple[BinaryIO, int]:
        """Returns the file, and its size in bytes.

        Raises:
            CheckpointError: It cannot be opened, or is no regular file.
        """
        plain_file(path)
        if path not in self._files:
            try:
                self._files[path] = self._stack.enter_context(open(path, "rb", buffering=0))
            except OSError as error:
                raise bad_source(f"cannot be read: {error.strerror}", path, code="AX610") from error
        file = self._files[path]
        return file, os.fstat(file.fileno()).st_size

    def read(self, path: Path, offset: int, size: int) -> np.ndarray:
        """Reads ``size`` bytes at ``offset`` as a uint8 array.

        Raises:
            CheckpointError: The file ends before.
        """
        out = np.empty(size, np.uint8)
        view = memoryview(out.data)
        try:
            file, _ = self.open(path)
            file.seek(offset)
            done = 0
            while done < size and (count := file.readinto(view[done:])):  # pyright: ignore[reportAttributeAccessIssue]
                done += count
        except OSError as error:
            raise bad_source(f"cannot be read: {error.strerror}", path, code="AX610") from error
        if done < size:
            raise bad_source(
                f"the file is truncated: {size} bytes at offset {offset}, {done} are there", path
            )
        return out

    def close(self) -> None:
        """Closes all of them."""
        self._files.clear()
        self._stack.close()


def dtype_named(name: str) -> np.dtype[Any]:
    """Returns the numpy dtype of a name, those of ``ml_dtypes`` included."""
    return np.dtype(getattr(ml_dtypes, name, name))
