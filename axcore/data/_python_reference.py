"""The embedded default data: the Python language reference that every CPython carries."""

from __future__ import annotations

import hashlib
import importlib
import platform
from collections.abc import Mapping

import numpy as np

from axcore.data._order import document_hash
from axcore.data._source import BaseSource, Document, digest_of
from axcore.errors import DataError

__all__ = ["PythonReference"]


class PythonReference(BaseSource):
    """The help topics of the running Python (``pydoc_data.topics``): about 80 documents, 466 kB.

    Real text that needs no download. It differs between Python versions, so its digest is part of
    reports and of saved positions. Documents are the topics, sorted by name.
    """

    class Config(BaseSource.Config):
        """No fields."""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._documents: tuple[Document, ...] | None = None

    def prepare(self) -> None:
        """Loads the topics.

        Raises:
            DataError: This Python was installed without them.
        """
        if self._documents is not None:
            return
        try:
            topics: Mapping[str, str] = importlib.import_module("pydoc_data.topics").topics
        except ImportError as e:
            raise DataError(
                "this Python has no pydoc_data.topics, which the embedded text is made of",
                code="AX501",
                hint="install Python's standard library in full (Debian: libpython3-stdlib), "
                "or train on your own text: --set input.source.paths=...",
            ) from e
        self._documents = tuple(Document(id=k, text=topics[k]) for k in sorted(topics))

    def _all(self) -> tuple[Document, ...]:
        self.prepare()
        assert self._documents is not None
        return self._documents

    def __len__(self) -> int:
        """Returns the number of topics."""
        return len(self._all())

    def __getitem__(self, index: int, /) -> Document:
        """Returns topic ``index``."""
        return self._all()[index]

    def hashes(self) -> np.ndarray:
        """Returns a hash of each topic's name, shape (topics,), uint64."""
        return np.array([document_hash(d.id) for d in self._all()], dtype=np.uint64)

    def fingerprint(self) -> str:
        """Returns a digest of names and texts."""
        return digest_of(*(part for d in self._all() for part in (d.id, d.text)))

    def sha256(self) -> str:
        """Returns the SHA-256 of all texts, joined by blank lines, in hex."""
        joined = "\n\n".join(d.text for d in self._all())
        return hashlib.sha256(joined.encode("utf-8")).hexdigest()

    def describe(self) -> dict[str, object]:
        """Returns what a report says about the data, Python's version and the text's SHA-256."""
        return super().describe() | {
            "python": platform.python_version(),
            "bytes": sum(d.num_bytes for d in self._all()),
            "sha256": self.sha256(),
        }
