"""Batches in training order, with a position that can be saved and restored exactly.

The inner iterator speaks grain's protocol of checkpointable iterators (``__next__``, ``get_state``,
``set_state``). grain's own datasets of batching, packing and slicing are not used: they keep state
per process, shaped by the process count, where here state belongs to rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from axcore.data._packing import Batch
from axcore.data._prefetch import Prefetcher
from axcore.errors import DataError

__all__ = ["BatchIterator", "Stream", "check_same_origin", "merge_states"]

_VERSION = 1


class Stream(Protocol):
    """One row of the batch: two integers say what it gives next.

    Attributes:
        document: Documents (images, ...) finished by the row.
        offset: What has been used of the next one.
    """

    document: int
    offset: int

    def seek(self, document: int, offset: int) -> None:
        """Goes to a place."""
        ...


class _Batches:
    """The batches of some rows, in order; grain's protocol, one thread at a time."""

    def __init__(self, streams: Sequence[Stream], make: Callable[[int], Batch]):
        self._streams = list(streams)
        self._make = make
        self._state = self._snapshot(0)

    def __next__(self) -> Batch:
        try:
            batch = self._make(self._state["batch"])
        except BaseException:
            # Rows before the failing one have moved on: take them back, so that another attempt
            # gives this batch and not the one after it with pieces missing.
            self.set_state(self._state)
            raise
        self._state = self._snapshot(self._state["batch"] + 1)
        return batch

    def get_state(self) -> dict[str, Any]:
        return self._state

    def _snapshot(self, batch: int) -> dict[str, Any]:
        places = np.array([(s.document, s.offset) for s in self._streams], dtype=np.int64)
        return {"batch": batch, "places": places.reshape(-1, 2)}

    def set_state(self, state: dict[str, Any]) -> None:
        self._state = {"batch": int(state["batch"]), "places": state["places"]}
        for stream, (document, offset) in zip(self._streams, state["places"], strict=True):
            stream.seek(int(document), int(offset))


class BatchIterator(Iterator[Batch]):
    """Endless batches of the rows asked for, read ahead in a thread.

    Use it as a context manager or ``close`` it; the thread is a daemon and never keeps the process
    from ending. One thread may use it at a time.

    Args:
        streams: One per row.
        make: Number of the batch -> the batch that the streams give next; it moves them on.
        rows: The rows' numbers in the global batch, in the order of the batch's first dim.
        origin: What the batches are made of: entries that must be equal for a position to mean
            the same.
        prefetch: Batches read ahead; 0 reads in the caller's thread.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        make: Callable[[int], Batch],
        *,
        rows: Sequence[int],
        origin: Mapping[str, Any],
        prefetch: int,
    ):
        self.rows = tuple(rows)
        self._origin = dict(origin)
        self._closed = False
        batches = _Batches(streams, make)
        self._inner = Prefetcher(batches, prefetch) if prefetch > 0 else batches

    def __next__(self) -> Batch:
        """Returns the next batch: arrays whose first dim is the rows.

        Raises:
            DataError: Reading failed (also in the background; the next call tries this batch
            again),
                or the iterator is closed.
        """
        if self._closed:
            raise DataError(
                "the input was closed; it has no further batches",
                code="AX512",
                hint="make a new iterator and restore the saved position",
            )
        return next(self._inner)

    def state(self) -> dict[str, Any]:
        """Returns the position after the batches handed out so far, as JSON values.

        ``rows`` maps a row's number to [documents finished by the row, pairs used of the next one].
        """
        state = self._inner.get_state()
        places = {str(r): p.tolist() for r, p in zip(self.rows, state["places"], strict=True)}
        return {
            "version": _VERSION,
            "batch": int(state["batch"]),
            "origin": dict(self._origin),
            "rows": places,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes to a position from ``state`` or ``merge_states``; it may hold more rows than needed.

        Raises:
            DataError: The position is of other data, another seed or batch size, or lacks a row.
        """
        check_same_origin(state, self._origin)
        places: Mapping[str, Any] = state["rows"]
        missing = [r for r in self.rows if str(r) not in places]
        if missing:
            raise DataError(
                f"the saved position lacks rows {missing[:8]}; it has {len(places)} row(s)",
                code="AX511",
                hint="merge the states of all processes (merge_states) before saving",
            )
        wanted = np.array([places[str(r)] for r in self.rows], dtype=np.int64).reshape(-1, 2)
        self._inner.set_state({"batch": int(state["batch"]), "places": wanted})

    def close(self) -> None:
        """Stops reading ahead. Harmless when repeated."""
        if self._closed:
            return
        self._closed = True
        if isinstance(self._inner, Prefetcher):
            self._inner.close()

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()


def check_same_origin(state: Mapping[str, Any], origin: Mapping[str, Any]) -> None:
    """Checks that a saved position belongs to batches made of ``origin``.

    Raises:
        DataError: It does not; the message says in what they differ.
    """
    if state.get("version") != _VERSION or "rows" not in state or "origin" not in state:
        raise DataError(
            f"got a saved data position of version {state.get('version')!r}, expected {_VERSION}",
            code="AX510",
            hint="it was written by another version of axcore, or is not a data position",
        )
    saved: Mapping[str, Any] = state["origin"]
    differ = [k for k in sorted({*saved, *origin}) if saved.get(k) != origin.get(k)]
    if differ:
        details = "; ".join(f"{k}: saved {saved.get(k)!r}, now {origin.get(k)!r}" for k in differ)
        raise DataError(
            f"the saved data position is of other batches than this configuration gives: {details}",
            code="AX510",
            hint="go on with the data and settings of the run, or start a new run from its weights",
        )


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the position of the whole batch from those of its parts, in any order.

    The result does not depend on how many parts there were.

    Raises:
        DataError: The parts are of different batches or settings, or contradict each other.
    """
    if not states:
        raise DataError("got no data positions to merge, expected one per process", code="AX511")
    first = states[0]
    rows: dict[int, Any] = {}
    for state in states:
        check_same_origin(state, first["origin"])
        if state["batch"] != first["batch"]:
            raise DataError(
                f"processes are at different batches: {first['batch']} and {state['batch']}",
                code="AX511",
                hint="save at the same step in every process",
            )
        for row, place in state["rows"].items():
            if rows.setdefault(int(row), place) != place:
                raise DataError(
                    f"two processes disagree about row {row}: {rows[int(row)]} and {place}",
                    code="AX511",
                    hint="replicas of a row must be fed the same batches",
                )
    return {
        "version": _VERSION,
        "batch": first["batch"],
        "origin": dict(first["origin"]),
        "rows": {str(row): rows[row] for row in sorted(rows)},
    }
