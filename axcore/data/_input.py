"""The training input: documents of a source, split, shuffled, packed and dealt to rows."""

from __future__ import annotations

import abc
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from axcore.config import REQUIRED, Configurable, Dim, Required, scaled
from axcore.data._heldout import EvalBatches, HeldoutBatches
from axcore.data._iterator import BatchIterator, merge_states
from axcore.data._order import DocumentOrder, Group, heldout_mask
from axcore.data._packing import (
    Batch,
    RowStream,
    batch_of,
    document_sequence,
    empty_batch,
)
from axcore.data._python_reference import PythonReference
from axcore.data._source import BaseSource, Document, digest_of
from axcore.data._tokenizers import BaseTokenizer, ByteTokenizer
from axcore.data._transform import BaseTransform, BoundTransform, row_key
from axcore.errors import DataError

__all__ = ["BaseInput", "DocumentInput", "TextInput", "TransformedTextInput"]

# Places whose documents are part of a saved position's origin: they change with the data, with the
# seed and with the permutation's algorithm, so that none of these can replay or skip data
# unnoticed.
_PROBED_PLACES = 16


class BaseInput(Configurable, abc.ABC):
    """The role of a trainer's input: batches of ``batch_size`` rows, of ``seq_len`` tokens each."""

    class Config(Configurable.Config):
        """The batch's shape; by default the trainer's own."""

        batch_size: Dim = scaled(1, of="batch_size")
        seq_len: Dim = scaled(1, of="seq_len")

        if TYPE_CHECKING:

            def instantiate(self, **kwargs: object) -> BaseInput: ...

    def __init__(self, cfg: Config):
        self.cfg = cfg

    @property
    @abc.abstractmethod
    def tokenizer(self) -> BaseTokenizer | None:
        """What makes tokens of text; None where there is no text."""

    @abc.abstractmethod
    def prepare(self) -> None:
        """Finds and checks the data.

        Raises:
            DataError: Something is wrong with them.
        """

    @abc.abstractmethod
    def iterator(self, rows: Sequence[int] | None = None) -> BatchIterator:
        """Returns endless batches of the global batch's ``rows`` (None: all)."""

    def example(self) -> Batch:
        """Returns one row like those of training, for its shapes and dtypes.

        It reads as little as it can.

        Raises:
            DataError: The data are needed for that and are not as they should be.
        """
        iterator = self.iterator((0,))
        try:
            return next(iterator)
        finally:
            iterator.close()

    @abc.abstractmethod
    def heldout(
        self, rows: Sequence[int] | None = None, *, max_documents: int | None = None
    ) -> EvalBatches:
        """Returns one pass over the held-out documents."""

    @abc.abstractmethod
    def texts(self) -> Iterator[str]:
        """Yields the text of every document, training and held out, in the source's order."""

    @abc.abstractmethod
    def describe(self) -> dict[str, object]:
        """Returns what a report says about the data, as JSON values."""

    @staticmethod
    def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns the global batch's position from those of all processes; see ``merge_states``."""
        return merge_states(states)


