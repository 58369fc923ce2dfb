"""Tokenizers of the ``tokenizers`` library: ``tokenizer.json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from axcore.data._tokenizer_files import (
    Backend,
    Conventions,
    FileTokenizer,
    conventions_beside,
    require,
)

__all__ = ["HFTokenizer", "TokenizersBackend"]


class TokenizersBackend:
    """A ``tokenizers.Tokenizer``, without its padding and truncation.

    Args:
        content: The ``tokenizer.json``.
    """

    def __init__(self, content: str):
        make = require("tokenizers", "this tokenizer").Tokenizer.from_str
        # Two objects, because whether special tokens are looked for is a switch of the object.
        self._text, self._markup = make(content), make(content)
        for tokenizer in (self._text, self._markup):
            tokenizer.no_padding()
            tokenizer.no_truncation()
        self._text.encode_special_tokens = True
        added = self._text.get_added_tokens_decoder()
        self.special: Mapping[str, int] = {
            token.content: i for i, token in sorted(added.items()) if token.special
        }
        self.vocab_size = max(self._text.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        if self.vocab_size > 2**31:
            raise ValueError(f"it has the id {self.vocab_size - 1:,}, more than int32 holds")

    def encode(self, text: str) -> list[int]:
        """See :class:`Backend`."""
        return self._text.encode(text, add_special_tokens=False).ids

    def encode_markup(self, text: str) -> list[int]:
        """See :class:`Backend`."""
        return self._markup.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """See :class:`Backend`."""
        return self._text.decode(ids, skip_special_tokens=True)

    def id_of(self, token: str) -> int | None:
        """See :class:`Backend`."""
        return self._text.token_to_id(token)

    def name_of(self, token_id: int) -> str:
        """See :class:`Backend`."""
        return self._text.id_to_token(token_id) or ""

    def opening(self) -> int | None:
        """The id that the post-processor puts before a text, or None."""
        ids = self._markup.encode("", add_special_tokens=True).ids
        return ids[0] if ids else None


class HFTokenizer(FileTokenizer):
    """A ``tokenizer.json`` as Hugging Face models carry it.

    Its post-processor (bos, separators), padding and truncation take no part: ``encode`` gives the
    text's ids and nothing else. Added tokens that are not special are found in any text, as their
    model expects; special ones only by ``encode_markup`` and ``encode_chat``.
    """

    main_files = ("tokenizer.json",)

    @classmethod
    def from_content(cls, content: str, beside: Mapping[str, str] | None = None) -> HFTokenizer:
        """Returns the tokenizer of a ``tokenizer.json`` that is not on disk.

        Args:
            content: The file's text.
            beside: Texts of the files that would lie beside it, by name.

        Raises:
            DataError: It cannot be read (AX534).
        """
        made = cls(cls.Config())
        files = {cls.main_files[0]: content, **(beside or {})}
        made._given = {name: text.encode() for name, text in files.items()}
        _ = made._conventions  # what is wrong with it is said now
        return made

    def _make_backend(self, files: Mapping[str, bytes]) -> Backend:
        return TokenizersBackend(files["tokenizer.json"].decode("utf-8"))

    def _conventions_of(self, files: Mapping[str, bytes], backend: Any) -> Conventions:
        said = conventions_beside(files, backend)
        return dataclasses.replace(said, opening=backend.opening())
