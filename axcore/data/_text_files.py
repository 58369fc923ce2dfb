"""Plain text files as a source of documents."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import Literal

import numpy as np

from axcore.data._file_source import SpanSource
from axcore.data._files import Buffer, check_text
from axcore.errors import DataError

__all__ = ["TextFiles"]

_BLANK_LINE = re.compile(rb"\r?\n(?:[ \t]*\r?\n)+")


class TextFiles(SpanSource):
    """UTF-8 text files, plain or gzip.

    A document is a file, a paragraph (text between blank lines) or the text between two separators.
    Text is kept byte for byte, except for white space around split documents and a byte order mark.

    Example:
        ``TextFiles.Config(paths=("corpus/**/*.txt.gz",), split="paragraph")``
    """

    class Config(SpanSource.Config):
        """Which files, and what in them is a document."""

        split: Literal["file", "paragraph", "separator"] = "file"
        # The text between documents, for split="separator"; for example "<|endoftext|>".
        separator: str = ""

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._split = cfg.split
        self._separator = cfg.separator

    def _spans(self, path: Path, data: Buffer) -> np.ndarray:
        check_text(path, data)
        start = len(codecs.BOM_UTF8) if data[:3] == codecs.BOM_UTF8 else 0
        if self._split == "file":
            blank = len(data) < 2**16 and not bytes(data[start:]).strip()
            return np.array([] if blank else [(start, len(data))], dtype=np.int64).reshape(-1, 2)
        cuts = [start]
        for match in re.finditer(self._pattern(), data):
            cuts += match.span()
        cuts.append(len(data))
        spans = np.array(cuts, dtype=np.int64).reshape(-1, 2)
        trimmed = [_trim(data, int(a), int(b)) for a, b in spans]
        return np.array([s for s in trimmed if s[0] < s[1]], dtype=np.int64).reshape(-1, 2)

    def _pattern(self) -> re.Pattern[bytes]:
        if self._split == "paragraph":
            return _BLANK_LINE
        if not self._separator:
            raise DataError(
                'split="separator" needs a separator, got an empty one',
                code="AX506",
                hint='for example separator="<|endoftext|>", or split="paragraph"',
            )
        return re.compile(re.escape(self._separator.encode("utf-8")))

    def _text(self, data: bytes) -> str:
        return data.decode("utf-8")


def _trim(data: Buffer, start: int, stop: int) -> tuple[int, int]:
    """Returns the span without white space at its ends."""
    piece = data[start:stop]
    left = len(piece) - len(piece.lstrip())
    right = len(piece) - len(piece.rstrip())
    return (start, start) if left == len(piece) else (start + left, stop - right)
