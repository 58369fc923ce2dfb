"""The role every source of documents plays, and the record it hands out."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from axcore.config import Configurable
from axcore.data._order import Group

__all__ = ["BaseSource", "Document", "Skipped", "digest_of"]


@dataclass(frozen=True)
class Document:
    """One document: the unit of splitting, shuffling and packing."""

    id: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length in bytes as UTF-8: the denominator of bits per byte."""
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class Skipped:
    """A file or line that was left out because the configuration asked for it."""

    where: str
    reason: str


class BaseSource(Configurable, abc.ABC):
    """Documents with random access. Subclass it to read another kind of data.

    Making a source touches nothing: an experiment can be built, compiled for other hardware and
    explained where its data are not. ``prepare`` finds and checks the data, and everything that
    needs them calls it. It also satisfies grain's ``RandomAccessDataSource``:
    ``grain.MapDataset.source(source)``.
    """

    class Config(Configurable.Config):
        """Fields that every source has: none."""

        if TYPE_CHECKING:

            def instantiate(self, **kwargs: object) -> BaseSource: ...

    def __init__(self, cfg: Config):
        self.cfg = cfg

    @abc.abstractmethod
    def prepare(self) -> None:
        """Finds and checks the data; once is enough, more is harmless.

        Raises:
            DataError: Data are missing, empty, unreadable or not what they should be.
        """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Returns the number of documents."""

    @abc.abstractmethod
    def __getitem__(self, index: int, /) -> Document:
        """Returns document ``index`` (0 ... len - 1); callable from several threads."""

    @abc.abstractmethod
    def hashes(self) -> np.ndarray:
        """Returns a hash of each document's id, which decides the split: (documents,), uint64."""

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Returns a digest that changes with the documents; saved positions carry it."""

    def groups(self) -> Sequence[Group]:
        """Returns the parts that are mixed by weight; one part unless the source is a mixture."""
        return (Group(name="", start=0, stop=len(self)),)

    def skipped(self) -> Sequence[Skipped]:
        """Returns what was left out (only where the configuration asks to skip)."""
        return ()

    def describe(self) -> dict[str, object]:
        """Returns what a report says about the data, as JSON values."""
        return {
            "source": type(self).__name__,
            "documents": len(self),
            "fingerprint": self.fingerprint(),
            "skipped": len(self.skipped()),
        }

    def __iter__(self) -> Iterator[Document]:
        """Yields every document in the source's own order."""
        return (self[i] for i in range(len(self)))


def digest_of(*parts: object) -> str:
    """Returns a short hex digest of the parts' texts."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()
