"""Packing: every pair of every document once, in order, never across documents."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from axcore.data import ByteTokenizer
from axcore.data._packing import RowStream, document_sequence, empty_batch


class _NoSpecials(ByteTokenizer):
    bos_id = None  # pyright: ignore
    eos_id = None  # pyright: ignore


class _EosOnly(ByteTokenizer):
    bos_id = None  # pyright: ignore


def _tokenizer() -> ByteTokenizer:
    return ByteTokenizer.Config().instantiate()


def _rows(texts: list[str], seq_len: int) -> list[dict[str, np.ndarray]]:
    """All rows of one stream over ``texts``, the last one padded."""
    tokenizer = _tokenizer()

    def fetch(i: int) -> np.ndarray | None:
        return document_sequence(tokenizer, texts[i]) if i < len(texts) else None

    stream = RowStream(fetch)
    rows = []
    while True:
        batch = empty_batch(1, seq_len, tokenizer.pad_id)
        if stream.fill(batch, 0) == 0:
            return rows
        rows.append({name: array[0] for name, array in batch.items()})


_texts = st.lists(st.text(max_size=40), max_size=12)


@settings(max_examples=60, deadline=None)
@given(texts=_texts, seq_len=st.integers(1, 24))
def test_every_token_is_a_target_exactly_once_and_in_order(texts, seq_len):
    rows = _rows(texts, seq_len)
    targets = [int(t) for row in rows for t in row["target_ids"][row["target_mask"]]]
    expected = [b for text in texts if text for b in [*text.encode("utf-8"), 257]]
    assert targets == expected


@settings(max_examples=60, deadline=None)
@given(texts=_texts, seq_len=st.integers(1, 24))
def test_every_token_is_an_input_exactly_once_and_in_order(texts, seq_len):
    rows = _rows(texts, seq_len)
    inputs = [int(t) for row in rows for t in row["input_ids"][row["segment_ids"] > 0]]
    expected = [b for text in texts if text for b in [256, *text.encode("utf-8")]]
    assert inputs == expected


@settings(max_examples=60, deadline=None)
@given(texts=_texts, seq_len=st.integers(1, 24))
def test_positions_restart_with_each_segment_and_stay_below_seq_len(texts, seq_len):
    for row in _rows(texts, seq_len):
        for segment in range(1, row["segment_ids"].max() + 1):
            inside = row["positions"][row["segment_ids"] == segment]
            assert inside.tolist() == list(range(len(inside)))
        starts = np.flatnonzero(np.diff(row["segment_ids"]) > 0) + 1
        assert (row["input_ids"][starts] == 256).all()


def test_only_the_last_row_is_padded():
    rows = _rows(["abcdefg", "hi", "j"], 4)
    assert [row["target_mask"].sum() for row in rows] == [4, 4, 4, 1]
    assert rows[-1]["segment_ids"].tolist() == [1, 0, 0, 0]
    assert rows[-1]["input_ids"].tolist() == [ord("j"), 258, 258, 258]


def test_a_document_longer_than_the_sequence_is_split_not_dropped():
    text = "".join(chr(97 + i % 26) for i in range(1000))
    rows = _rows([text], 16)
    assert len(rows) == -(-1001 // 16)
    joined = np.concatenate([row["target_ids"][row["target_mask"]] for row in rows])
    assert bytes(joined[:-1].astype(np.uint8)).decode() == text


def test_eos_opens_documents_of_a_tokenizer_without_bos():
    sequence = document_sequence(_EosOnly(ByteTokenizer.Config()), "a")
    assert sequence.tolist() == [257, 97, 257]


def test_without_specials_the_first_token_has_no_target():
    sequence = document_sequence(_NoSpecials(ByteTokenizer.Config()), "ab")
    assert sequence.tolist() == [97, 98]


def test_dtypes_are_int32_and_bool():
    dtypes = {name: str(array.dtype) for name, array in empty_batch(2, 3).items()}
    assert dtypes.pop("target_mask") == "bool"
    assert set(dtypes.values()) == {"int32"}
