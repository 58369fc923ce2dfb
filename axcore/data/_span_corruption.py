"""Span corruption: spans of a text are left out of the source and make up the target."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from axcore.data._order import indexed_hashes
from axcore.data._packing import Batch
from axcore.data._tokenizers import BaseTokenizer
from axcore.data._transform import BaseTransform, BoundTransform
from axcore.errors import DataError

__all__ = ["SpanCorruption"]


class SpanCorruption(BaseTransform):
    """Cuts spans out of each row; the target is what was cut.

    ``a b c d e f`` with ``b`` and ``e f`` cut becomes the source ``a <0> c d <1> eos`` and the
    target ``<0> b <1> e f eos``, with sentinels ``<0>``, ``<1>``, ... that count down from an id.
    A row's first token is never cut, its last one always. Rows are packed so that the source fills
    ``seq_len``.

    The batch has ``source_ids`` and ``source_segment_ids`` of shape (B, ``seq_len``), and
    ``input_ids`` (the target, shifted by a start token), ``target_ids``, ``target_mask`` and
    ``segment_ids`` of shape (B, ``target_len(seq_len)``), as ``axcore.layers.EncoderDecoder`` takes
    them. Documents that share a row are one text with ``eos`` between them, as in T5.

    References:
        Raffel et al., T5, arXiv:1910.10683, sections 3.1.4 and 3.3.4.
    """

    class Config(BaseTransform.Config):
        """The defaults are T5's."""

        # Share of the tokens that are cut.
        rate: float = 0.15
        # Mean length of a cut span, in tokens.
        mean_span_len: float = 3.0
        # Id of the first sentinel; None: the tokenizer's last id.
        first_sentinel_id: int | None = None
        # How many ids, counting down from the first, are sentinels.
        num_sentinels: int = 100
        # Id that opens the target; None: the tokenizer's padding.
        start_id: int | None = None

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        if not 0 < cfg.rate < 1 or cfg.mean_span_len < 1 or cfg.num_sentinels < 1:
            raise DataError(
                f"got rate={cfg.rate}, mean_span_len={cfg.mean_span_len}, num_sentinels="
                f"{cfg.num_sentinels}, expected a rate between 0 and 1, the others at least 1",
                code="AX550",
            )

    def packed_len(self, seq_len: int) -> int:
        """Returns the most tokens whose source still fits into ``seq_len``."""
        length = seq_len
        while self._source_len(length + 1) <= seq_len:
            length += 1
        while length >= 2 and self._source_len(length) > seq_len:
            length -= 1
        if length < 2:
            raise DataError(
                f"rows of {seq_len} tokens are too short to cut spans out of",
                code="AX550",
                where="seq_len",
            )
        return length

    def target_len(self, seq_len: int) -> int:
        """Returns the length of the targets of sources of ``seq_len`` tokens."""
        cut, spans = self._counts(self.packed_len(seq_len))
        return cut + spans + 1

    def bind(self, tokenizer: BaseTokenizer, seq_len: int) -> BoundTransform:
        """See :meth:`BaseTransform.bind`."""
        first = self.cfg.first_sentinel_id
        first = tokenizer.vocab_size - 1 if first is None else first
        _, spans = self._counts(self.packed_len(seq_len))
        if spans > self.cfg.num_sentinels or first - spans + 1 < 0:
            raise DataError(
                f"rows of {seq_len} tokens have {spans} spans, and there are "
                f"{min(self.cfg.num_sentinels, first + 1)} sentinels",
                code="AX552",
                where="input.transform.num_sentinels",
                hint="shorten the rows (seq_len), cut longer spans (mean_span_len), or give the "
                "tokenizer more ids that text never has",
            )
        taken = range(first - spans + 1, min(first + 1, tokenizer.vocab_size))
        text = next((i for i in taken if tokenizer.decode([i])), None)
        if text is not None:
            raise DataError(
                f"the sentinel {text} is a token of text, {tokenizer.decode([text])!r}",
                code="AX552",
                where="input.transform.first_sentinel_id",
                hint="name an id from which on downwards there are none: beyond the tokenizer's, "
                "where the model's vocabulary is larger, or of special tokens",
            )
        if tokenizer.eos_id is None:
            raise DataError(
                f"the tokenizer ({type(tokenizer).__name__}) has no token that ends a text",
                code="AX552",
                where="input.tokenizer",
            )
        start = self.cfg.start_id
        return functools.partial(
            self._apply,
            seq_len=seq_len,
            first=first,
            eos=tokenizer.eos_id,
            pad=tokenizer.pad_id,
            start=tokenizer.pad_id if start is None else start,
        )

    def _counts(self, length: int) -> tuple[int, int]:
        """Returns how many of ``length`` tokens are cut, and in how many spans."""
        if length < 2:
            return 0, 0
        cut = min(max(round(length * self.cfg.rate), 1), length - 1)
        spans = max(round(cut / self.cfg.mean_span_len), 1)
        return cut, min(spans, cut, length - cut)

    def _source_len(self, length: int) -> int:
        cut, spans = self._counts(length)
        return length - cut + spans + 1

    def _apply(
        self,
        batch: Batch,
        keys: Sequence[str],
        *,
        seq_len: int,
        first: int,
        eos: int,
        pad: int,
        start: int,
    ) -> Batch:
        shape = (len(keys), self.target_len(seq_len))
        source = np.full((len(keys), seq_len), pad, np.int32)
        target = np.full(shape, pad, np.int32)
        source_valid, target_valid = np.zeros(source.shape, bool), np.zeros(shape, bool)
        for row, key in enumerate(keys):
            # The tokens without what opens a document; of a row that is not full, its first part.
            tokens = batch["target_ids"][row][batch["segment_ids"][row] != 0]
            kept, cut = self._corrupted(tokens, key, first, eos)
            source[row, : len(kept)], source_valid[row, : len(kept)] = kept, True
            target[row, : len(cut)], target_valid[row, : len(cut)] = cut, True
        inputs = np.full(shape, start, np.int32)
        inputs[:, 1:] = target[:, :-1]
        return {
            "source_ids": source,
            "source_segment_ids": source_valid.astype(np.int32),
            "input_ids": inputs,
            "target_ids": target,
            "target_mask": target_valid,
            "segment_ids": target_valid.astype(np.int32),
        }

    def _corrupted(
        self, tokens: np.ndarray, key: str, first: int, eos: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the source and the target of a row's tokens; both empty if it has too few."""
        num_cut, spans = self._counts(len(tokens))
        if not spans:
            return tokens[:0], tokens[:0]
        lengths = np.stack(
            [
                _parts(len(tokens) - num_cut, spans, f"{key}\x1fkept"),
                _parts(num_cut, spans, f"{key}\x1fcut"),
            ],
            axis=1,
        ).reshape(-1)
        pieces = np.split(tokens, np.cumsum(lengths)[:-1])
        source: list[np.ndarray] = []
        target: list[np.ndarray] = []
        for number in range(spans):
            sentinel = np.array([first - number], np.int32)
            source += [pieces[2 * number], sentinel]
            target += [sentinel, pieces[2 * number + 1]]
        end = np.array([eos], np.int32)
        return np.concatenate([*source, end]), np.concatenate([*target, end])


def _parts(total: int, count: int, key: str) -> np.ndarray:
    """Divides ``total`` into ``count`` parts of at least one, every division equally likely."""
    cuts = np.argsort(indexed_hashes(key, total - 1), kind="stable")[: count - 1] + 1
    bounds = np.concatenate([[0], np.sort(cuts), [total]])
    return np.diff(bounds)
