"""Callbacks: user code that watches a run, each isolated from the others and from training."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from axcore.config import Configurable

__all__ = ["BaseCallback", "CallbackGroup"]

_log = logging.getLogger("axcore.train")


class BaseCallback(Configurable):
    """The role of a callback. Every event has a default that does nothing.

    Events run on the host between steps; arrays given are host values. What a callback raises is
    reported once and recorded in the run's report; training goes on.
    """

    class Config(Configurable.Config):
        """No fields of its own."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def on_start(self, *, out: Path, step: int, max_step: int) -> None:
        """The run starts or resumes after ``step`` finished steps."""

    def on_step(self, *, step: int, metrics: Mapping[str, float]) -> None:
        """A logged step has finished."""

    def on_eval(self, *, step: int, name: str, metrics: Mapping[str, float]) -> None:
        """The evaler ``name`` has finished."""

    def on_save(self, *, step: int) -> None:
        """A checkpoint of ``step`` has begun to be written."""

    def on_end(self, *, report: Mapping[str, Any]) -> None:
        """The run has ended, finished or stopped."""


class CallbackGroup:
    """Calls each callback in turn and keeps what failed.

    Attributes:
        failures: Name -> reason of callbacks that raised; they get no further events.
    """

    def __init__(self, callbacks: Mapping[str, BaseCallback]):
        self._callbacks = dict(callbacks)
        self.failures: dict[str, str] = {}

    @property
    def names(self) -> Sequence[str]:
        """Names of all callbacks."""
        return tuple(self._callbacks)

    def emit(self, event: str, **kwargs: Any) -> None:
        """Calls ``on_EVENT`` of every callback that has not failed."""
        for name, callback in self._callbacks.items():
            if name in self.failures:
                continue
            try:
                getattr(callback, f"on_{event}")(**kwargs)
            except Exception as error:
                reason = f"{type(error).__name__}: {error} (in on_{event})"
                self.failures[name] = reason
                _log.warning("callback %s failed and gets no further events: %s", name, reason)
