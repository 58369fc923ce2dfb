"""JSON lines as a source of documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from axcore.data._file_source import SpanSource
from axcore.data._files import Buffer
from axcore.data._source import Skipped
from axcore.errors import DataError, did_you_mean

__all__ = ["JsonLines"]


class JsonLines(SpanSource):
    """A JSON object per line, plain or gzip; one string field is the document.

    Blank lines are ignored.

    Every line is parsed once before training, so that a broken one is an error then and not hours
    later.

    Example:
        ``JsonLines.Config(paths=("web-*.jsonl.gz",), field="content", on_bad_line="skip")``
    """

    class Config(SpanSource.Config):
        """Which files, which field, and what to do with broken lines."""

        field: str = "text"
        # A line that is not an object with a string in ``field``: an error that names file and
        # line, or left out, counted and reported.
        on_bad_line: Literal["error", "skip"] = "error"

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._field = cfg.field
        self._on_bad_line = cfg.on_bad_line

    def _spans(self, path: Path, data: Buffer) -> np.ndarray:
        nul = data.find(b"\0")
        if nul >= 0:
            raise DataError(
                f"got a binary file (a NUL byte at offset {nul}), expected JSON lines",
                code="AX503",
                where=str(path),
                hint='leave it out of the paths, or set on_bad_file="skip"',
            )
        spans: list[tuple[int, int]] = []
        start = 0
        number = 0
        while start < len(data):
            end = data.find(b"\n", start)
            stop = end if end >= 0 else len(data)
            number += 1
            line = data[start:stop]
            if line.strip():
                try:
                    self._text(line)
                    spans.append((start, stop))
                except ValueError as e:
                    self._bad_line(path, number, e)
            start = stop + 1
        return np.array(spans, dtype=np.int64).reshape(-1, 2)

    def _bad_line(self, path: Path, number: int, error: ValueError) -> None:
        where = f"{path}:{number}"
        if self._on_bad_line == "skip":
            self._skipped.append(Skipped(where, str(error)))
            return
        raise DataError(
            str(error),
            code="AX505",
            where=where,
            hint='fix the line, or leave such lines out with on_bad_line="skip"',
        ) from error

    def _text(self, data: bytes) -> str:
        try:
            value: Any = json.loads(data)
        except UnicodeDecodeError as e:
            raise ValueError(f"the line is not UTF-8 text (byte {e.start + 1})") from e
        except json.JSONDecodeError as e:
            raise ValueError(f"the line is not valid JSON: {e.msg} (column {e.colno})") from e
        except RecursionError as e:
            raise ValueError("the line is not valid JSON: nested too deeply") from e
        if not isinstance(value, dict):
            raise ValueError(f"got {type(value).__name__}, expected a JSON object")
        if self._field not in value:
            names = [str(k) for k in value]
            known = did_you_mean(self._field, names) or f"it has {', '.join(names[:8]) or 'none'}"
            raise ValueError(f"the object has no field {self._field!r}; {known}")
        text = value[self._field]
        if not isinstance(text, str):
            raise ValueError(f"field {self._field!r} is {type(text).__name__}, expected a string")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as e:
            raise ValueError(f"field {self._field!r} holds half a surrogate pair") from e
        return text
