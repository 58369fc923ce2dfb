"""Overlapping windows: each token counts once and has the context that was promised."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axcore.data import ByteTokenizer, Document, StridedBatches
from axcore.data._packing import document_sequence as sequence_of
from axcore.errors import DataError

TOKENIZER = ByteTokenizer.Config().instantiate()


class Documents(list):
    """Documents by number."""

    def __getitem__(self, i):
        return Document(str(i), super().__getitem__(i))


@given(
    st.lists(st.text("abcé", max_size=25), max_size=6),
    st.integers(1, 8),
    st.integers(1, 3),
    st.data(),
)
def test_every_token_counts_once_and_sees_what_comes_before_it(texts, seq_len, num_rows, data):
    stride = data.draw(st.integers(1, seq_len))
    batches = StridedBatches(
        Documents(texts), TOKENIZER, batch_size=num_rows, seq_len=seq_len, stride=stride
    )
    counted = []
    for batch in batches:
        assert batch["input_ids"].shape == (num_rows, seq_len)
        for row, at in zip(*np.nonzero(batch["target_mask"]), strict=True):
            before = (batch["segment_ids"][row] == batch["segment_ids"][row, at]) & (
                np.arange(seq_len) <= at
            )
            context = batch["input_ids"][row, before].tolist()
            assert batch["positions"][row, before].tolist() == list(range(len(context)))
            counted.append((context, int(batch["target_ids"][row, at])))
    expected = []
    for text in texts:
        ids = sequence_of(TOKENIZER, text).tolist()
        expected += [(ids[:i], ids[i]) for i in range(1, len(ids))]
    assert len(counted) == len(expected) == batches.num_targets
    for (context, target), (all_before, wanted) in zip(counted, expected, strict=True):
        assert target == wanted
        assert all_before[len(all_before) - len(context) :] == context
        assert len(context) >= min(len(all_before), seq_len - stride + 1)
    assert batches.num_bytes == sum(len(text.encode()) for text in texts)


def test_rows_are_chosen_and_strides_checked():
    made = StridedBatches(Documents(["abc"] * 4), TOKENIZER, batch_size=2, seq_len=4, rows=[1])
    assert [batch["input_ids"].shape for batch in made] == [(1, 4), (1, 4)]
    for stride in (0, 5):
        with pytest.raises(DataError, match="AX542"):
            StridedBatches(Documents(), TOKENIZER, batch_size=1, seq_len=4, stride=stride)