class DocumentInput(BaseInput):
    """Text documents, packed into rows; what becomes of the rows is a subclass's.

    Each row of the global batch is a stream of its own: the document at place i of the training
    order (epoch after epoch, each a new permutation) goes to row i mod ``batch_size`` and is packed
    there. So batch n depends on this configuration and n only, a process feeds just the rows its
    devices own, and a saved position restores on any number of processes.

    Making it touches no file; ``prepare``, ``iterator`` and ``heldout`` do.
    """

    class Config(BaseInput.Config):
        """Which documents, and how they are split and shuffled."""

        source: BaseSource.Config = PythonReference.Config()
        tokenizer: BaseTokenizer.Config = ByteTokenizer.Config()
        # Share of documents held out for evaluation, chosen by the hash of their id.
        heldout_fraction: float = 0.1
        # Which side of the split the iterator reads.
        split: Literal["train", "heldout", "all"] = "train"
        shuffle: bool = True
        seed: Dim = scaled(1, of="seed")
        # Batches read ahead by a thread; 0 for none.
        prefetch: int = 2

        if TYPE_CHECKING:

            def instantiate(self, **kwargs: object) -> DocumentInput: ...

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg
        self._batch_size = _at_least("batch_size", cfg.batch_size, 1)
        self._seq_len = _at_least("seq_len", cfg.seq_len, 1)
        self._prefetch = _at_least("prefetch", cfg.prefetch, 0)
        if not 0 <= cfg.heldout_fraction < 1:
            raise DataError(
                f"got heldout_fraction={cfg.heldout_fraction}, expected 0 or more and less than 1",
                code="AX531",
                hint="0.1 holds out about a tenth of the documents",
            )
        self._source = cfg.source.instantiate()
        self._tokenizer = cfg.tokenizer.instantiate()
        self._lock = threading.RLock()
        self._split: tuple[tuple[Group, ...], tuple[np.ndarray, ...], np.ndarray] | None = None

    @property
    @abc.abstractmethod
    def transform(self) -> BaseTransform | None:
        """What makes the task's batch of packed rows; None: packed rows are the batch."""

    @property
    def source(self) -> BaseSource:
        """Where the documents come from."""
        return self._source

    @property
    def tokenizer(self) -> BaseTokenizer:
        """What makes tokens of text."""
        return self._tokenizer

    def prepare(self) -> None:
        """Finds and checks the data and splits the documents.

        Raises:
            DataError: The source fails, or there are too few documents for the split.
        """
        self._groups()
        self._bound(self._tokenizer)

    def _bound(self, tokenizer: BaseTokenizer) -> tuple[int, BoundTransform | None]:
        """Returns (tokens packed into a row, what then makes the batch)."""
        if self.transform is None:
            return self._seq_len, None
        packed_len = self.transform.packed_len(self._seq_len)
        return packed_len, self.transform.bind(tokenizer, self._seq_len)

    def example(self) -> Batch:
        """Returns one row of padding; needs no data, and the tokenizer only for a transform."""
        if self.transform is None:
            return empty_batch(1, self._seq_len)
        packed_len, transform = self._bound(self._tokenizer)
        batch = empty_batch(1, packed_len, self._tokenizer.pad_id)
        return batch if transform is None else transform(batch, [row_key(0, 0, 0)])

    def _groups(self) -> tuple[tuple[Group, ...], tuple[np.ndarray, ...], np.ndarray]:
        """Returns (groups, their training documents, all held-out documents)."""
        with self._lock:
            if self._split is None:
                self._split = self._make_split()
            return self._split

    def _make_split(self) -> tuple[tuple[Group, ...], tuple[np.ndarray, ...], np.ndarray]:
        self._source.prepare()
        hashes = self._source.hashes()
        groups = tuple(self._source.groups())
        fraction = self._cfg.heldout_fraction
        if len(hashes) == 0:
            raise DataError("the source has no documents", code="AX502")
        if self._cfg.split == "all":
            fraction = 0.0
        streamed: list[np.ndarray] = []
        heldout: list[np.ndarray] = []
        for group in groups:
            numbers = np.arange(group.start, group.stop, dtype=np.int64)
            held = heldout_mask(hashes[group.start : group.stop], fraction)
            heldout.append(numbers[held])
            streamed.append(numbers[held if self._cfg.split == "heldout" else ~held])
        if fraction > 0 and sum(map(len, heldout)) == 0:
            raise DataError(
                f"got {len(hashes)} document(s), too few to hold out a share of {fraction}",
                code="AX513",
                hint='split files into documents (split="paragraph"), add documents, '
                "or set heldout_fraction=0 and train without evaluation",
            )
        kept = [i for i, numbers in enumerate(streamed) if len(numbers)]
        if not kept:
            raise DataError(
                f"the split {self._cfg.split!r} has no documents",
                code="AX513",
                hint="set heldout_fraction above 0",
            )
        return (
            tuple(groups[i] for i in kept),
            tuple(streamed[i] for i in kept),
            np.concatenate(heldout),
        )

    def order(self) -> DocumentOrder:
        """Returns the documents in training order: ``order()[i]`` is the number of the i-th."""
        groups, members, _ = self._groups()
        return DocumentOrder(
            members,
            names=[g.name for g in groups],
            weights=[g.weight for g in groups],
            seed=self._cfg.seed,
            shuffle=self._cfg.shuffle,
        )

    def iterator(self, rows: Sequence[int] | None = None) -> BatchIterator:
        """Returns endless batches of the global batch's ``rows``.

        Args:
            rows: Numbers of the rows that this process feeds; None for all ``batch_size``.

        Raises:
            DataError: The data are not as they should be, or a row is outside the global batch.
        """
        rows = self._check_rows(rows)
        order = self.order()
        streams = [self._stream(order, row) for row in rows]
        packed_len, transform = self._bound(self._tokenizer)
        pad_id, seed = self._tokenizer.pad_id, self._cfg.seed

        def make(number: int) -> Batch:
            batch = batch_of(streams, packed_len, pad_id)
            if transform is None:
                return batch
            return transform(batch, [row_key(seed, row, number) for row in rows])

        return BatchIterator(
            streams,
            make,
            rows=rows,
            origin=self._origin(order),
            prefetch=self._prefetch,
        )

    def _stream(self, order: DocumentOrder, row: int) -> RowStream:
        empty_in_a_row = 0
        limit = len(self._source)

        def fetch(ordinal: int) -> np.ndarray:
            nonlocal empty_in_a_row
            document = self._source[order[ordinal * self._batch_size + row]]
            sequence = document_sequence(self._tokenizer, document.text)
            empty_in_a_row = 0 if len(sequence) > 1 else empty_in_a_row + 1
            if empty_in_a_row > limit:
                raise DataError(
                    f"the last {empty_in_a_row} documents hold no text",
                    code="AX502",
                    where=document.id,
                    hint="check which field or column of the data holds the text",
                )
            return sequence

        return RowStream(fetch)

    def _check_rows(self, rows: Sequence[int] | None) -> tuple[int, ...]:
        if rows is None:
            return tuple(range(self._batch_size))
        outside = [r for r in rows if not 0 <= r < self._batch_size]
        if outside or len(set(rows)) != len(rows):
            raise DataError(
                f"got rows {list(rows)}, expected distinct ones from 0 to {self._batch_size - 1}",
                code="AX514",
                hint="rows are numbered within the global batch, not within the process",
            )
        return tuple(int(r) for r in rows)

    def _origin(self, order: DocumentOrder) -> dict[str, Any]:
        task = {} if self.transform is None else {"transform": self.transform.cfg.to_text()}
        return task | {
            "source": self._source.fingerprint(),
            "tokenizer": self._tokenizer.fingerprint(),
            "batch_size": self._batch_size,
            "seq_len": self._seq_len,
            "seed": self._cfg.seed,
            "shuffle": self._cfg.shuffle,
            "split": self._cfg.split,
            "heldout_fraction": self._cfg.heldout_fraction,
            "order": digest_of(*(order[i] for i in range(_PROBED_PLACES))),
        }

    def heldout(
        self, rows: Sequence[int] | None = None, *, max_documents: int | None = None
    ) -> HeldoutBatches:
        """Returns one pass over the held-out documents.

        Args:
            rows: Rows of the global batch to return; None for all ``batch_size``.
            max_documents: Reads only the first so many held-out documents.

        Raises:
            DataError: Nothing is held out, or the data are not as they should be.
        """
        rows = self._check_rows(rows)
        _, _, numbers = self._groups()
        if len(numbers) == 0:
            raise DataError(
                "no documents are held out, so there is nothing to evaluate on",
                code="AX513",
                hint="set input.heldout_fraction, for example to 0.1, or leave out the evaler",
            )
        return self._pass(self._source, numbers[:max_documents], self._tokenizer, rows)

    def batches_of(
        self,
        source: BaseSource,
        tokenizer: BaseTokenizer,
        rows: Sequence[int] | None = None,
    ) -> HeldoutBatches:
        """Returns one pass over all documents of another source, as ``heldout`` would.

        Args:
            source: Where they are; prepared.
            tokenizer: What makes tokens of them.
            rows: Rows of the global batch to return; None for all ``batch_size``.
        """
        return self._pass(source, np.arange(len(source)), tokenizer, self._check_rows(rows))

    def _pass(
        self,
        source: BaseSource,
        documents: np.ndarray,
        tokenizer: BaseTokenizer,
        rows: tuple[int, ...],
    ) -> HeldoutBatches:
        packed_len, transform = self._bound(tokenizer)
        return HeldoutBatches(
            source,
            documents,
            tokenizer,
            batch_size=self._batch_size,
            seq_len=packed_len,
            rows=rows,
            transform=transform,
        )

    def train_documents(self) -> Iterator[Document]:
        """Yields the documents the iterator reads, each once, in the source's order."""
        _, members, _ = self._groups()
        return (self._source[int(i)] for numbers in members for i in numbers)

    def texts(self) -> Iterator[str]:
        """Yields the text of every document, training and held out, in the source's order."""
        self.prepare()
        return (self._source[i].text for i in range(len(self._source)))

    def describe(self) -> dict[str, object]:
        """Returns the source's description with the sizes of the split."""
        _, members, heldout = self._groups()
        return self._source.describe() | {
            "tokenizer": type(self._tokenizer).__name__,
            "vocab_size": self._tokenizer.vocab_size,
            "train_documents": sum(map(len, members)),
            "heldout_documents": len(heldout),
        }


class TextInput(DocumentInput):
    """Text documents as batches of a language model; see ``axcore.data.empty_batch``."""

    class Config(DocumentInput.Config):
        """No further fields."""

        if TYPE_CHECKING:

            def instantiate(self, **kwargs: object) -> TextInput: ...

    @property
    def transform(self) -> None:
        """None: packed rows are the batch."""


class TransformedTextInput(DocumentInput):
    """Text documents as batches of another task, such as masked language modelling."""

    class Config(DocumentInput.Config):
        """Which task."""

        transform: Required[BaseTransform.Config] = REQUIRED

        if TYPE_CHECKING:

            def instantiate(self, **kwargs: object) -> TransformedTextInput: ...

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._made = cfg.transform.instantiate()

    @property
    def transform(self) -> BaseTransform:
        """What makes the task's batch of packed rows."""
        return self._made


def _at_least(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or value < least:
        raise DataError(
            f"got {name}={value!r}, expected an integer of {least} or more",
            code="AX531",
            hint=f"set input.{name}, or the trainer's {name} that it follows",
        )
    return value
