"""The tokenizer inside a GGUF file's metadata.

``tokenizer.ggml.model`` says which kind: ``gpt2`` is byte-level BPE with merges, its pre-tokenizer
named by ``tokenizer.ggml.pre``; ``llama`` is SentencePiece's BPE, given as pieces with scores. Both
are handed to the library that made them (``tokenizers``, ``sentencepiece``).

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from axcore.data._hf_tokenizer import TokenizersBackend
from axcore.data._sentencepiece import SentencePieceBackend
from axcore.data._split_patterns import SEQUENCES
from axcore.data._tokenizer_files import Backend, Conventions, FileTokenizer, parse_json, require
from axcore.errors import DataError, did_you_mean

__all__ = ["GGUFTokenizer"]

_FILE = "gguf_tokenizer.json"
_PREFIX = "tokenizer."

# Kinds of tokens; SentencePiece numbers them alike.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

# Whole words of the vocabulary are taken before merging.
_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "tekken")


class GGUFTokenizer(FileTokenizer):
    """A tokenizer made of GGUF metadata.

    ``path`` names a ``.gguf`` file (read with the ``gguf`` package) or a directory where one of
    these tokenizers was saved; ``from_metadata`` takes the metadata itself.
    """

    main_files = (_FILE,)
    beside_files = ()

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> GGUFTokenizer:
        """Returns the tokenizer that a GGUF file's metadata describe.

        Args:
            metadata: Keys such as ``tokenizer.ggml.tokens``; values as Python or numpy values.

        Raises:
            DataError: There is no tokenizer, or it is of an unknown kind.
        """
        made = cls.Config().instantiate()
        assert isinstance(made, cls)
        made._given = {_FILE: _pack(metadata, "GGUF metadata")}
        _ = made._conventions  # what is wrong with it is said now
        return made

    def foreign_files(self) -> Mapping[str, bytes]:
        """Returns a ``tokenizer.json`` or a ``tokenizer.model``, and the settings beside it."""
        said, backend = self._conventions, self._backend
        data = parse_json(self._files[_FILE], self._where)
        ids = {"bos": said.bos_id, "eos": said.eos_id, "pad": said.pad_id}
        names = {k: backend.name_of(i) for k, i in ids.items() if i is not None}
        settings: dict[str, Any] = {f"{name}_token": token for name, token in names.items()}
        settings["add_bos_token"] = said.add_bos
        if said.chat_template is not None:
            settings["chat_template"] = said.chat_template
        if data["tokenizer.ggml.model"] == "gpt2":
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            opening = (names["bos"], said.bos_id) if said.add_bos and "bos" in names else None
            name, main = "tokenizer.json", self._byte_level_bpe(data, opening).encode()
        else:
            settings["tokenizer_class"] = "LlamaTokenizer"
            name, main = "tokenizer.model", self._sentencepiece(data)
        beside = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
        return {name: main, "tokenizer_config.json": beside.encode()}

    @property
    def _where(self) -> str:
        return str(self._loaded_from or self.cfg.path or "GGUF metadata")

    def _read_main(self, path: Path) -> bytes:
        if path.suffix != ".gguf":
            return super()._read_main(path)
        gguf = require("gguf", "reading a .gguf file")
        try:
            fields = gguf.GGUFReader(path).fields
            metadata = {k: f.contents() for k, f in fields.items() if k.startswith(_PREFIX)}
        except Exception as e:
            raise DataError(f"cannot be read as GGUF: {e}", code="AX534", where=str(path)) from e
        return _pack(metadata, str(path))

    def _make_backend(self, files: Mapping[str, bytes]) -> Backend:
        data = parse_json(files[_FILE], self._where)
        kind = data.get("tokenizer.ggml.model")
        if kind == "gpt2":
            return TokenizersBackend(self._byte_level_bpe(data))
        if kind == "llama":
            return SentencePieceBackend(self._sentencepiece(data))
        raise DataError(
            f"the tokenizer is of kind {kind!r}, expected 'gpt2' or 'llama'",
            code="AX537",
            where=self._where,
            hint="take the tokenizer of the original model (tokenizer.json or tokenizer.model)",
        )

    def _conventions_of(self, files: Mapping[str, bytes], backend: Backend) -> Conventions:
        data = parse_json(files[_FILE], self._where)

        def token(name: str) -> int | None:
            value = data.get(f"tokenizer.ggml.{name}_token_id")
            return value if isinstance(value, int) and 0 <= value < backend.vocab_size else None

        stops = (token("eot"), token("eom"))
        add_bos = data.get("tokenizer.ggml.add_bos_token")
        if add_bos is None:  # the kinds' own habit
            add_bos = data.get("tokenizer.ggml.model") == "llama"
        template = data.get("tokenizer.chat_template")
        return Conventions(
            bos_id=token("bos"),
            eos_id=token("eos"),
            pad_id=token("padding"),
            stop_ids=tuple(i for i in stops if i is not None),
            add_bos=add_bos is True,
            chat_template=template if isinstance(template, str) else None,
        )

    # -- gpt2 --------------------------------------------------------------------------------

    def _byte_level_bpe(
        self, data: Mapping[str, Any], opening: tuple[str, int | None] | None = None
    ) -> str:
        """Returns the ``tokenizer.json`` of byte-level BPE; ``opening`` starts every text."""
        tokens, types = self._tokens(data)
        merges = self._list(data, "tokenizer.ggml.merges", str)
        pre = data.get("tokenizer.ggml.pre", "default")
        if pre not in SEQUENCES:
            raise DataError(
                f"the pre-tokenizer {pre!r} is not known",
                code="AX537",
                where=self._where,
                hint=did_you_mean(str(pre), SEQUENCES) or f"known: {', '.join(sorted(SEQUENCES))}",
            )
        tokenizers = require("tokenizers", "this tokenizer")
        vocab = {token: i for i, token in enumerate(tokens)}
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        unknown = [m for m, p in zip(merges, pairs, strict=True) if len(p) != 2]
        if len(vocab) != len(tokens) or unknown:
            what = f"the merge {unknown[0]!r} is no pair" if unknown else "a token is there twice"
            raise DataError(what, code="AX534", where=self._where)
        made = tokenizers.Tokenizer(
            tokenizers.models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in _IGNORE_MERGES)
        )
        split, level = tokenizers.pre_tokenizers.Split, tokenizers.pre_tokenizers.ByteLevel
        made.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [split(tokenizers.Regex(pattern), "isolated") for pattern in SEQUENCES[pre]]
            + [level(add_prefix_space=False, use_regex=False)]
        )
        made.decoder = tokenizers.decoders.ByteLevel()

        def added(*kinds: int) -> list[Any]:
            special = _CONTROL in kinds
            return [
                tokenizers.AddedToken(token, special=special, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind in kinds and token
            ]

        made.add_tokens(added(_USER_DEFINED))
        made.add_special_tokens(added(_CONTROL, _UNKNOWN))
        if opening is not None:
            made.post_processor = tokenizers.processors.TemplateProcessing(
                single=f"{opening[0]} $A",
                pair=f"{opening[0]} $A {opening[0]} $B",
                special_tokens=[opening],
            )
        return made.to_str()

    # -- llama -------------------------------------------------------------------------------

    def _sentencepiece(self, data: Mapping[str, Any]) -> bytes:
        """Returns the serialized SentencePiece model of pieces with scores."""
        tokens, types = self._tokens(data)
        scores = self._list(data, "tokenizer.ggml.scores", float, len(tokens))
        if _UNKNOWN not in types:
            unknown = data.get("tokenizer.ggml.unknown_token_id", 0)
            types = [_UNKNOWN if i == unknown else kind for i, kind in enumerate(types)]
        prefix = data.get("tokenizer.ggml.add_space_prefix", True) is True
        squeeze = data.get("tokenizer.ggml.remove_extra_whitespaces", False) is True
        # Field numbers of sentencepiece_model.proto.
        pieces = b"".join(
            _message(1, _text(1, token) + _float(2, score) + _int(3, kind))
            for token, score, kind in zip(tokens, scores, types, strict=True)
        )
        byte_fallback = any(kind == 6 for kind in types)
        trainer = _int(3, 2) + _int(4, len(tokens)) + _int(35, int(byte_fallback))
        normalizer = _text(1, "identity") + _int(3, int(prefix)) + _int(4, int(squeeze))
        return pieces + _message(2, trainer) + _message(3, normalizer + _int(5, 1))

    # -- checks ------------------------------------------------------------------------------

    def _tokens(self, data: Mapping[str, Any]) -> tuple[list[str], list[int]]:
        tokens = self._list(data, "tokenizer.ggml.tokens", str)
        types = [_NORMAL] * len(tokens)
        if "tokenizer.ggml.token_type" in data:
            types = self._list(data, "tokenizer.ggml.token_type", int, len(tokens))
        return tokens, types

    def _list(
        self, data: Mapping[str, Any], key: str, kind: type, length: int | None = None
    ) -> list[Any]:
        values = data.get(key)
        if isinstance(values, list) and values and length in (None, len(values)):
            if kind is float:
                values = [float(v) if isinstance(v, int) else v for v in values]
            if all(isinstance(v, kind) for v in values):
                return values
        expected = f"{length} values" if length is not None else "a list"
        raise DataError(
            f"{key} is missing or damaged, expected {expected} of type {kind.__name__}",
            code="AX534",
            where=self._where,
        )


def _pack(metadata: Mapping[str, Any], where: str) -> bytes:
    """Returns the tokenizer's part of the metadata as JSON."""
    kept = {k: _plain(v) for k, v in metadata.items() if str(k).startswith(_PREFIX)}
    if "tokenizer.ggml.model" not in kept:
        raise DataError("the metadata hold no tokenizer", code="AX537", where=where)
    return json.dumps(kept, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


# -- protocol buffers, as much as it takes -----------------------------------------------------


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, value: str) -> bytes:
    return _message(field, value.encode("utf-8"))
