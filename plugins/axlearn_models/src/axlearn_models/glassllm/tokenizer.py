"""glassllm's tokenizer: byte-pair encoding of characters, as a ``tokenizer.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from axcore.data import HFTokenizer
from axcore.errors import CheckpointError

__all__ = ["tokenizer_beside"]

# Ids 0 to 3; characters and merges follow.
_SPECIAL = _PAD, _UNKNOWN, _BOS, _EOS = ("<pad>", "<unk>", "<bos>", "<eos>")
_SPACE = "▁"
# No merge crosses these pieces.
_PIECES = rf"\n|{_SPACE}*[^{_SPACE}\n]+|{_SPACE}+"
_MAX_BYTES = 16_000_000


def tokenizer_beside(archive: Path) -> HFTokenizer | None:
    """Returns the tokenizer whose file lies beside a model's: ``en.tokenizer.json`` for ``en.npz``.

    Args:
        archive: The model.

    Returns:
        The tokenizer; None where there is no such file.

    Raises:
        CheckpointError: The file is damaged (AX610).
    """
    path = archive.with_name(f"{archive.stem}.tokenizer.json")
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES:,} bytes")
        data = json.loads(path.read_text("utf-8"))
        made = _tokenizer_json(data["alphabet"], data["merges"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"is no tokenizer of glassllm: {error!r}",
            code="AX610",
            where=str(path),
            hint="copy the file again, or name another tokenizer with --tokenizer",
        ) from error
    config = {"bos_token": _BOS, "eos_token": _EOS, "pad_token": _PAD, "add_bos_token": False}
    return HFTokenizer.from_content(json.dumps(made), {"tokenizer_config.json": json.dumps(config)})


def _tokenizer_json(alphabet: list[str], merges: list[list[str]]) -> dict[str, Any]:
    pairs = [[str(a), str(b)] for a, b in merges]
    names = [*_SPECIAL, *map(str, alphabet), *(a + b for a, b in pairs)]
    added = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)

    def replaced(old: str, new: str) -> dict[str, Any]:
        return {"type": "Replace", "pattern": {"String": old}, "content": new}

    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **added} for i, name in enumerate(_SPECIAL)],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "NFC"}, replaced(" ", _SPACE)],
        },
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": _PIECES},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [replaced(_SPACE, " "), {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": _UNKNOWN,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            # Of a name that two merges make, the last id counts.
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": pairs,
        },
    }
