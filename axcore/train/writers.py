"""Metric writers: where the numbers of a run go. A sink that fails never stops training."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from axcore.config import Configurable
from axcore.errors import TrainError

__all__ = [
    "BaseWriter",
    "ConsoleWriter",
    "JsonlWriter",
    "TensorBoardWriter",
    "WriterGroup",
    "read_metrics",
]

_log = logging.getLogger("axcore.train")

#: A number, or the numbers of a vector, such as the load of each expert.
Metric = float | tuple[float, ...]


class BaseWriter(Configurable):
    """The role of a writer.

    The order of calls is ``open``, any number of ``write``, ``close``. What a writer raises is
    reported once and training goes on without it, so it need not guard itself.
    """

    takes_vectors: ClassVar[bool] = False
    """Whether ``write`` gets metrics that are vectors too, as tuples; else they are left out."""

    class Config(Configurable.Config):
        """No fields of its own."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    def open(self, out: Path, *, step: int, max_step: int) -> None:
        """Prepares the sink.

        Args:
            out: The run's directory.
            step: Finished steps; more than zero when the run resumes.
            max_step: Steps of the whole run.
        """

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records metrics of a step. Calls for one step add up: training first, then evaluations.

        Args:
            step: Number of finished steps.
            metrics: Name -> host scalar, or a tuple of them where ``takes_vectors``. ``loss`` and
                ``tokens`` are there for training steps.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Flushes and releases what ``open`` took."""


class JsonlWriter(BaseWriter):
    """Appends an object per call to ``metrics.jsonl``: ``{"step": 1, "loss": 2.3, ...}``.

    Numbers that JSON lacks (NaN, infinities) are written as null, vectors as lists. Each line
    reaches the operating system at once, so a kill costs at most the line being written; ``open``
    repairs a torn one. The last line of a step counts, so a second call for a step (its evaluation)
    repeats the first.
    """

    takes_vectors = True

    def __init__(self, cfg: BaseWriter.Config):
        super().__init__(cfg)
        self._file: IO[str] | None = None
        self._row: dict[str, Any] = {}

    def open(self, out: Path, *, step: int, max_step: int) -> None:
        """See :meth:`BaseWriter.open`."""
        path = out / "metrics.jsonl"
        _repair_last_line(path)
        self._file = open(path, "a", encoding="utf-8", buffering=1)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See :meth:`BaseWriter.write`."""
        if self._file is None:
            raise ValueError("the writer is not open")
        row = {"step": int(step), **{name: _json_number(v) for name, v in metrics.items()}}
        if self._row.get("step") == row["step"]:
            row = {**self._row, **row}
        self._row = row
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        """See :meth:`BaseWriter.close`."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


class TensorBoardWriter(BaseWriter):
    """Writes to ``tensorboard/`` with tensorboardX (extra ``tensorboard``): vectors as histograms.

    A histogram shows how far the numbers of a vector are apart; which is which is in the JSON
    lines. What is not finite is left out of it.
    """

    takes_vectors = True

    def __init__(self, cfg: BaseWriter.Config):
        super().__init__(cfg)
        self._writer: Any = None

    def open(self, out: Path, *, step: int, max_step: int) -> None:
        """See :meth:`BaseWriter.open`.

        Raises:
            TrainError: The extra ``tensorboard`` is not installed.
        """
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise TrainError(
                f"TensorBoard files need the package tensorboardX ({error})",
                code="AX750",
                hint="pip install 'axcore[tensorboard]'",
            ) from error
        # TensorBoard hides what an interrupted run had written from the purge step on.
        purge = step + 1 if step else None
        self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=purge)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See :meth:`BaseWriter.write`."""
        for name, value in metrics.items():
            if not isinstance(value, tuple):
                self._writer.add_scalar(name, float(value), step)
            elif known := [number for number in value if math.isfinite(number)]:
                self._writer.add_histogram(name, np.asarray(known), step)

    def close(self) -> None:
        """See :meth:`BaseWriter.close`."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class ConsoleWriter(BaseWriter):
    """Shows progress on stderr: a bar on a terminal, else a line now and then."""

    class Config(BaseWriter.Config):
        """How often to print when stderr is no terminal."""

        # Seconds between lines; the first, the last and evaluations are always printed.
        every_seconds: float = 10.0

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.cfg = cfg
        self._max_step = 0
        self._printed_at: float | None = None
        self._text = ""
        self._bar: Any = None
        self._task: Any = None

    def open(self, out: Path, *, step: int, max_step: int) -> None:
        """See :meth:`BaseWriter.open`."""
        self._max_step = max_step
        self._printed_at = None
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("step"),
                progress.MofNCompleteColumn(),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[text]}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("train", total=max_step, completed=step, text="")
            self._bar.start()

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """See :meth:`BaseWriter.write`."""
        evaluated = {k: v for k, v in metrics.items() if "/" in k and k.endswith(_EVALUATED)}
        text = _summary(metrics)
        if self._bar is not None:
            self._text = text or self._text  # an evaluation does not blank the loss
            self._bar.update(self._task, completed=step, text=self._text)
            if evaluated:
                self._bar.console.print(f"step {step}  {_pairs(evaluated)}", highlight=False)
            return
        now = time.monotonic()
        due = self._printed_at is None or now - self._printed_at >= self.cfg.every_seconds
        if due or evaluated or step >= self._max_step:
            self._printed_at = now
            parts = [f"step {step}/{self._max_step}", text, _pairs(evaluated)]
            sys.stderr.write("  ".join(part for part in parts if part) + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        """See :meth:`BaseWriter.close`."""
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.stop()


class WriterGroup:
    """Passes each call to every writer, isolated from each other.

    Attributes:
        failures: Name -> reason of writers that raised; they get no further calls. It belongs in
            the run's report.
    """

    def __init__(self, writers: Mapping[str, BaseWriter]):
        self._writers = dict(writers)
        self.failures: dict[str, str] = {}

    def open(self, out: Path, *, step: int, max_step: int) -> None:
        """Opens all writers."""
        self._each("open", args=lambda _: (out,), step=step, max_step=max_step)

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Writes to all writers, vectors to those that take them."""
        scalars = {name: v for name, v in metrics.items() if not isinstance(v, tuple)}
        self._each(
            "write",
            args=lambda writer: (step, metrics if writer.takes_vectors else scalars),
        )

    def close(self) -> None:
        """Closes all writers."""
        self._each("close")

    def _each(
        self,
        method: str,
        args: Callable[[BaseWriter], tuple[Any, ...]] = lambda _: (),
        **kwargs: Any,
    ) -> None:
        for name, writer in self._writers.items():
            if name in self.failures:
                continue
            try:
                getattr(writer, method)(*args(writer), **kwargs)
            except Exception as error:
                message = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
                hint = getattr(error, "hint", None)
                reason = f"{message} ({hint})" if hint else message
                self.failures[name] = reason
                _log.warning("metric writer %s is off from here on: %s", name, reason)
                if method != "close":
                    with contextlib.suppress(Exception):  # the failure is reported already
                        writer.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a ``metrics.jsonl`` in order of step; the last line of a step counts.

    Lines that are no JSON object with a step (one cut off by a kill) are passed over.
    """
    rows: dict[int, dict[str, Any]] = {}
    if path.exists():
        for line in path.read_bytes().splitlines():
            row = _row(line)
            if row is not None:
                rows[row["step"]] = row
    return [rows[step] for step in sorted(rows)]


_EVALUATED = ("loss", "bits_per_byte", "perplexity", "accuracy")
_TAIL_BYTES = 1 << 20


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _repair_last_line(path: Path) -> None:
    """Ends the last line, or removes it when a kill cut it off."""
    if not path.exists() or not path.stat().st_size:
        return
    with open(path, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _TAIL_BYTES)
        file.seek(start)
        tail = file.read()
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        if _row(last) is not None:
            file.write(b"\n")
        else:
            file.truncate(size - len(last))


def _json_number(value: Any) -> Any:
    if isinstance(value, str | bool | int):
        return value
    if isinstance(value, tuple):
        return [_json_number(number) for number in value]
    number = float(value)
    return number if math.isfinite(number) else None


def _summary(metrics: Mapping[str, float]) -> str:
    parts: list[str] = []
    if "loss" in metrics:
        parts.append(f"loss {metrics['loss']:.4f}")
    if metrics.get("tokens_per_second"):  # 0 on the first step, which is compiled meanwhile
        parts.append(f"{metrics['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)


def _pairs(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
