"""GGUF files: metadata, tokenizer included, and tensors in block formats.

The header is parsed here, with every length checked against the file; the block formats are
dequantized by the ``gguf`` package, some rows at a time.
Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from axcore.checkpoint.convert._source import (
    Digest,
    OpenFiles,
    TensorInfo,
    TensorSource,
    bad_source,
)
from axcore.errors import CheckpointError

__all__ = ["GGUFSource"]

_ALIGNMENT = "general.alignment"
_VERSIONS = (2, 3)
_MAX_DIMS = 8
_MAX_COUNT = 1 << 20  # tensors, or keys
_CHUNK = 1 << 20
_BLOCK_VALUES = 1 << 20  # values dequantized at a time
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_PLAIN = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Where a tensor stands, and the number of its block format."""

    offset: int
    kind: int


class GGUFSource(TensorSource):
    """One GGUF file; ``config`` is its metadata without the tokenizer's.

    Shapes are given in numpy's order, the reverse of the file's. Block formats have their name as
    dtype (``Q4_1``) and are read as float32.

    Args:
        path: The file.

    Raises:
        CheckpointError: It is no such file, damaged, or the ``gguf`` package is absent
            (AX610, AX612, AX619).
    """

    format = "gguf"

    def __init__(self, path: str | Path):
        super().__init__(Path(path))
        self._gguf = _package()
        self._files = OpenFiles()
        try:
            self._read_header()
        except BaseException:
            self._files.close()
            raise

    @property
    def architecture(self) -> str | None:
        """``general.architecture``."""
        found = self.metadata.get("general.architecture")
        return found if isinstance(found, str) else None

    def read(self, name: str, digest: Digest | None = None) -> np.ndarray:
        """See :meth:`TensorSource.read`."""
        info, stored = self.infos[name], self._stored[name]
        if info.dtype in _PLAIN:
            data = self._files.read(self.path, stored.offset, info.size_bytes)
            if digest is not None:
                digest.update(data.data)
            return data.view(_PLAIN[info.dtype]).reshape(info.shape)
        out = np.empty(info.num_values, np.float32)
        kind = self._gguf.GGMLQuantizationType(stored.kind)
        per_block, block_bytes = self._gguf.GGML_QUANT_SIZES[kind]
        blocks = info.num_values // per_block
        step = max(1, _BLOCK_VALUES // per_block)
        for start in range(0, blocks, step):
            count = min(step, blocks - start)
            offset = stored.offset + start * block_bytes
            data = self._files.read(self.path, offset, count * block_bytes)
            if digest is not None:
                digest.update(data.data)
            values = self._gguf.quants.dequantize(data.reshape(count, block_bytes), kind)
            out[start * per_block : (start + count) * per_block] = values.reshape(-1)
        return out.reshape(info.shape)

    def close(self) -> None:
        """Closes the file."""
        self._files.close()

    def _read_header(self) -> None:
        cursor = _Cursor(self._files, self.path)
        if cursor.take(4) != b"GGUF":
            raise bad_source("is no GGUF file: it does not begin with GGUF", self.path)
        version = cursor.number("I")
        if version not in _VERSIONS:
            raise bad_source(
                f"has version {version} of the format; known: {', '.join(map(str, _VERSIONS))} "
                "(little-endian)",
                self.path,
            )
        num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
        if num_tensors > _MAX_COUNT or num_keys > _MAX_COUNT:
            raise bad_source(
                f"its header claims {num_tensors:,} tensors and {num_keys:,} keys, more than the "
                f"{_MAX_COUNT:,} allowed",
                self.path,
            )
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            if key in metadata:
                raise bad_source(f"its metadata has {key!r} twice", self.path)
            metadata[key] = cursor.value()
        self.metadata = metadata
        self.config = {k: v for k, v in metadata.items() if not k.startswith("tokenizer.")}
        self._read_tensors(cursor, num_tensors)

    def _read_tensors(self, cursor: _Cursor, count: int) -> None:
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = cursor.string()
            num_dims = cursor.number("I")
            if num_dims > _MAX_DIMS:
                raise bad_source(f"tensor {name!r} has {num_dims} dims", self.path)
            shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]
            kind, offset = cursor.number("I"), cursor.number("Q")
            if name in entries:
                raise bad_source(f"the header names tensor {name!r} twice", self.path)
            entries[name] = (shape, kind, offset)
        alignment = self.metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise bad_source(f"{_ALIGNMENT} is {alignment!r}, expected a power of two", self.path)
        start = -(-cursor.position // alignment) * alignment
        infos: dict[str, TensorInfo] = {}
        self._stored: dict[str, _Stored] = {}
        for name, (shape, kind, offset) in entries.items():
            infos[name] = self._info(name, shape, kind)
            if offset % alignment:
                raise bad_source(f"tensor {name!r} stands at {offset}, off the grid", self.path)
            self._stored[name] = _Stored(start + offset, kind)
        self.infos = infos
        self._check_layout(start, cursor.size)

    def _info(self, name: str, shape: tuple[int, ...], kind: int) -> TensorInfo:
        types = self._gguf.GGMLQuantizationType
        if kind not in [int(t) for t in types]:
            raise bad_source(
                f"tensor {name!r} has the format {kind}, which the installed gguf package does "
                "not know",
                self.path,
                hint="pip install --upgrade gguf",
            )
        dtype = types(kind).name
        per_block, block_bytes = self._gguf.GGML_QUANT_SIZES[types(kind)]
        row = shape[-1] if shape else 1
        if row % per_block:
            raise bad_source(
                f"tensor {name!r} has rows of {row} values, no multiple of {dtype}'s {per_block}",
                self.path,
            )
        size = math.prod(shape) // per_block * block_bytes
        return TensorInfo(name, shape, dtype, size, self.path.name)

    def _check_layout(self, start: int, size: int) -> None:
        end, before = start, "the header"
        for name, stored in sorted(self._stored.items(), key=lambda item: item[1].offset):
            if stored.offset < end:
                raise bad_source(f"tensor {name!r} overlaps {before}", self.path)
            end, before = stored.offset + self.infos[name].size_bytes, f"tensor {name!r}"
            if end > size:
                raise bad_source(
                    f"the file is truncated: tensor {name!r} ends at byte {end:,} of {size:,}",
                    self.path,
                )


class _Cursor:
    """Reads the header from front to back; nothing beyond the file's end is believed."""

    def __init__(self, files: OpenFiles, path: Path):
        self._files, self._path = files, path
        _, self.size = files.open(path)
        self.position = 0
        self._chunk, self._start = b"", 0

    def take(self, count: int) -> bytes:
        """Returns the next bytes."""
        if count > self.size - self.position:
            raise bad_source(
                f"the file is truncated: its header wants {count:,} bytes at {self.position:,}, "
                f"{self.size - self.position:,} are there",
                self._path,
            )
        begin = self.position - self._start
        if begin + count > len(self._chunk):
            length = min(max(count, _CHUNK), self.size - self.position)
            self._chunk = self._files.read(self._path, self.position, length).tobytes()
            self._start, begin = self.position, 0
        self.position += count
        return self._chunk[begin : begin + count]

    def number(self, code: str) -> Any:
        """Returns the next number, little-endian."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        """Returns the next string."""
        return self.take(self.number("Q")).decode("utf-8", "surrogateescape")

    def value(self) -> Any:
        """Returns the next typed value; arrays of numbers come as lists."""
        kind = self.number("I")
        return self._array() if kind == _ARRAY else self._scalar(kind)

    def _scalar(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind not in _SCALARS:
            raise bad_source(f"its metadata has a value of unknown type {kind}", self._path)
        value = self.number(_SCALARS[kind])
        # The decimal that was meant, 1e-05, not what float32 makes of it, 9.9999997e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value

    def _array(self) -> list[Any]:
        kind, count = self.number("I"), self.number("Q")
        if kind in _SCALARS:
            code = _SCALARS[kind]
            data = self.take(count * struct.calcsize(code))
            return list(struct.unpack(f"<{count}{code}", data))
        if kind != _STRING:
            raise bad_source(f"its metadata has an array of unknown type {kind}", self._path)
        if count > self.size // 8:  # every string has eight bytes of length
            raise bad_source(f"the file is truncated: an array of {count:,} strings", self._path)
        return [self.string() for _ in range(count)]


def _package() -> Any:
    try:
        gguf = importlib.import_module("gguf")
        importlib.import_module("gguf.quants")
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "reading GGUF needs the gguf package, which is not installed",
            code="AX619",
            hint='pip install "axcore[convert]"',
        ) from error
    return gguf
