"""Several sources mixed by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from axcore.config import REQUIRED, Required
from axcore.data._order import Group, mixing_slots
from axcore.data._source import BaseSource, Document, Skipped, digest_of
from axcore.errors import DataError

__all__ = ["Mixture"]


class Mixture(BaseSource):
    """Draws documents from several sources in proportion to their weights, deterministically.

    Weights are shares of *documents* drawn, and exact in every 10,000 draws. Each source runs
    through its own epochs: a small one with a large weight simply comes round more often. A mixture
    may contain mixtures.

    Example:
        ``Mixture.Config(sources={"web": JsonLines.Config(...), "code": TextFiles.Config(...)},
        weights={"web": 0.8, "code": 0.2})``
    """

    class Config(BaseSource.Config):
        """Sources by name, and a weight for each name; without weights all are equal."""

        sources: Required[Mapping[str, BaseSource.Config]] = REQUIRED
        weights: Mapping[str, float] = {}

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._sources: dict[str, BaseSource] = {k: c.instantiate() for k, c in cfg.sources.items()}
        self._weights = dict(cfg.weights) or dict.fromkeys(self._sources, 1.0)
        self._first: np.ndarray | None = None

    def prepare(self) -> None:
        """Checks the weights, then every source.

        Raises:
            DataError: Names and weights do not match, a weight is not positive, or a source fails.
        """
        if self._first is not None:
            return
        if set(self._weights) != set(self._sources):
            raise DataError(
                f"got weights for {sorted(self._weights)}, expected one for each of "
                f"{sorted(self._sources)}",
                code="AX520",
                hint="give each source exactly one weight, or none at all for equal shares",
            )
        mixing_slots([self._weights[name] for name in self._sources])
        for source in self._sources.values():
            source.prepare()
        lengths = [len(s) for s in self._sources.values()]
        self._first = np.cumsum([0, *lengths], dtype=np.int64)

    def _starts(self) -> np.ndarray:
        self.prepare()
        assert self._first is not None
        return self._first

    def __len__(self) -> int:
        """Returns the number of documents of all sources together."""
        return int(self._starts()[-1])

    def __getitem__(self, index: int, /) -> Document:
        """Returns document ``index``; sources follow each other in the order they are given."""
        first = self._starts()
        if not 0 <= index < first[-1]:
            raise IndexError(f"document {index} of {len(self)}")
        number = int(np.searchsorted(first, index, side="right")) - 1
        name, source = list(self._sources.items())[number]
        document = source[index - int(first[number])]
        return replace(document, id=f"{name}/{document.id}")

    def hashes(self) -> np.ndarray:
        """Returns the sources' own hashes: a document is held out here exactly when it is there."""
        self.prepare()
        return np.concatenate([s.hashes() for s in self._sources.values()])

    def groups(self) -> Sequence[Group]:
        """Returns a group per source, those of inner mixtures with their share of the weight."""
        result: list[Group] = []
        for (name, source), offset in zip(self._sources.items(), self._starts(), strict=False):
            inner = source.groups()
            total = sum(g.weight for g in inner)
            for group in inner:
                result.append(
                    Group(
                        name=f"{name}/{group.name}".rstrip("/"),
                        start=int(offset) + group.start,
                        stop=int(offset) + group.stop,
                        weight=self._weights[name] * group.weight / total,
                    )
                )
        return tuple(result)

    def fingerprint(self) -> str:
        """Returns a digest of the sources' digests, names and weights."""
        self.prepare()
        parts = [(n, self._weights[n], s.fingerprint()) for n, s in self._sources.items()]
        return digest_of(*(part for entry in parts for part in entry))

    def skipped(self) -> Sequence[Skipped]:
        """Returns what the sources left out."""
        return tuple(s for source in self._sources.values() for s in source.skipped())

    def describe(self) -> dict[str, object]:
        """Returns what a report says about the data, with an entry per source."""
        parts = {
            name: source.describe() | {"weight": self._weights[name]}
            for name, source in self._sources.items()
        }
        return super().describe() | {"sources": parts}
