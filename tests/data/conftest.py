"""Small corpora and helpers for the data tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axcore.data import JsonLines, TextInput


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """Returns a function that writes texts to a JSON lines file and gives its path."""

    def write(texts: Sequence[str], name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def make_input(write_jsonl: Callable[..., str]) -> Callable[..., TextInput]:
    """Returns a function that makes a TextInput of texts; prefetching is off unless asked for."""

    def make(texts: Sequence[str], **fields: Any) -> TextInput:
        source = JsonLines.Config(paths=(write_jsonl(texts),))
        settings = dict(source=source, batch_size=4, seq_len=16, seed=0, prefetch=0) | fields
        return TextInput.Config(**settings).instantiate()

    return make


@pytest.fixture
def corpus() -> list[str]:
    """40 documents of 1 to 120 bytes, all different."""
    rng = np.random.default_rng(0)
    return [f"{i}:" + "x" * int(rng.integers(0, 115)) for i in range(40)]
