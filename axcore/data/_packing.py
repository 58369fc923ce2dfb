"""Documents to rows: (input, target) pairs, cut to rows of ``seq_len``.

A document of tokens ``t1 ... tn`` becomes the sequence ``bos t1 ... tn eos`` and this the n + 1
pairs ``(bos, t1), (t1, t2), ..., (tn, eos)``. Rows are filled with pairs, not with tokens: no
target is lost at a row's edge and none crosses from one document into the next, so every token of
every document is a target exactly once per epoch and no training position is wasted on a masked
target. A document longer than what is left of a row goes on in the next row; it is never dropped.

Legend: B rows, T = ``seq_len``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from axcore.data._tokenizers import BaseTokenizer

__all__ = ["Batch", "RowStream", "batch_of", "document_sequence", "empty_batch"]

# A batch: arrays whose first dim is B; those of language models are (B, T), see `empty_batch`.
Batch = dict[str, np.ndarray]


def empty_batch(num_rows: int, seq_len: int, pad_id: int = 0) -> Batch:
    """Returns a batch that is all padding.

    Returns:
        ``input_ids``, ``target_ids`` (token ids), ``segment_ids`` (1, 2, ... per document of the
        row, 0 for padding), ``positions`` (0, 1, ... within the document's part in this row), all
        (B, T) int32, and ``target_mask`` (B, T) bool, False where no loss is taken.
    """
    shape = (num_rows, seq_len)
    return {
        "input_ids": np.full(shape, pad_id, dtype=np.int32),
        "target_ids": np.full(shape, pad_id, dtype=np.int32),
        "segment_ids": np.zeros(shape, dtype=np.int32),
        "positions": np.zeros(shape, dtype=np.int32),
        "target_mask": np.zeros(shape, dtype=bool),
    }


def document_sequence(tokenizer: BaseTokenizer, text: str) -> np.ndarray:
    """Returns the token sequence whose neighbours are training pairs, shape (n + 2,), int32.

    Without a bos id the eos id opens the document (GPT-2's convention); with neither, the first
    token has no target. An empty text gives an empty sequence: there is nothing to learn from it.
    """
    tokens = tokenizer.encode(text)
    if len(tokens) == 0:
        return np.empty(0, dtype=np.int32)
    opening = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    parts = [tokens]
    if opening is not None:
        parts.insert(0, np.array([opening], dtype=np.int32))
    if tokenizer.eos_id is not None:
        parts.append(np.array([tokenizer.eos_id], dtype=np.int32))
    return np.concatenate(parts, dtype=np.int32)


class RowStream:
    """One row of the batch: an endless run of documents and the place reached in it.

    Args:
        fetch: Number of the document within this row's stream (0, 1, 2, ...) -> its sequence as
            ``document_sequence`` gives it, or None after the last one.
    """

    def __init__(self, fetch: Callable[[int], np.ndarray | None]):
        self._fetch = fetch
        self._sequence: np.ndarray | None = None
        self.document = 0
        self.offset = 0

    def seek(self, document: int, offset: int) -> None:
        """Goes to pair ``offset`` of document ``document``."""
        if document != self.document:
            self._sequence = None
        self.document, self.offset = document, offset

    def fill(self, batch: Batch, row: int) -> int:
        """Fills ``batch`` at ``row``; returns how many pairs it took (fewer only at the end)."""
        seq_len = batch["input_ids"].shape[1]
        filled = 0
        segment = 0
        while filled < seq_len:
            if self._sequence is None:
                self._sequence = self._fetch(self.document)
                if self._sequence is None:
                    break
            left = len(self._sequence) - 1 - self.offset
            if left <= 0:
                self._next_document()
                continue
            take = min(left, seq_len - filled)
            segment += 1
            here = slice(filled, filled + take)
            batch["input_ids"][row, here] = self._sequence[self.offset : self.offset + take]
            batch["target_ids"][row, here] = self._sequence[
                self.offset + 1 : self.offset + take + 1
            ]
            batch["segment_ids"][row, here] = segment
            batch["positions"][row, here] = np.arange(take)
            batch["target_mask"][row, here] = True
            filled += take
            self.offset += take
            if take == left:
                self._next_document()
        return filled

    def _next_document(self) -> None:
        self._sequence = None
        self.document += 1
        self.offset = 0


def batch_of(streams: list[RowStream], seq_len: int, pad_id: int = 0) -> Batch:
    """Returns the next batch of ``streams``, a row each."""
    batch = empty_batch(len(streams), seq_len, pad_id)
    for row, stream in enumerate(streams):
        stream.fill(batch, row)
    return batch
