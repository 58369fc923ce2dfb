"""How long steps take, without what happens between them."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import jax

__all__ = ["Timing"]


class Timing:
    """Time spent in training steps, without compilation, evaluation and saves."""

    def __init__(self, start: float):
        self._start = start
        self._mark = (start, 0)
        self._seconds, self._steps = 0.0, 0
        self.first_step_seconds: float | None = None

    def first_step(self, step: int) -> None:
        """The first step, which includes compiling, has finished."""
        now = time.perf_counter()
        self.first_step_seconds = now - self._start
        self._mark = (now, step)

    def step_seconds(self, step: int) -> float:
        """Returns seconds per step since the last call; 0 for the first step."""
        now, (then, before) = time.perf_counter(), self._mark
        self._mark = (now, step)
        if step <= before:
            return 0.0
        self._seconds += now - then
        self._steps += step - before
        return (now - then) / (step - before)

    @contextlib.contextmanager
    def paused(self, device_value: Any):
        """Leaves out what runs inside; waits for the device first."""
        jax.block_until_ready(device_value)
        begin = time.perf_counter()
        try:
            yield
        finally:
            then, step = self._mark
            self._mark = (then + time.perf_counter() - begin, step)

    @property
    def mean_step_seconds(self) -> float | None:
        """Mean over all logged steps but the first."""
        return self._seconds / self._steps if self._steps else None
