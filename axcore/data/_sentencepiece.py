"""SentencePiece models: ``tokenizer.model``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from axcore.data._tokenizer_files import (
    Backend,
    Conventions,
    FileTokenizer,
    conventions_beside,
    parse_json,
    require,
)

__all__ = ["SentencePieceBackend", "SentencePieceTokenizer", "split_special"]


class SentencePieceBackend:
    """A ``SentencePieceProcessor``.

    Args:
        model: The serialized model.
    """

    def __init__(self, model: bytes):
        sentencepiece = require("sentencepiece", "this tokenizer")
        self.processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size: int = self.processor.vocab_size() if model else 0
        if not self.vocab_size:
            raise ValueError("the model has no pieces")
        ids = range(self.vocab_size)
        self.special: Mapping[str, int] = {
            self.processor.id_to_piece(i): i for i in ids if self.processor.is_control(i)
        }
        self._hidden = frozenset(self.special.values())

    def encode(self, text: str) -> list[int]:
        """See :class:`Backend`."""
        return self.processor.encode(text) if text else []

    def encode_markup(self, text: str) -> list[int]:
        """See :class:`Backend`; the text between two special tokens is encoded on its own."""
        return list(split_special(text, self.special, self.encode))

    def decode(self, ids: list[int]) -> str:
        """See :class:`Backend`."""
        return self.processor.decode([i for i in ids if i not in self._hidden])

    def id_of(self, token: str) -> int | None:
        """See :class:`Backend`."""
        found = self.processor.piece_to_id(token)
        return found if self.processor.id_to_piece(found) == token else None

    def name_of(self, token_id: int) -> str:
        """See :class:`Backend`."""
        return self.processor.id_to_piece(token_id)


class SentencePieceTokenizer(FileTokenizer):
    """A SentencePiece model (unigram or BPE).

    Its normalizer is the model's own: where that folds characters or spaces, so does a round trip.
    Prompts open with bos where the model has one, unless ``add_bos`` or ``tokenizer_config.json``
    says otherwise.
    """

    main_files = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")

    def _make_backend(self, files: Mapping[str, bytes]) -> Backend:
        main = next(name for name in self.main_files if name in files)
        return SentencePieceBackend(files[main])

    def _conventions_of(self, files: Mapping[str, bytes], backend: Any) -> Conventions:
        said = conventions_beside(files, backend)
        processor = backend.processor

        def own(name: str, beside: int | None) -> int | None:
            found = getattr(processor, f"{name}_id")()
            return beside if beside is not None or found < 0 else found

        bos = own("bos", said.bos_id)
        config = parse_json(files.get("tokenizer_config.json", b"{}"), "tokenizer_config.json")
        add_bos = config.get("add_bos_token", bos is not None) is True
        return dataclasses.replace(
            said,
            bos_id=bos,
            eos_id=own("eos", said.eos_id),
            pad_id=own("pad", said.pad_id),
            add_bos=add_bos,
        )


def split_special(
    text: str, special: Mapping[str, int], encode: Callable[[str], list[int]]
) -> Iterator[int]:
    """Yields the ids of a text in which names of special tokens stand for them."""
    names = sorted((name for name in special if name), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
    for i, piece in enumerate(pieces):
        if i % 2:
            yield special[piece]
        elif piece:
            yield from encode(piece)
