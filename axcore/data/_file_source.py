"""What text files and JSON lines share: an index of byte spans, and reading one of them."""

from __future__ import annotations

import abc
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np

from axcore.config import REQUIRED, Required
from axcore.data._files import (
    Buffer,
    changed_file,
    expand_paths,
    open_file,
    read_range,
    read_whole,
    relative_names,
)
from axcore.data._order import indexed_hashes
from axcore.data._source import BaseSource, Document, Skipped, digest_of
from axcore.errors import DataError

__all__ = ["SpanSource"]

_log = logging.getLogger(__name__)
_MAX_OPEN_FILES = 64


@dataclass(frozen=True)
class _File:
    path: Path
    name: str
    num_bytes: int
    # Read as a whole and kept in memory, rather than by span.
    whole: bool
    # Start and end of each document within the (decompressed) file, shape (documents, 2), int64.
    spans: np.ndarray


class SpanSource(BaseSource):
    """Files whose documents are spans of bytes; a subclass says where and of what kind."""

    class Config(BaseSource.Config):
        """Which files, and what to do with bad ones."""

        # Files or glob patterns; gzip is recognized by content.
        paths: Required[tuple[str, ...]] = REQUIRED
        # Empty, binary and unreadable files: an error, or left out, counted and reported.
        on_bad_file: Literal["error", "skip"] = "error"
        # Content of gzip and small files kept in memory. Random access into a gzip file costs the
        # whole file each time, and opening a small one costs more than reading it.
        cache_bytes: int = 2**30

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg
        self._lock = threading.RLock()
        self._files: tuple[_File, ...] | None = None
        self._first = np.zeros(1, dtype=np.int64)
        self._skipped: list[Skipped] = []
        self._cache: OrderedDict[Path, bytes] = OrderedDict()
        self._cached_bytes = 0
        self._open_files: OrderedDict[Path, BinaryIO] = OrderedDict()
        weakref.finalize(self, _close_all, self._open_files)

    @abc.abstractmethod
    def _spans(self, path: Path, data: Buffer) -> np.ndarray:
        """Returns the spans of the documents in ``data``, shape (documents, 2), and checks it."""

    @abc.abstractmethod
    def _text(self, data: bytes) -> str:
        """Returns the text of a document from the bytes of its span."""

    def prepare(self) -> None:
        """Reads every file once, checks it and notes where its documents are.

        Raises:
            DataError: See the class; raised before any document is handed out.
        """
        with self._lock:
            if self._files is not None:
                return
            self._skipped.clear()
            paths = expand_paths(self._cfg.paths)
            files: list[_File] = []
            for path, name in zip(paths, relative_names(paths), strict=True):
                try:
                    files.append(self._scan(path, name))
                except DataError as e:
                    if self._cfg.on_bad_file == "error" or e.code == "AX505":
                        raise
                    self._skipped.append(Skipped(str(path), e.message))
            if not files:
                raise DataError(
                    f"no usable document in {len(paths)} file(s); all of them were skipped",
                    code="AX502",
                    where=", ".join(self._cfg.paths),
                    hint="; ".join(f"{s.where}: {s.reason}" for s in self._skipped[:3]) or None,
                )
            self._first = np.cumsum([0] + [len(f.spans) for f in files], dtype=np.int64)
            if self._skipped:
                first = self._skipped[0]
                _log.warning(
                    "skipped %d bad item(s); the first: %s: %s",
                    len(self._skipped),
                    first.where,
                    first.reason,
                )
            self._files = tuple(files)

    def _scan(self, path: Path, name: str) -> _File:
        data, compressed = read_whole(path)
        spans = self._spans(path, data)
        if len(spans) == 0:
            raise DataError(
                "the file holds no text (white space only)",
                code="AX502",
                where=str(path),
                hint='remove it from the paths, or set on_bad_file="skip"',
            )
        whole = compressed or isinstance(data, bytes)
        if isinstance(data, bytes):
            self._remember(path, data)
        return _File(path, name, len(data), whole, spans)

    def _all_files(self) -> tuple[_File, ...]:
        self.prepare()
        assert self._files is not None
        return self._files

    def __len__(self) -> int:
        """Returns the number of documents."""
        self.prepare()
        return int(self._first[-1])

    def __getitem__(self, index: int, /) -> Document:
        """Returns document ``index``."""
        files = self._all_files()
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        file = files[number]
        inside = index - int(self._first[number])
        start, stop = (int(x) for x in file.spans[inside])
        data = self._content(file)[start:stop] if file.whole else self._range(file, start, stop)
        name = file.name if len(file.spans) == 1 else f"{file.name}#{inside}"
        try:
            return Document(id=name, text=self._text(data))
        except ValueError as e:
            raise changed_file(file.path, file.num_bytes, file.num_bytes) from e

    def hashes(self) -> np.ndarray:
        """Returns a hash of each document's id, shape (documents,), uint64."""
        return np.concatenate([indexed_hashes(f.name, len(f.spans)) for f in self._all_files()])

    def fingerprint(self) -> str:
        """Returns a digest of the files' names, sizes and document boundaries (not their bytes)."""
        parts: list[object] = []
        for file in self._all_files():
            parts += [file.name, file.num_bytes, file.spans.tobytes()]
        return digest_of(*parts)

    def skipped(self) -> Sequence[Skipped]:
        """Returns the files and lines that were left out."""
        self.prepare()
        return tuple(self._skipped)

    def _content(self, file: _File) -> bytes:
        with self._lock:
            if file.path in self._cache:
                self._cache.move_to_end(file.path)
                return self._cache[file.path]
        data = bytes(read_whole(file.path)[0])
        if len(data) != file.num_bytes:
            raise changed_file(file.path, file.num_bytes, len(data))
        self._remember(file.path, data)
        return data

    def _remember(self, path: Path, data: bytes) -> None:
        with self._lock:
            if path not in self._cache:
                self._cached_bytes += len(data)
            self._cache[path] = data
            while self._cached_bytes > self._cfg.cache_bytes and len(self._cache) > 1:
                _, dropped = self._cache.popitem(last=False)
                self._cached_bytes -= len(dropped)

    def _range(self, file: _File, start: int, stop: int) -> bytes:
        # Reading, not mapping: a mapped file that is cut off meanwhile kills the process.
        with self._lock:
            handle = self._open_files.get(file.path)
            if handle is None:
                handle = self._open_files[file.path] = open_file(file.path)
                while len(self._open_files) > _MAX_OPEN_FILES:
                    self._open_files.popitem(last=False)[1].close()
            self._open_files.move_to_end(file.path)
            data = read_range(file.path, handle, start, stop)
        if len(data) != stop - start:
            raise changed_file(file.path, stop - start, len(data))
        return data


def _close_all(files: OrderedDict[Path, BinaryIO]) -> None:
    for file in files.values():
        file.close()
