"""Reads one array of a checkpoint, or one layer of it, straight from its chunk files.

Orbax reads whole arrays, twice their size at its peak; a conversion of a model that does not fit
into memory wants one layer of a stack that holds all of them. The files are uncompressed zarr
(version 2), as :class:`~axcore.checkpoint.OrbaxCheckpointer` writes them.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from axcore.errors import CheckpointError

__all__ = ["read_stored"]


def read_stored(folder: Path, index: tuple[int, ...] = ()) -> np.ndarray:
    """Reads an array.

    Args:
        folder: The array's folder, with ``.zarray`` and its chunks.
        index: Position on the leading axes, for a part of it.

    Returns:
        ``array[index]``; mapped from its file, not read, where it lies in one chunk.

    Raises:
        CheckpointError: It is stored in another way, or a chunk is missing (AX605).
    """
    head = _head(folder)
    shape, chunks = tuple(head["shape"]), tuple(head["chunks"])
    dtype = _dtype(head["dtype"])
    lead = [i // c for i, c in zip(index, chunks, strict=False)]
    inner = tuple(i % c for i, c in zip(index, chunks, strict=False))
    rest = range(len(index), len(shape))
    counts = [-(-shape[axis] // chunks[axis]) for axis in rest]
    grid = list(itertools.product(*(range(count) for count in counts)))
    if len(grid) == 1:
        whole = tuple(slice(0, shape[axis]) for axis in rest)
        return _chunk(folder, [*lead, *grid[0]], chunks, dtype, head)[(*inner, *whole)]
    out = np.empty(tuple(shape[axis] for axis in rest), dtype)
    for place in grid:
        starts = [n * chunks[axis] for n, axis in zip(place, rest, strict=True)]
        sizes = [
            min(chunks[axis], shape[axis] - start) for start, axis in zip(starts, rest, strict=True)
        ]
        source = _chunk(folder, [*lead, *place], chunks, dtype, head)
        target = tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))
        out[target] = source[(*inner, *(slice(0, n) for n in sizes))]
    return out


def _chunk(
    folder: Path, place: list[int], chunks: tuple[int, ...], dtype: np.dtype[Any], head: Any
) -> np.ndarray:
    name = head.get("dimension_separator", ".").join(map(str, place)) or "0"
    try:
        return np.memmap(folder / name, dtype, "r", shape=chunks)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"a chunk cannot be read: {error}", code="AX605", where=str(folder / name)
        ) from error


def _head(folder: Path) -> dict[str, Any]:
    try:
        head = json.loads((folder / ".zarray").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"an array cannot be read: {error}", code="AX605", where=str(folder)
        ) from error
    plain = not head.get("compressor") and not head.get("filters") and head.get("order") == "C"
    if head.get("zarr_format") != 2 or not plain:
        raise CheckpointError(
            "the array is compressed or stored in another way than axcore does",
            code="AX605",
            where=str(folder),
        )
    return head


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))
