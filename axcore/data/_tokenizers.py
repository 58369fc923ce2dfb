"""The role every tokenizer plays, and the byte tokenizer."""

from __future__ import annotations

import abc
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from axcore.config import Config as AnyConfig
from axcore.config import Configurable
from axcore.data._source import digest_of
from axcore.errors import DataError

__all__ = ["BaseTokenizer", "ByteTokenizer", "load_tokenizer"]

_FILE_NAME = "axcore_tokenizer.json"


class BaseTokenizer(Configurable, abc.ABC):
    """Text to token ids and back."""

    class Config(Configurable.Config):
        """Fields that every tokenizer has: none."""

        if TYPE_CHECKING:

            def instantiate(self, **kwargs: object) -> BaseTokenizer: ...

    def __init__(self, cfg: Config):
        self.cfg = cfg

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Number of ids; the model's embedding has this many rows or more."""

    @property
    @abc.abstractmethod
    def bos_id(self) -> int | None:
        """Id that opens a document, or None."""

    @property
    @abc.abstractmethod
    def eos_id(self) -> int | None:
        """Id that closes a document, or None."""

    @property
    @abc.abstractmethod
    def pad_id(self) -> int:
        """Id that fills unused places; never a target."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a generated text: eos, and what else ends a turn of a chat."""
        return () if self.eos_id is None else (self.eos_id,)

    @property
    def chat_template(self) -> str | None:
        """The jinja template that turns messages into a prompt, or None."""
        return None

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of ``text`` without bos and eos, shape (tokens,), int32.

        The text is the user's: the name of a special token in it is text like any other.
        """

    def encode_markup(self, text: str) -> np.ndarray:
        """Like ``encode``, but the names of special tokens become their ids: for trusted text."""
        return self.encode(text)

    def encode_prompt(self, text: str) -> np.ndarray:
        """Like ``encode``, for a text to go on with: after bos, where prompts of this kind do."""
        return self.encode(text)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> np.ndarray:
        """Returns the ids of a conversation up to where the answer starts, (tokens,) int32.

        Args:
            messages: ``{"role": "user", "content": ...}`` and the like, in order.
            add_generation_prompt: Whether the answer's opening follows the messages.
            **variables: What else the template reads, such as ``tools``.

        Raises:
            DataError: There is no chat template, or it fails on these messages.
        """
        del messages, add_generation_prompt, variables
        raise DataError(
            f"the tokenizer ({type(self).__name__}) has no chat template",
            code="AX540",
            hint="this model continues text: give it a prompt",
        )

    def fingerprint(self) -> str:
        """Returns what changes when the same text may give other ids: a part of data positions."""
        return digest_of(self.cfg.to_text())

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; bos, eos, padding and unused ids are left out."""

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer to a directory, made when missing, for ``load_tokenizer``.

        A subclass whose tokenizer is more than its configuration writes its own files as well.
        """
        path = Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        record = {
            "config": self._saved_config().to_text(),
            "vocab_size": self.vocab_size,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
        }
        text = json.dumps(record, indent=2) + "\n"
        (path / _FILE_NAME).write_text(text, encoding="utf-8")

    def foreign_files(self) -> Mapping[str, bytes]:
        """Returns the files in which other libraries keep this tokenizer, by name; an export writes
        them. None by default.
        """
        return {}

    def _saved_config(self) -> Config:
        """The configuration that finds its files beside itself."""
        return self.cfg

    def load(self, directory: Path) -> None:
        """Reads the files that a subclass wrote in ``save``; called once, by ``load_tokenizer``."""


def load_tokenizer(directory: str | Path, trusted: tuple[str, ...] = ()) -> BaseTokenizer:
    """Returns the tokenizer that ``save`` wrote to a directory.

    Args:
        directory: For example ``OUT/tokenizer``.
        trusted: Packages whose classes may be named besides core's and the active plugins'.

    Raises:
        DataError: There is none, or its file is damaged.
    """
    path = Path(directory) / _FILE_NAME
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        text = record["config"]
    except FileNotFoundError as e:
        raise DataError(
            "no tokenizer here",
            code="AX530",
            where=str(path),
            hint="name a model directory that has a tokenizer/; where foreign weights came without "
            "one, give `axcore convert` a --tokenizer",
        ) from e
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise DataError(
            f"the tokenizer's file is damaged: {e}",
            code="AX530",
            where=str(path),
            hint="copy it again from the run that wrote it",
        ) from e
    tokenizer: Any = AnyConfig.from_text(text, trusted=trusted).instantiate()
    if not isinstance(tokenizer, BaseTokenizer):
        raise DataError(
            f"got a {type(tokenizer).__name__}, expected a tokenizer", code="AX530", where=str(path)
        )
    tokenizer.load(path.parent)
    return tokenizer


class ByteTokenizer(BaseTokenizer):
    """UTF-8 bytes as tokens: ids 0-255 are bytes, 256 opens a document, 257 closes it, 258 pads.

    Nothing to train, nothing to download, every text survives a round trip. The vocabulary is 264:
    259 rounded up to a multiple of 8, so that the embedding's rows can be divided among devices and
    vector lanes; the five ids left over are never produced.
    """

    class Config(BaseTokenizer.Config):
        """The size of the vocabulary."""

        # The vocabulary size is rounded up to a multiple of this.
        multiple_of: int = 8

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        if cfg.multiple_of < 1:
            raise DataError(
                f"got multiple_of={cfg.multiple_of}, expected 1 or more",
                code="AX531",
                hint="1 gives the smallest vocabulary, 259",
            )
        self._vocab_size = -(-259 // cfg.multiple_of) * cfg.multiple_of

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return self._vocab_size

    @property
    def bos_id(self) -> int:
        """256."""
        return 256

    @property
    def eos_id(self) -> int:
        """257."""
        return 257

    @property
    def pad_id(self) -> int:
        """258."""
        return 258

    def encode(self, text: str) -> np.ndarray:
        """Returns the bytes of ``text``, shape (bytes,), int32.

        Bytes that are not UTF-8, as Python reads them from a command line, are those bytes.

        Raises:
            DataError: The text holds half a surrogate pair.
        """
        try:
            data = text.encode("utf-8", errors="surrogateescape")
        except UnicodeEncodeError as e:
            raise DataError(
                f"character {e.start} is half a surrogate pair, which has no UTF-8 bytes",
                code="AX532",
                where=repr(text[max(0, e.start - 10) : e.end + 10]),
                hint="leave it out, or write the whole character",
            ) from e
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text; bytes that are not UTF-8 (a cut-off character) become U+FFFD."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")
