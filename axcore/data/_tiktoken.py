"""Byte-pair ranks as ``tiktoken`` reads them, and tekken files."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axcore.data._sentencepiece import split_special
from axcore.data._split_patterns import PATTERNS
from axcore.data._tokenizer_files import (
    Backend,
    Conventions,
    FileTokenizer,
    conventions_beside,
    parse_json,
    require,
)
from axcore.errors import DataError, did_you_mean

__all__ = ["TiktokenBackend", "TiktokenTokenizer"]

_RANKS, _TEKKEN = "ranks.tiktoken", "tekken.json"
# The special tokens of tekken files that do not list their own, in order.
_TEKKEN_SPECIAL = (
    "<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
    "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]"
).split()


class TiktokenBackend:
    """A ``tiktoken.Encoding`` whose ids start at ``offset``.

    Args:
        ranks: Bytes of each token and its rank.
        pattern: Cuts the text into words.
        special: Names and ids of special tokens.
        offset: Added to a rank to give its id.
    """

    def __init__(
        self, ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], offset: int = 0
    ):
        tiktoken = require("tiktoken", "this tokenizer")
        self._encoding = tiktoken.Encoding(
            "axcore", pat_str=pattern, mergeable_ranks=dict(ranks), special_tokens={}
        )
        self.special: Mapping[str, int] = dict(special)
        self._offset = offset
        self._bytes = {rank + offset: token for token, rank in ranks.items()}
        self._names = {i: name for name, i in special.items()}
        twice = self._bytes.keys() & self._names.keys()
        if twice:
            i = min(twice)
            raise ValueError(f"id {i} is both a rank and the special token {self._names[i]!r}")
        self.vocab_size = max(*self._bytes, *self._names) + 1

    def encode(self, text: str) -> list[int]:
        """See :class:`Backend`."""
        offset = self._offset
        return [rank + offset for rank in self._encoding.encode_ordinary(text)]

    def encode_markup(self, text: str) -> list[int]:
        """See :class:`Backend`."""
        return list(split_special(text, self.special, self.encode))

    def decode(self, ids: list[int]) -> str:
        """See :class:`Backend`."""
        return b"".join(self._bytes.get(i, b"") for i in ids).decode("utf-8", errors="replace")

    def id_of(self, token: str) -> int | None:
        """See :class:`Backend`."""
        if token in self.special:
            return self.special[token]
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None

    def name_of(self, token_id: int) -> str:
        """See :class:`Backend`."""
        if token_id in self._names:
            return self._names[token_id]
        return self._bytes.get(token_id, b"").decode("utf-8", errors="replace")


class TiktokenTokenizer(FileTokenizer):
    """Byte-pair ranks (a token in base64 and its rank on each line), or a ``tekken.json``.

    Rank files say neither how the text is cut nor what their special tokens are: ``pattern`` and
    ``special_tokens`` do. Tekken files say both; their special tokens come first, the ranks after
    them, and prompts open with ``<s>``.
    """

    class Config(FileTokenizer.Config):
        """What a rank file does not say.

        ``pattern`` is a name (gpt2, cl100k, qwen2, o200k, tekken) or a regular expression.
        """

        pattern: str | None = None
        # Names and ids.
        special_tokens: Mapping[str, int] = {}

    main_files = (_RANKS, _TEKKEN)

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self._cfg = cfg

    def _saved_name(self, main: Path) -> str:
        return _TEKKEN if main.suffix == ".json" else _RANKS

    def _make_backend(self, files: Mapping[str, bytes]) -> Backend:
        cfg = self._cfg
        if _TEKKEN in files:
            return _tekken(parse_json(files[_TEKKEN], self._where))
        if cfg.pattern is None:
            raise DataError(
                "a rank file does not say how the text is cut into words",
                code="AX538",
                where="input.tokenizer.pattern",
                hint=f"set it to one of {', '.join(PATTERNS)}, or to a regular expression",
            )
        pattern = PATTERNS.get(cfg.pattern, cfg.pattern)
        if pattern.isidentifier():
            raise DataError(
                f"got {pattern!r}, expected one of {', '.join(PATTERNS)} or a regular expression",
                code="AX538",
                where="input.tokenizer.pattern",
                hint=did_you_mean(pattern, PATTERNS) or None,
            )
        return TiktokenBackend(_read_ranks(files[_RANKS]), pattern, cfg.special_tokens)

    def _conventions_of(self, files: Mapping[str, bytes], backend: Backend) -> Conventions:
        said = conventions_beside(files, backend)
        if _TEKKEN not in files:
            return said
        bos, eos, pad = (backend.special.get(name) for name in ("<s>", "</s>", "<pad>"))
        return dataclasses.replace(
            said,
            bos_id=bos if said.bos_id is None else said.bos_id,
            eos_id=eos if said.eos_id is None else said.eos_id,
            pad_id=pad if said.pad_id is None else said.pad_id,
            add_bos=bos is not None,
        )


def _read_ranks(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as e:
            raise ValueError(f"line {number} is no token in base64 and its rank: {e}") from e
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"byte {missing[0]:#04x} has no rank, so not every text can be encoded")
    return ranks


def _tekken(data: dict[str, Any]) -> TiktokenBackend:
    try:
        config = data["config"]
        size, num_special = config["default_vocab_size"], config["default_num_special_tokens"]
        entries = data["vocab"][: size - num_special]
        ranks = {base64.b64decode(e["token_bytes"]): int(e["rank"]) for e in entries}
        named = data.get("special_tokens")
        if named is None:
            named = [dict(rank=i, token_str=name) for i, name in enumerate(_TEKKEN_SPECIAL)]
        special = {f"<SPECIAL_{i}>": i for i in range(len(named), num_special)}
        special = {str(e["token_str"]): int(e["rank"]) for e in named} | special
        return TiktokenBackend(ranks, str(config["pattern"]), special, offset=num_special)
    except (KeyError, TypeError) as e:
        raise ValueError(f"no tekken file: {e!r}") from e
