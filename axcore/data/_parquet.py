"""Parquet files as a source of documents (extra ``parquet``)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from axcore.config import REQUIRED, Required
from axcore.data._files import expand_paths, relative_names
from axcore.data._order import indexed_hashes
from axcore.data._source import BaseSource, Document, digest_of
from axcore.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pyarrow.parquet

__all__ = ["Parquet"]


@dataclass(frozen=True)
class _RowGroup:
    path: Path
    name: str
    number: int
    # Number of the group's first row within its file.
    first_row: int
    num_rows: int


class Parquet(BaseSource):
    """A string column of Parquet files; a row is a document, a null an empty one.

    Only footers are read before training. Random access reads a row group (one column of it) at a
    time and keeps the latest ones: write corpora in row groups of about ten megabytes.

    Example:
        ``Parquet.Config(paths=("data/*.parquet",), column="content")``
    """

    class Config(BaseSource.Config):
        """Which files and which column."""

        # Files or glob patterns.
        paths: Required[tuple[str, ...]] = REQUIRED
        column: str = "text"
        # Row groups kept in memory. Shuffled reading of more than this re-reads a row group for
        # almost every document: raise it, or convert such a corpus to JSON lines.
        cache_bytes: int = 2**30

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg
        self._lock = threading.RLock()
        self._groups: tuple[_RowGroup, ...] | None = None
        self._first = np.zeros(1, dtype=np.int64)
        self._cache: OrderedDict[int, Any] = OrderedDict()

    def prepare(self) -> None:
        """Reads and checks every file's footer.

        Raises:
            DataError: pyarrow is not installed; a file is missing, no Parquet file, without the
            column,
                or all are without rows.
        """
        with self._lock:
            if self._groups is not None:
                return
            paths = expand_paths(self._cfg.paths)
            groups: list[_RowGroup] = []
            for path, name in zip(paths, relative_names(paths), strict=True):
                groups += self._row_groups(path, name)
            if not groups:
                raise DataError(
                    "the files have no rows",
                    code="AX502",
                    where=", ".join(self._cfg.paths),
                    hint="check the step that wrote them",
                )
            self._first = np.cumsum([0] + [g.num_rows for g in groups], dtype=np.int64)
            self._groups = tuple(groups)

    def _open(self, path: Path) -> pyarrow.parquet.ParquetFile:
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as e:
            raise DataError(
                "reading Parquet needs pyarrow, which is not installed",
                code="AX508",
                where=str(path),
                hint='pip install "axcore[parquet]"',
            ) from e
        try:
            return parquet.ParquetFile(path)
        except pyarrow.ArrowInvalid as e:
            empty = path.stat().st_size == 0
            raise DataError(
                "the file is empty" if empty else f"not a Parquet file: {e}",
                code="AX502" if empty else "AX503",
                where=str(path),
                hint="use axcore.data.TextFiles or JsonLines for text; a file that was cut off "
                "must be fetched again",
            ) from e
        except OSError as e:
            raise DataError(
                f"cannot read the file: {e.strerror or e}",
                code="AX504",
                where=str(path),
                hint=f"check its permissions: ls -l {path}",
            ) from e

    def _row_groups(self, path: Path, name: str) -> list[_RowGroup]:
        with self._open(path) as file:
            import pyarrow

            schema = file.schema_arrow
            column = self._cfg.column
            if column not in schema.names:
                raise DataError(
                    f"no column {column!r}; the file has {', '.join(schema.names)}",
                    code="AX507",
                    where=str(path),
                    hint=did_you_mean(column, schema.names) or "set the source's column field",
                )
            kind = schema.field(column).type
            if pyarrow.types.is_dictionary(kind):
                kind = kind.value_type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise DataError(
                    f"column {column!r} holds {kind}, expected strings",
                    code="AX507",
                    where=str(path),
                    hint="set the source's column field to a column of text",
                )
            groups: list[_RowGroup] = []
            first_row = 0
            for number in range(file.metadata.num_row_groups):
                rows = file.metadata.row_group(number).num_rows
                groups.append(_RowGroup(path, name, number, first_row, rows))
                first_row += rows
            return [g for g in groups if g.num_rows]

    def _all_groups(self) -> tuple[_RowGroup, ...]:
        self.prepare()
        assert self._groups is not None
        return self._groups

    def __len__(self) -> int:
        """Returns the number of rows."""
        self.prepare()
        return int(self._first[-1])

    def __getitem__(self, index: int, /) -> Document:
        """Returns the document in row ``index``, counted over all files."""
        groups = self._all_groups()
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        inside = index - int(self._first[number])
        value = self._column(number)[inside].as_py()
        group = groups[number]
        return Document(id=f"{group.name}#{group.first_row + inside}", text=value or "")

    def _column(self, number: int) -> Any:
        with self._lock:
            if number in self._cache:
                self._cache.move_to_end(number)
                return self._cache[number]
        group = self._all_groups()[number]
        with self._open(group.path) as file:
            table = file.read_row_group(group.number, columns=[self._cfg.column])
        values = table.column(self._cfg.column)
        with self._lock:
            self._cache[number] = values
            held = sum(v.nbytes for v in self._cache.values())
            while held > self._cfg.cache_bytes and len(self._cache) > 1:
                held -= self._cache.popitem(last=False)[1].nbytes
        return values

    def hashes(self) -> np.ndarray:
        """Returns a hash of each document's id, shape (documents,), uint64."""
        rows: dict[str, int] = {}
        for group in self._all_groups():
            rows[group.name] = rows.get(group.name, 0) + group.num_rows
        return np.concatenate([indexed_hashes(name, count) for name, count in rows.items()])

    def fingerprint(self) -> str:
        """Returns a digest of file names, sizes, row groups and the column's name."""
        parts: list[object] = [self._cfg.column]
        for group in self._all_groups():
            parts += [group.name, group.path.stat().st_size, group.number, group.num_rows]
        return digest_of(*parts)
