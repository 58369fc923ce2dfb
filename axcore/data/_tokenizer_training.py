"""Training a byte-level BPE tokenizer on a corpus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from axcore.data._hf_tokenizer import HFTokenizer
from axcore.data._split_patterns import PATTERNS
from axcore.data._tokenizer_files import require
from axcore.errors import DataError

__all__ = ["train_tokenizer"]

_MAX_VOCAB_SIZE = 2**22  # the trainer allocates for it before it reads a word
# Training takes the square of a word's length: a word of a megabyte would take hours.
_LONG_WORD = re.compile(r"\S{1024}|\s{1024}")

_BOS, _EOS, _PAD = _SPECIAL = ("<|bos|>", "<|eos|>", "<|pad|>")


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, directory: str | Path, *, pattern: str = "qwen2"
) -> HFTokenizer:
    """Trains byte-level BPE (Sennrich et al., arXiv:1508.07909) and saves it.

    Ids 0-2 are ``<|bos|>``, ``<|eos|>`` and ``<|pad|>``, the next 256 the bytes, so every text
    survives a round trip; merges follow, the most frequent pair first. The same texts give the same
    tokenizer.

    Args:
        texts: The corpus. Words longer than 1,024 characters are cut for the training.
        vocab_size: Number of ids, 259 to 4,194,304. A small corpus may have no more pairs to merge
            and then gives fewer.
        directory: Where to write it; ``HFTokenizer.Config(path=directory)`` reads it.
        pattern: What cuts the text into words: gpt2, cl100k (up to three digits together), qwen2
            (each digit alone), o200k or tekken.

    Raises:
        DataError: The size is too small or too large, the pattern unknown, there is no text, the
            directory has a tokenizer already, or it cannot be made.
    """
    least = 256 + len(_SPECIAL)
    if vocab_size < least:
        raise DataError(
            f"got a vocabulary of {vocab_size}, expected at least {least}",
            code="AX539",
            hint="256 bytes and three special tokens come before the first merge",
        )
    if vocab_size > _MAX_VOCAB_SIZE:
        raise DataError(
            f"got a vocabulary of {vocab_size:,}, expected at most {_MAX_VOCAB_SIZE:,}",
            code="AX539",
        )
    if pattern not in PATTERNS:
        raise DataError(
            f"got the pattern {pattern!r}, expected one of {', '.join(PATTERNS)}", code="AX539"
        )
    path = Path(directory)
    if (path / "tokenizer.json").exists():
        raise DataError(
            "there is a tokenizer already; nothing was written",
            code="AX543",
            where=str(path),
            hint="choose another directory, or move it away",
        )
    tokenizers = require("tokenizers", "training a tokenizer")
    pre = tokenizers.pre_tokenizers
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = pre.Sequence(
        [
            pre.Split(tokenizers.Regex(PATTERNS[pattern]), "isolated"),
            pre.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre.ByteLevel.alphabet()),
        show_progress=False,
    )
    num_texts = 0

    def counted() -> Iterable[str]:
        nonlocal num_texts
        for text in texts:
            num_texts += 1
            start = 0
            for word in _LONG_WORD.finditer(text):
                yield text[start : word.end()]
                start = word.end()
            yield text[start:]

    made.train_from_iterator(counted(), trainer=trainer)
    if num_texts == 0:
        raise DataError("there is no text to train on", code="AX502")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise DataError(
            f"the directory cannot be made: {e.strerror}", code="AX543", where=str(path)
        ) from e
    config = {"bos_token": _BOS, "eos_token": _EOS, "pad_token": _PAD, "add_bos_token": False}
    (path / "tokenizer.json").write_text(made.to_str(pretty=True), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer = HFTokenizer(HFTokenizer.Config(path=str(path)))
    tokenizer.save(path)
    return tokenizer
