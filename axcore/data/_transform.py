"""The role of what makes another task of packed rows of text."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from axcore.config import Configurable
from axcore.data._packing import Batch
from axcore.data._tokenizers import BaseTokenizer

__all__ = ["BaseTransform", "BoundTransform", "row_key"]

# A packed batch and a key for each of its rows -> the batch of the task.
BoundTransform = Callable[[Batch, Sequence[str]], Batch]


class BaseTransform(Configurable, abc.ABC):
    """Packed rows of a language model -> the batch of another task, row by row.

    What a row becomes depends on the row, on its key and on this configuration only, so it is the
    same on any number of processes and after any resume. Randomness comes from the key, through
    ``axcore.data.indexed_hashes``, not from a generator whose numbers change with a version.
    """

    class Config(Configurable.Config):
        """Fields that every transform has: none."""

        if TYPE_CHECKING:

            def instantiate(self, **kwargs: object) -> BaseTransform: ...

    def __init__(self, cfg: Config):
        self.cfg = cfg

    @abc.abstractmethod
    def packed_len(self, seq_len: int) -> int:
        """Returns how many tokens are packed into a row for the task's rows of ``seq_len``.

        Raises:
            DataError: The rows are too short for the task.
        """

    @abc.abstractmethod
    def bind(self, tokenizer: BaseTokenizer, seq_len: int) -> BoundTransform:
        """Returns the transform for a tokenizer, and rows of ``seq_len``.

        Args:
            tokenizer: What made the tokens.
            seq_len: Length of the task's rows.

        Returns:
            A pure function of (a batch as of ``axcore.data.empty_batch``, a key per row), callable
            from several threads.

        Raises:
            DataError: The tokenizer lacks what the task needs.
        """


def row_key(stream: object, row: int, batch: int) -> str:
    """Returns the key of a row: of which stream of batches, which row, which batch."""
    return f"{stream}\x1f{row}\x1f{batch}"
