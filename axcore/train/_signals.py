"""Ctrl-C and SIGTERM: finish the step, save, exit; a second signal exits at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, Self

__all__ = ["GracefulStop"]


class GracefulStop:
    """Context manager that turns the first SIGINT or SIGTERM into a request to stop.

    Outside of the main thread Python allows no handlers: the request can then only be made with
    :meth:`request`.

    Attributes:
        requested: Name of the signal that asked to stop, or None.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        self._old: dict[int, Any] = {}

    def request(self, name: str) -> None:
        """Asks to stop after the step that runs."""
        self.requested = self.requested or name

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        name = signal.Signals(number).name
        if self.requested is not None:
            # os._exit and not sys.exit: a save or a compilation may hold the main thread for long.
            os.write(2, f"\n{name} again: exiting at once\n".encode())
            os._exit(128 + number)
        self.requested = name
        os.write(2, f"\n{name}: finishing this step and saving; once more exits at once\n".encode())

    def __enter__(self) -> Self:
        """Installs the handlers."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._old[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        """Puts the former handlers back."""
        for number, old in self._old.items():
            signal.signal(number, old)
        self._old.clear()

    def agreed(self) -> str | None:
        """Returns the request if any process of the run has one; all get the same answer.

        With several processes this is a collective call: all make it at the same step.
        """
        jax = sys.modules.get("jax")
        if jax is None or jax.process_count() == 1:
            return self.requested
        import numpy as np
        from jax.experimental import multihost_utils

        asked = multihost_utils.process_allgather(np.array(self.requested is not None))
        if bool(np.any(asked)):
            return self.requested or "another process's signal"
        return None
