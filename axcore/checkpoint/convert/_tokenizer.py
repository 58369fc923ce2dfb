"""The tokenizer that comes with a foreign model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from axcore.checkpoint.convert._huggingface import contained
from axcore.checkpoint.convert._source import TensorSource

if TYPE_CHECKING:
    from axcore.data import BaseTokenizer

__all__ = ["default_tokenizer"]


def default_tokenizer(source: TensorSource) -> BaseTokenizer | None:
    """Returns the tokenizer of a source, or None when its format carries none.

    Hugging Face directories have a ``tokenizer.json`` or a SentencePiece ``tokenizer.model``, GGUF
    files their metadata.
    """
    from axcore.data import GGUFTokenizer, HFTokenizer, SentencePieceTokenizer

    if source.format == "hf":
        directory = source.path if source.path.is_dir() else source.path.parent
        for kind in (HFTokenizer, SentencePieceTokenizer):
            for name in kind.main_files:
                if (directory / name).is_file():
                    _check_links(directory, (name, *kind.beside_files))
                    return kind.Config(path=str(directory / name)).instantiate()
    if source.format == "gguf" and "tokenizer.ggml.model" in source.metadata:
        return GGUFTokenizer.from_metadata(source.metadata)
    return None


def _check_links(directory: Path, names: tuple[str, ...]) -> None:
    """The files are copied into the model directory: none may come from elsewhere."""
    for name in names:
        if (directory / name).exists():
            contained(directory, name)
