"""The tokenizer that comes with a foreign model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from axcore.checkpoint.convert._source import TensorSource

if TYPE_CHECKING:
    from axcore.data import BaseTokenizer

__all__ = ["default_tokenizer"]


def default_tokenizer(source: TensorSource) -> BaseTokenizer | None:
    """Returns the tokenizer of a source, or None when its format carries none."""
    import axcore.data as data

    if source.format == "hf":
        directory = source.path if source.path.is_dir() else source.path.parent
        if (directory / "tokenizer.json").is_file():
            made: Any = data.HFTokenizer.from_directory(directory)  # pyright: ignore
            return made
    if source.format == "gguf" and "tokenizer.ggml.model" in source.metadata:
        made = data.GGUFTokenizer.from_metadata(source.metadata)  # pyright: ignore
        return made
    return None
