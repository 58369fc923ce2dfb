"""``.npz`` archives: arrays by name, and text settings in a zero-dimensional string array."""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from axcore.checkpoint.convert._source import (
    Digest,
    TensorInfo,
    TensorSource,
    bad_source,
    plain_file,
)

__all__ = ["NpzSource"]

_CONFIG = "__config__"
_MAX_TEXT_BYTES = 64_000_000
_BLOCK = 1 << 22


class NpzSource(TensorSource):
    """Arrays of an npz archive, compressed or not; object arrays are refused, not unpickled.

    String arrays of no dims are metadata. ``__config__`` among them holds the settings as a JSON
    object.

    Args:
        path: The file.

    Raises:
        CheckpointError: It is no such archive, or damaged (AX610, AX612).
    """

    format = "npz"

    def __init__(self, path: str | Path):
        super().__init__(Path(path))
        plain_file(self.path)
        try:
            self._zip = zipfile.ZipFile(self.path)
        except (OSError, zipfile.BadZipFile, ValueError) as error:
            raise bad_source(f"is no npz archive: {error}", self.path) from error
        try:
            self._read_headers()
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
            self._zip.close()
            raise bad_source(f"is damaged: {error}", self.path) from error
        except BaseException:
            self._zip.close()
            raise

    @property
    def architecture(self) -> str | None:
        """``architecture`` or ``model_type`` of the settings."""
        found = self.config.get("architecture", self.config.get("model_type"))
        return found if isinstance(found, str) else None

    def read(self, name: str, digest: Digest | None = None) -> np.ndarray:
        """See :meth:`TensorSource.read`."""
        info = self.infos[name]
        shape, dtype, fortran = self._layouts[name]
        out = np.empty(info.num_values, dtype)
        view = memoryview(out.view(np.uint8).data)
        position = 0
        for block in self._blocks(name):
            view[position : position + len(block)] = block
            if digest is not None:
                digest.update(block)
            position += len(block)
        return out.reshape(shape[::-1]).T if fortran else out.reshape(shape)

    def close(self) -> None:
        """Closes the archive."""
        self._zip.close()

    def _read_headers(self) -> None:
        infos: dict[str, TensorInfo] = {}
        metadata: dict[str, Any] = {}
        self._layouts: dict[str, tuple[tuple[int, ...], np.dtype[Any], bool]] = {}
        for member in self._zip.infolist():
            name = member.filename.removesuffix(".npy")
            if name == member.filename:
                raise bad_source(f"{member.filename!r} is no array", self.path)
            if name in infos or name in metadata:
                raise bad_source(f"the archive has {name!r} twice", self.path)
            if member.flag_bits & 1:
                raise bad_source(f"{name!r} is encrypted", self.path)
            with self._zip.open(member) as file:
                shape, fortran, dtype, start = self._header(name, file)
                size = math.prod(shape) * dtype.itemsize
                if start + size != member.file_size:
                    raise bad_source(
                        f"array {name!r}, {dtype} of shape {list(shape)}, takes {size:,} bytes; "
                        f"the archive holds {member.file_size - start:,}",
                        self.path,
                    )
                if dtype.kind in "US" and shape == ():
                    if size > _MAX_TEXT_BYTES:
                        raise bad_source(f"text {name!r} has {size:,} bytes", self.path)
                    metadata[name] = _text(file.read(size), dtype)
                    continue
            if dtype.kind not in "fiub" or dtype.names:
                raise bad_source(
                    f"array {name!r} has the dtype {dtype}, which is not one of numbers",
                    self.path,
                    hint="numpy saves bfloat16 as raw bytes: save float32 instead",
                )
            infos[name] = TensorInfo(name, shape, dtype.name, size, self.path.name)
            self._layouts[name] = (shape, dtype, fortran)
        self.infos, self.metadata = infos, metadata
        self.config = self._settings(metadata.get(_CONFIG))

    def _header(
        self, name: str, file: IO[bytes]
    ) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
        """Shape, order, dtype and header size of an array, from the first bytes of its member."""
        form = np.lib.format
        readers = {(1, 0): form.read_array_header_1_0, (2, 0): form.read_array_header_2_0}
        try:
            version = form.read_magic(file)
            if version not in readers:
                raise ValueError(f"version {version} of the format")
            shape, fortran, dtype = readers[version](file)
        except ValueError as error:
            raise bad_source(f"array {name!r} has a damaged header: {error}", self.path) from error
        if dtype.hasobject:
            raise bad_source(
                f"array {name!r} holds Python objects, which only unpickling could read",
                self.path,
                hint="it is never unpickled; save numbers only",
            )
        return shape, fortran, dtype, file.tell()

    def _blocks(self, name: str) -> Iterator[bytes]:
        """The bytes of an array, block by block."""
        try:
            with self._zip.open(f"{name}.npy") as file:
                self._header(name, file)
                left = self.infos[name].size_bytes
                while left:
                    block = file.read(min(left, _BLOCK))
                    if not block:
                        raise EOFError(f"{left} bytes are missing")
                    left -= len(block)
                    yield block
                file.read(1)  # at the end the archive's checksum is compared
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise bad_source(f"array {name!r} is damaged: {error}", self.path) from error

    def _settings(self, text: Any) -> dict[str, Any]:
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise bad_source(f"{_CONFIG} is no JSON: {error}", self.path) from error
        if not isinstance(value, dict):
            raise bad_source(f"{_CONFIG} is no JSON object", self.path)
        return value


def _text(data: bytes, dtype: np.dtype[Any]) -> str:
    value = np.frombuffer(data, dtype)[0] if data else ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
