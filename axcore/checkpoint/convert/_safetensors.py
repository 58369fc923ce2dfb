"""Safetensors, read and written by hand: the header is checked before any of it is believed.

The format: 8 bytes with the header's length, the header (JSON: name -> dtype, shape, offsets), then
the tensors side by side, without gaps (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from axcore.checkpoint.convert._source import OpenFiles, TensorInfo, bad_source, dtype_named

__all__ = [
    "Header",
    "StoredTensor",
    "header_bytes",
    "read_header",
]

MAX_HEADER_BYTES = 100_000_000  # the limit of the reference implementation
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
NAMES = {numpy: name for name, numpy in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor and where it stands.

    Attributes:
        info: Name, shape, dtype.
        path: The file.
        offset: Position of its first byte in the file.
    """

    info: TensorInfo
    path: Path
    offset: int


@dataclasses.dataclass(frozen=True)
class Header:
    """A checked header: the tensors by name, and the text metadata."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_header(files: OpenFiles, path: Path) -> Header:
    """Reads and checks the header of a file.

    Args:
        files: Opens the file, and keeps it open.
        path: The file.

    Raises:
        CheckpointError: The file is truncated, or its header lies (AX612).
    """
    _, size = files.open(path)
    if size < 8:
        raise bad_source(f"the file is truncated: it has {size} bytes", path)
    length = int.from_bytes(files.read(path, 0, 8).tobytes(), "little")
    if length > MAX_HEADER_BYTES:
        raise bad_source(
            f"its header claims {length:,} bytes, more than the {MAX_HEADER_BYTES:,} allowed",
            path,
            hint="this is no safetensors file, or a damaged one",
        )
    if length > size - 8:
        raise bad_source(
            f"the file is truncated: its header claims {length:,} bytes, {size - 8:,} are there",
            path,
        )
    entries = _parsed(files.read(path, 8, length).tobytes(), path)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise bad_source("__metadata__ is no object", path)
    start = 8 + length
    tensors = {n: _tensor(n, entry, path, start, size) for n, entry in entries.items()}
    _check_layout(tensors.values(), path, start, size)
    return Header(tensors, {str(k): str(v) for k, v in metadata.items()})


def header_bytes(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[int]]:
    """Returns the header of a file to write, with its length in front, and every tensor's offset.

    Args:
        tensors: (name, numpy dtype name, shape), in the order in which they will stand.

    Raises:
        CheckpointError: The format has no such dtype (AX622).
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets: list[int] = []
    position = 0
    for name, dtype, shape in tensors:
        if dtype not in NAMES:
            raise bad_source(f"safetensors has no dtype {dtype}", name, code="AX622")
        size = math.prod(shape) * dtype_named(dtype).itemsize
        offsets.append(position)
        entries[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [start + offset for offset in offsets]


def _parsed(text: bytes, path: Path) -> dict[str, Any]:
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            keys = [key for key, _ in items]
            repeated.extend(key for key in found if keys.count(key) > 1)
        return found

    try:
        entries = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise bad_source(
            f"its header is no JSON: {type(error).__name__}",
            path,
            hint="this is no safetensors file, or a damaged one",
        ) from error
    if repeated:
        raise bad_source(f"the header names {repeated[0]!r} twice", path)
    if not isinstance(entries, dict):
        raise bad_source("its header is no JSON object", path)
    return entries


def _tensor(name: str, entry: Any, path: Path, start: int, size: int) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise bad_source(f"the header's entry of tensor {name!r} is damaged", path)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise bad_source(
            f"tensor {name!r} has the dtype {dtype!r}; known: {', '.join(DTYPES)}", path
        )
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise bad_source(f"tensor {name!r} has shape {shape} and offsets {offsets}", path)
    begin, end = offsets
    if end < begin or end > size - start:
        raise bad_source(
            f"the file is truncated or damaged: tensor {name!r} stands at bytes {begin} to {end} "
            f"of {size - start}",
            path,
        )
    expected = math.prod(shape) * dtype_named(DTYPES[dtype]).itemsize
    if end - begin != expected:
        raise bad_source(
            f"tensor {name!r}, {dtype} of shape {shape}, takes {expected} bytes; its offsets "
            f"{begin} to {end} leave {end - begin}",
            path,
        )
    info = TensorInfo(name, tuple(shape), DTYPES[dtype], expected, path.name)
    return StoredTensor(info, path, start + begin)


def _check_layout(tensors: Iterable[StoredTensor], path: Path, start: int, size: int) -> None:
    """Tensors stand side by side: none overlaps another, no byte is left over."""
    end, before = start, "the header"
    for stored in sorted(tensors, key=lambda s: (s.offset, s.info.size_bytes)):
        if stored.offset != end:
            what = "overlaps" if stored.offset < end else "leaves a gap after"
            raise bad_source(f"tensor {stored.info.name!r} {what} {before}", path)
        end, before = stored.offset + stored.info.size_bytes, f"tensor {stored.info.name!r}"
    if end != size:
        raise bad_source(f"the file has {size - end} bytes that belong to no tensor", path)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 2**63 for n in value
    )
