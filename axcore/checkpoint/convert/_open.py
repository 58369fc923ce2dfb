"""From a path to the source that reads it."""

from __future__ import annotations

from pathlib import Path

from axcore.checkpoint.convert._gguf import GGUFSource
from axcore.checkpoint.convert._huggingface import SafetensorsSource, is_pickle, refused_pickle
from axcore.checkpoint.convert._npz import NpzSource
from axcore.checkpoint.convert._source import TensorSource, bad_source

__all__ = ["FORMATS", "open_source"]

FORMATS: dict[str, type[SafetensorsSource] | type[GGUFSource] | type[NpzSource]] = {
    "hf": SafetensorsSource,
    "gguf": GGUFSource,
    "npz": NpzSource,
}
_SUFFIXES = {".gguf": "gguf", ".npz": "npz", ".safetensors": "hf"}


def open_source(path: str | Path, format: str | None = None) -> TensorSource:
    """Opens a foreign model: reads and checks its headers.

    Args:
        path: A directory of the Hugging Face layout, or a ``.safetensors``, ``.gguf`` or ``.npz``
            file; or a directory that holds one GGUF file and nothing else to convert.
        format: ``hf``, ``gguf`` or ``npz``; None goes by the name.

    Raises:
        CheckpointError: It is none of these, or damaged (AX610-AX612).
    """
    path = Path(path)
    if not path.exists():
        raise bad_source("there is no such file or directory", path, code="AX610")
    if is_pickle(path):
        raise refused_pickle(path)
    if format is None:
        format, path = _guessed(path)
    if format not in FORMATS:
        known = ", ".join(FORMATS)
        raise bad_source(f"the format {format!r} is not known; known: {known}", path, code="AX610")
    return FORMATS[format](path)


def _guessed(path: Path) -> tuple[str, Path]:
    if path.is_file():
        if path.suffix in _SUFFIXES:
            return _SUFFIXES[path.suffix], path
        raise bad_source(
            f"the name does not say what it is; known: {', '.join(_SUFFIXES)}",
            path,
            code="AX610",
            hint="name its format with --format",
        )
    found = sorted(path.glob("*.gguf"))
    if found and not (path / "config.json").exists():
        if len(found) == 1:
            return "gguf", found[0]
        raise bad_source(
            f"there are {len(found)} GGUF files: {', '.join(p.name for p in found)}",
            path,
            code="AX610",
            hint="name one of them",
        )
    return "hf", path
