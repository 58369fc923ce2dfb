"""Writes a checkpoint array by array, for models that do not fit into memory.

The result is what :class:`~axcore.checkpoint.OrbaxCheckpointer` reads: zarr arrays in plain chunk
files, described to orbax, with a manifest. Orbax itself takes a whole tree at a time; so it saves
one of placeholders, and the arrays are then written in their place.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from axcore._files import sync_directory
from axcore.checkpoint import _manifest
from axcore.checkpoint._orbax import ARRAYS, EXTRA, orbax_quiet, stored_name
from axcore.errors import CheckpointError

__all__ = ["CheckpointWriter", "cast"]

_CHUNK_BYTES = 1 << 26  # one file of an array; a restore reads whole files
_HEAD = ".zarray"


class CheckpointWriter:
    """Writes one step; nothing counts before :meth:`commit`.

    Args:
        root: Directory of the steps (``OUT/checkpoints``).
        step: Step number.
        arrays: Shape and dtype of every array by path, as the state tree has them.
        extra: The step's JSON part.
    """

    def __init__(
        self,
        root: str | Path,
        step: int,
        arrays: Mapping[str, jax.ShapeDtypeStruct],
        extra: Mapping[str, Any] | None = None,
    ):
        self._root, self._step = Path(root), step
        self._partial = self._root / f"{step}.partial"
        self._records = {
            path: _manifest.ArrayRecord(stored_name(path), tuple(a.shape), np.dtype(a.dtype).name)
            for path, a in arrays.items()
        }
        self._left = set(arrays)
        shutil.rmtree(self._partial, ignore_errors=True)
        self._partial.mkdir(parents=True)
        (self._partial / EXTRA).write_text(json.dumps(dict(extra or {}), indent=1), "utf-8")
        self._write_placeholders()

    def write(
        self, path: str, array: np.ndarray, check: Callable[[np.ndarray], None] | None = None
    ) -> str:
        """Writes one array; a view is copied chunk by chunk only.

        Args:
            path: Its path.
            array: Its values, converted to its dtype on the way.
            check: Looks at each part as it will be stored; raises to stop.

        Returns:
            The sha256 of the stored values, in hexadecimal: little-endian, C order.

        Raises:
            CheckpointError: No such array is left to write, or it has another shape (AX603).
        """
        record = self._records.get(path)
        if record is None or path not in self._left or array.shape != record.shape:
            raise CheckpointError(
                f"{path} {list(array.shape)} is not an array of this checkpoint, or is written",
                code="AX603",
                where=str(self._root),
            )
        dtype = np.dtype(record.dtype)
        digest = hashlib.sha256()
        rows = _rows_per_chunk(record.shape, dtype.itemsize)
        folder = self._partial / ARRAYS / record.name
        for index, part in enumerate(_parts(array, rows)):
            values = cast(part, dtype)
            if check is not None:
                check(values)
            data = values.reshape(-1).view(np.uint8).data
            digest.update(data)
            name = ".".join([str(index), *["0"] * (array.ndim - 1)])
            with open(folder / name, "wb") as file:
                file.write(data)
                if array.ndim and len(part) < rows:  # the last chunk of an axis is a whole one
                    file.truncate(rows * math.prod(array.shape[1:]) * dtype.itemsize)
        self._left.discard(path)
        return digest.hexdigest()

    def commit(self) -> None:
        """Makes the step one that can be restored.

        Raises:
            CheckpointError: An array has not been written (AX603).
        """
        if self._left:
            raise CheckpointError(
                f"{len(self._left)} arrays were not written: {', '.join(sorted(self._left)[:5])}",
                code="AX603",
                where=str(self._root),
            )
        _manifest.write(self._partial, self._step, self._records, checksums=True)
        self._partial.rename(self._root / str(self._step))
        sync_directory(self._root)

    def _write_placeholders(self) -> None:
        """Has orbax describe the arrays, from one element each."""
        import orbax.checkpoint as ocp

        tree = {
            record.name: np.zeros((1,) * len(record.shape), np.dtype(record.dtype))
            for record in self._records.values()
            if 0 not in record.shape
        }
        if not tree:
            return
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
        with orbax_quiet(), ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(self._partial / ARRAYS, args=ocp.args.PyTreeSave(tree))
        for record in self._records.values():
            if record.name not in tree:
                continue
            folder = self._partial / ARRAYS / record.name
            head = json.loads((folder / _HEAD).read_text("utf-8"))
            for old in folder.iterdir():
                if old.name != _HEAD:
                    old.unlink()
            rows = _rows_per_chunk(record.shape, np.dtype(record.dtype).itemsize)
            head["shape"] = list(record.shape)
            head["chunks"] = [rows, *record.shape[1:]] if record.shape else []
            (folder / _HEAD).write_text(json.dumps(head), "utf-8")


def cast(values: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Returns values as a contiguous array of a dtype; what does not fit becomes infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.ascontiguousarray(values).astype(dtype, copy=False)


def _rows_per_chunk(shape: tuple[int, ...], itemsize: int) -> int:
    """Rows (of the first dim) in one file."""
    if not shape:
        return 1
    row_bytes = max(1, math.prod(shape[1:]) * itemsize)
    return max(1, min(shape[0], _CHUNK_BYTES // row_bytes))


def _parts(array: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    if array.ndim == 0:
        yield array
        return
    for start in range(0, len(array), rows):
        yield array[start : start + rows]
