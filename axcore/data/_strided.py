"""Every token of every document scored once, with context before it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from axcore.data._packing import Batch, document_sequence, empty_batch
from axcore.data._source import BaseSource, Document
from axcore.data._tokenizers import BaseTokenizer
from axcore.errors import DataError

__all__ = ["StridedBatches"]


@dataclasses.dataclass(frozen=True)
class _Window:
    """``ids[:-1]`` are inputs, ``ids[1:]`` targets, of which the last ``counted`` count."""

    ids: np.ndarray
    counted: int


class StridedBatches:
    """Batches in which documents longer than a row are read through overlapping windows.

    A document that fits a row is one window. A longer one is read through windows of ``seq_len``
    that advance by ``stride``; each window counts only what the one before has not, so every token
    is a target exactly once and has at least ``seq_len - stride`` tokens of context (near the start
    of a document: all there are). Nothing is dropped or counted twice. Short windows share rows.

    It has the interface of :class:`HeldoutBatches`, so any evaler reads it.

    Args:
        source: Where the documents are, prepared.
        tokenizer: What makes tokens of them.
        batch_size: Rows, B.
        seq_len: Tokens per row, T.
        stride: How far windows advance; None for half of ``seq_len``.
        rows: Rows to return, or None for all B.

    Raises:
        DataError: The stride is no number from 1 to ``seq_len``.
    """

    def __init__(
        self,
        source: BaseSource,
        tokenizer: BaseTokenizer,
        *,
        batch_size: int,
        seq_len: int,
        stride: int | None = None,
        rows: Sequence[int] | None = None,
    ):
        self._source, self._tokenizer = source, tokenizer
        self._batch_size, self._seq_len = batch_size, seq_len
        self._stride = max(1, seq_len // 2) if stride is None else stride
        if not 1 <= self._stride <= seq_len:
            raise DataError(
                f"got a stride of {stride}, expected 1 to {seq_len}, the tokens of a row",
                code="AX542",
                hint="half of a row gives each token at least half a row of context",
            )
        self._rows = list(range(batch_size) if rows is None else rows)

    def documents(self) -> Iterator[Document]:
        """Yields the documents."""
        return (self._source[i] for i in range(len(self._source)))

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self._source)

    @functools.cached_property
    def _sizes(self) -> tuple[int, int]:
        num_bytes = num_targets = 0
        for document in self.documents():
            num_bytes += document.num_bytes
            num_targets += max(0, len(document_sequence(self._tokenizer, document.text)) - 1)
        return num_bytes, num_targets

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the documents: what bits per byte are over, whatever the tokens are."""
        return self._sizes[0]

    @property
    def num_targets(self) -> int:
        """Targets of one pass: every token of the text and each document's end."""
        return self._sizes[1]

    def _windows(self) -> Iterator[_Window]:
        for document in self.documents():
            ids = document_sequence(self._tokenizer, document.text)
            num, done, start = len(ids) - 1, 0, 0
            while done < num:
                end = min(start + self._seq_len, num)
                yield _Window(ids[start : end + 1], end - done)
                done, start = end, start + self._stride

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches of shape (rows, T); see ``axcore.data.empty_batch``."""
        batch, row, filled, segment = self._empty(), 0, 0, 0
        for window in self._windows():
            size = len(window.ids) - 1
            if filled + size > self._seq_len:
                row, filled, segment = row + 1, 0, 0
            if row == self._batch_size:
                yield self._chosen(batch)
                batch, row = self._empty(), 0
            segment += 1
            here = slice(filled, filled + size)
            batch["input_ids"][row, here] = window.ids[:-1]
            batch["target_ids"][row, here] = window.ids[1:]
            batch["segment_ids"][row, here] = segment
            batch["positions"][row, here] = np.arange(size)
            batch["target_mask"][row, filled + size - window.counted : filled + size] = True
            filled += size
        if filled:
            yield self._chosen(batch)

    def _empty(self) -> Batch:
        return empty_batch(self._batch_size, self._seq_len, self._tokenizer.pad_id)

    def _chosen(self, batch: Batch) -> Batch:
        return {name: array[self._rows] for name, array in batch.items()}
