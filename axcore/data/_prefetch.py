"""Reading ahead in a thread, without letting the saved position run ahead.

grain's ``ThreadPrefetchDatasetIterator`` does the same for any iterator of this protocol. It is not
used because handing out a batch that lies ready costs 100 us there (it keeps statistics of every
element) and 27 us here, on one machine, and a training step's whole host budget is 100 us; and
because it prints a traceback when a process ends without closing it.
"""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["CheckpointableIterator", "Prefetcher"]

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
# How long `close` waits for a batch being read; the thread is a daemon, so that storage which does
# not answer never keeps the process from ending.
_CLOSE_SECONDS = 5.0


class CheckpointableIterator(Protocol[_T_co]):
    """grain's protocol of iterators whose position can be saved (see its ``DatasetIterator``)."""

    def __next__(self) -> _T_co:
        """Returns the next element."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the elements given so far."""
        ...

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position."""
        ...


class _Worker(Generic[_T]):
    """A thread that reads one element for each request, with the state after it."""

    def __init__(self, source: CheckpointableIterator[_T], ahead: int):
        # Both queues are implemented in C; a bounded queue.Queue costs some 20 us more per batch.
        self.requests: SimpleQueue[bool] = SimpleQueue()
        self.ready: SimpleQueue[tuple[_T | None, dict[str, Any], BaseException | None]]
        self.ready = SimpleQueue()
        for _ in range(ahead):
            self.requests.put(True)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(source,), daemon=True, name="axcore-data-prefetch"
        )
        self._thread.start()

    def _run(self, source: CheckpointableIterator[_T]) -> None:
        while self.requests.get() and not self._stop.is_set():
            try:
                element = next(source)
                self.ready.put((element, source.get_state(), None))
            except BaseException as e:  # handed to the caller, who raises it
                self.ready.put((None, {}, e))
                return

    def request_stop(self) -> None:
        self._stop.set()
        self.requests.put(False)

    def join(self, timeout: float | None) -> None:
        self._thread.join(timeout)


class Prefetcher(Generic[_T]):
    """An iterator that has up to ``ahead`` elements read in advance; it keeps the same protocol.

    The thread starts with the first element asked for. Its position is that after the elements
    handed out. An error met in the thread is raised when its turn comes; asking again tries the
    same element again, nothing is skipped.

    Args:
        source: What to read; nobody else may use it meanwhile. It must not advance when it raises.
        ahead: Number of elements, at least 1.
    """

    def __init__(self, source: CheckpointableIterator[_T], ahead: int):
        self._source = source
        self._ahead = ahead
        self._state = source.get_state()
        self._worker: _Worker[_T] | None = None
        self._stop_worker: weakref.finalize[..., Any] | None = None

    def __next__(self) -> _T:
        """Returns the next element; waits for it if need be."""
        if self._worker is None:
            self._worker = _Worker(self._source, self._ahead)
            # Also when this object is forgotten, and at the end of the process.
            self._stop_worker = weakref.finalize(self, self._worker.request_stop)
        element, state, failure = self._worker.ready.get()
        if failure is not None:
            # The thread ended with it. The next call starts another one at the same element.
            self._end_worker(None)
            raise failure
        self._worker.requests.put(True)
        self._state = state
        return element  # pyright: ignore[reportReturnType]

    def get_state(self) -> dict[str, Any]:
        """Returns the position after the elements handed out."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position; what was read ahead is dropped."""
        self._end_worker(None)
        self._source.set_state(state)
        self._state = self._source.get_state()

    def close(self) -> None:
        """Ends the thread; waits a few seconds at most for the element being read."""
        self._end_worker(_CLOSE_SECONDS)

    def _end_worker(self, timeout: float | None) -> None:
        if self._worker is None or self._stop_worker is None:
            return
        self._stop_worker()
        self._worker.join(timeout)
        self._worker = self._stop_worker = None
