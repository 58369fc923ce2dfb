"""One pass over the held-out documents, in fixed order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from axcore.data._packing import Batch, RowStream, document_sequence, empty_batch
from axcore.data._source import BaseSource, Document
from axcore.data._tokenizers import BaseTokenizer
from axcore.data._transform import BoundTransform, row_key

__all__ = ["EvalBatches", "HeldoutBatches"]


class EvalBatches(Protocol):
    """One pass over what is held out, always the same; what an evaler needs of it."""

    @property
    def num_bytes(self) -> int | None:
        """Bytes of text whose tokens are all targets once; None when that is not so."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """Yields the batches."""
        ...


class HeldoutBatches:
    """Batches of every held-out document once, always the same; iterate it as often as you like.

    Rows are filled one after another with the documents in the source's order. The last batch is
    filled up with padding (segment 0, no target). Every process walks all documents and keeps its
    rows, so the batches do not depend on the process count.

    Bits per byte of a model are the summed loss in nats over all targets / ln 2 / ``num_bytes``:
    the end of each document is predicted too and its cost counted, its id is no byte of text.

    Args:
        source: Where the documents are.
        documents: Their numbers, in the order to read them.
        tokenizer: What makes tokens of them.
        batch_size: Rows of the global batch, B.
        seq_len: Packed tokens per row, T.
        rows: Rows to return, or None for all B.
        transform: What makes another task of the packed rows; then not every token is a target, and
            there is no ``num_bytes``.
    """

    def __init__(
        self,
        source: BaseSource,
        documents: np.ndarray,
        tokenizer: BaseTokenizer,
        *,
        batch_size: int,
        seq_len: int,
        rows: Sequence[int] | None = None,
        transform: BoundTransform | None = None,
    ):
        self._source = source
        self._numbers = documents
        self._tokenizer = tokenizer
        self._batch_size = batch_size
        self._seq_len = seq_len
        self._rows = tuple(range(batch_size)) if rows is None else tuple(rows)
        self._transform = transform

    def documents(self) -> Iterator[Document]:
        """Yields the held-out documents."""
        return (self._source[int(i)] for i in self._numbers)

    @property
    def num_documents(self) -> int:
        """Number of held-out documents."""
        return len(self._numbers)

    @functools.cached_property
    def _sizes(self) -> tuple[int, int]:
        num_bytes = num_pairs = 0
        for document in self.documents():
            num_bytes += document.num_bytes
            num_pairs += max(0, len(document_sequence(self._tokenizer, document.text)) - 1)
        return num_bytes, num_pairs

    @property
    def num_bytes(self) -> int | None:
        """UTF-8 bytes of the held-out documents; None when their tokens are not all targets."""
        return self._sizes[0] if self._transform is None else None

    @property
    def num_targets(self) -> int:
        """Packed pairs of one pass; without a transform the True entries of ``target_mask``."""
        return self._sizes[1]

    def __len__(self) -> int:
        """Returns the number of batches, the padded one included."""
        per_batch = self._batch_size * self._seq_len
        return (self.num_targets + per_batch - 1) // per_batch

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches of shape (rows, T) as of ``axcore.data.empty_batch``, transformed."""
        numbers = self._numbers

        def fetch(ordinal: int) -> np.ndarray | None:
            if ordinal >= len(numbers):
                return None
            return document_sequence(self._tokenizer, self._source[int(numbers[ordinal])].text)

        stream = RowStream(fetch)
        wanted = list(self._rows)
        for number in itertools.count():
            batch = empty_batch(self._batch_size, self._seq_len, self._tokenizer.pad_id)
            filled = [stream.fill(batch, row) for row in range(self._batch_size)]
            if filled[0] == 0:
                return
            batch = {name: array[wanted] for name, array in batch.items()}
            if self._transform is not None:
                keys = [row_key("heldout", row, number) for row in wanted]
                batch = self._transform(batch, keys)
            yield batch
