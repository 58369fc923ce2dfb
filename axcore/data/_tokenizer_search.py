"""Which tokenizer a path is."""

from __future__ import annotations

from pathlib import Path

from axcore.data._gguf_tokenizer import GGUFTokenizer
from axcore.data._hf_tokenizer import HFTokenizer
from axcore.data._sentencepiece import SentencePieceTokenizer
from axcore.data._tiktoken import TiktokenTokenizer
from axcore.data._tokenizer_files import FileTokenizer
from axcore.data._tokenizers import BaseTokenizer, load_tokenizer
from axcore.errors import DataError

__all__ = ["find_tokenizer"]

_SAVED = "axcore_tokenizer.json"
_CLASSES: tuple[type[FileTokenizer], ...] = (
    HFTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    GGUFTokenizer,
)


def find_tokenizer(path: str | Path, trusted: tuple[str, ...] = ()) -> BaseTokenizer:
    """Returns the tokenizer that a path holds, whatever its kind.

    Args:
        path: A model directory, a saved tokenizer's directory, a directory with one of the known
            files, or such a file: ``tokenizer.json``, ``*.model``, ``tekken.json``, ``*.tiktoken``,
            ``*.gguf``.
        trusted: See ``load_tokenizer``.

    Raises:
        DataError: There is none.
    """
    path = Path(path).expanduser()
    for directory in (path, path / "tokenizer"):
        if (directory / _SAVED).is_file():
            return load_tokenizer(directory, trusted)
    found = _class_of(path) if path.is_file() else None
    if path.is_dir():
        found = next((c for c in _CLASSES if any((path / n).is_file() for n in c.main_files)), None)
    if found is None:
        raise DataError(
            "no tokenizer here" if path.exists() else "no such file or directory",
            code="AX530",
            where=str(path),
            hint="name a model directory, or a tokenizer.json, *.model, tekken.json, *.tiktoken or "
            "*.gguf file",
        )
    made = found.Config(path=str(path)).instantiate()
    assert isinstance(made, BaseTokenizer)
    return made


def _class_of(path: Path) -> type[FileTokenizer] | None:
    """The kind of a file, by its name and its first bytes."""
    with path.open("rb") as file:
        start = file.read(4096)
    if start.startswith(b"GGUF"):
        return GGUFTokenizer
    if path.suffix == ".json":
        is_tekken = b'"num_vocab_tokens"' in start or b'"default_vocab_size"' in start
        return TiktokenTokenizer if is_tekken else HFTokenizer
    if start[:1] == b"\n":  # field 1 of a protocol buffer: the pieces
        return SentencePieceTokenizer
    if path.suffix in (".tiktoken", ".model"):
        return TiktokenTokenizer
    return None
