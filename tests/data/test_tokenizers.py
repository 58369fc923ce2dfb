"""Tokenizers: round trips, special ids, saving and loading."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axcore.data import ByteTokenizer, load_tokenizer
from axcore.errors import DataError


def _tokenizer(**fields) -> ByteTokenizer:
    return ByteTokenizer.Config(**fields).instantiate()


@given(st.text())
def test_any_text_survives_a_round_trip(text):
    assert _tokenizer().decode(_tokenizer().encode(text)) == text


def test_bytes_of_a_command_line_that_are_not_utf8_stay_those_bytes():
    given_by_python = b"a\xff".decode("utf-8", errors="surrogateescape")
    assert _tokenizer().encode(given_by_python).tolist() == [ord("a"), 0xFF]


def test_half_a_surrogate_pair_is_an_error():
    with pytest.raises(DataError, match="AX532"):
        _tokenizer().encode("a\ud800")


def test_ids_are_utf8_bytes_in_int32():
    ids = _tokenizer().encode("aé😀")
    assert ids.dtype == np.int32
    assert bytes(ids.tolist()) == "aé😀".encode()


def test_special_ids_are_no_text():
    tokenizer = _tokenizer()
    assert tokenizer.decode([256, 104, 105, 257, 258, 263]) == "hi"
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (256, 257, 258)


def test_a_cut_off_character_is_marked():
    assert _tokenizer().decode("é".encode()[:1]) == "\ufffd"


@pytest.mark.parametrize(("multiple_of", "size"), [(1, 259), (8, 264), (128, 384)])
def test_vocabulary_is_rounded_up(multiple_of, size):
    assert _tokenizer(multiple_of=multiple_of).vocab_size == size


def test_a_saved_tokenizer_loads_as_an_equal_one(tmp_path: Path):
    saved = _tokenizer(multiple_of=128)
    saved.save(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert isinstance(loaded, ByteTokenizer)
    assert loaded.vocab_size == 384
    record = json.loads((tmp_path / "tokenizer" / "axcore_tokenizer.json").read_text())
    assert record["eos_id"] == 257


def test_loading_from_an_empty_directory_says_what_is_missing(tmp_path: Path):
    with pytest.raises(DataError, match="no tokenizer here") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.hint


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_damaged_tokenizer_file_is_named(tmp_path: Path, content):
    (tmp_path / "axcore_tokenizer.json").write_text(content)
    with pytest.raises(DataError, match="damaged"):
        load_tokenizer(tmp_path)
