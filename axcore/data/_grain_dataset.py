"""A grain dataset as a source of documents: whatever grain reads or transforms, we can train on."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from axcore.config import REQUIRED, Required
from axcore.config import Config as AnyConfig
from axcore.data._order import indexed_hashes
from axcore.data._source import BaseSource, Document, digest_of
from axcore.errors import DataError, did_you_mean

__all__ = ["GrainDataset"]


class GrainDataset(BaseSource):
    """The elements of a ``grain.MapDataset`` (ArrayRecord files, own transformations, ...).

    An element is a string, UTF-8 bytes, or a mapping with such a value; one that grain's ``filter``
    removed is an empty document. Leave shuffling, repeating, batching and mixing to ``TextInput``
    and ``Mixture``: they keep positions exact.

    Example:
        ``GrainDataset.Config(dataset=config_for(my_package.make_dataset, split="train"))``
    """

    class Config(BaseSource.Config):
        """How to make the dataset, and where in an element the text is."""

        # Called once; returns a grain.MapDataset (or any sequence).
        dataset: Required[AnyConfig] = REQUIRED
        # Key of the text in elements that are mappings.
        field: str = "text"
        # Stands for the data in document ids, and with them in the held-out split.
        name: str = "grain"

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg
        self._lock = threading.Lock()
        self._dataset: Any = None

    def prepare(self) -> None:
        """Makes the dataset and reads its first element.

        Raises:
            DataError: It has no elements, or the first one has no text.
        """
        with self._lock:
            if self._dataset is not None:
                return
            dataset = self._cfg.dataset.instantiate()
            if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
                raise DataError(
                    f"got a {type(dataset).__name__}, expected a grain MapDataset",
                    code="AX509",
                    hint="an IterDataset has no random access; leave out to_iter_dataset()",
                )
            if len(dataset) == 0:
                raise DataError(
                    "the dataset has no elements",
                    code="AX502",
                    where=self._cfg.name,
                    hint="check what makes it",
                )
            self._text(dataset[0])
            self._dataset = dataset

    def _text(self, element: Any) -> str:
        if element is None:
            return ""
        if isinstance(element, dict):
            if self._cfg.field not in element:
                names = [str(k) for k in element]
                raise DataError(
                    f"the element has no field {self._cfg.field!r}; it has {', '.join(names)}",
                    code="AX507",
                    where=self._cfg.name,
                    hint=did_you_mean(self._cfg.field, names) or "set the source's field",
                )
            element = element[self._cfg.field]
        try:
            text = element.decode("utf-8") if isinstance(element, bytes) else element
        except UnicodeDecodeError as e:
            raise DataError(
                f"got bytes that are not UTF-8 text: {e}",
                code="AX503",
                where=self._cfg.name,
                hint="decode them in the dataset: .map(lambda b: b.decode(...))",
            ) from e
        if not isinstance(text, str):
            raise DataError(
                f"got an element of {type(text).__name__}, expected text",
                code="AX503",
                where=self._cfg.name,
                hint="map the dataset's elements to strings",
            )
        return text

    def __len__(self) -> int:
        """Returns the number of elements."""
        self.prepare()
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> Document:
        """Returns element ``index``."""
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        return Document(id=f"{self._cfg.name}#{index}", text=self._text(self._dataset[index]))

    def hashes(self) -> np.ndarray:
        """Returns a hash of each element's number, shape (elements,), uint64."""
        return indexed_hashes(self._cfg.name, len(self))

    def fingerprint(self) -> str:
        """Returns a digest of the number of elements and of five of them."""
        count = len(self)
        probes = sorted({0, count // 4, count // 2, 3 * count // 4, count - 1})
        return digest_of(self._cfg.name, count, *(self[i].text for i in probes))
