"""Tasks made of packed rows: masked tokens and span corruption."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from axcore.data import (
    BaseTransform,
    ByteTokenizer,
    MaskedTokens,
    PythonReference,
    SpanCorruption,
    TextInput,
    TransformedTextInput,
    merge_states,
)
from axcore.errors import DataError

MASK = 263
BOS, EOS, PAD = 256, 257, 258


def make_input(transform: BaseTransform.Config, **fields) -> TransformedTextInput:
    settings = dict(batch_size=4, seq_len=128, seed=0, prefetch=0) | fields
    if isinstance(transform, SpanCorruption.Config):
        settings |= dict(tokenizer=ByteTokenizer.Config(multiple_of=32))
    return TransformedTextInput.Config(transform=transform, **settings).instantiate()


def masked(**fields) -> MaskedTokens.Config:
    return MaskedTokens.Config(mask_token=MASK, **fields)


def take(inputs, count: int, rows=None) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(inputs.iterator(rows), count))


TASKS = {"masked": masked(), "spans": SpanCorruption.Config(num_sentinels=29)}


@pytest.fixture(params=TASKS)
def task(request) -> BaseTransform.Config:
    return TASKS[request.param].copy()


def test_a_resumed_run_sees_the_batches_of_an_uninterrupted_one(task):
    inputs = make_input(task, prefetch=2)
    with inputs.iterator() as iterator:
        whole = list(itertools.islice(iterator, 5))
    with inputs.iterator() as iterator:
        list(itertools.islice(iterator, 2))
        saved = iterator.state()
    with make_input(task).iterator() as again:
        again.restore(saved)
        for got, expected in zip(itertools.islice(again, 3), whole[2:], strict=True):
            for name in expected:
                np.testing.assert_array_equal(got[name], expected[name])


def test_rows_are_the_same_on_any_number_of_processes(task):
    inputs = make_input(task)
    whole = take(inputs, 3)
    iterators = [inputs.iterator(rows) for rows in ((2, 0), (1, 3))]
    parts = [list(itertools.islice(it, 3)) for it in iterators]
    for number, batch in enumerate(whole):
        for name, array in batch.items():
            np.testing.assert_array_equal(array[[2, 0]], parts[0][number][name])
            np.testing.assert_array_equal(array[[1, 3]], parts[1][number][name])
    merged = merge_states([it.state() for it in iterators])
    again = inputs.iterator()
    again.restore(merged)
    np.testing.assert_array_equal(next(again)["target_ids"], take(inputs, 4)[3]["target_ids"])


def test_another_seed_and_each_batch_chooses_otherwise(task):
    first, second = take(make_input(task, shuffle=False), 2)
    (other,) = take(make_input(task, shuffle=False, seed=1), 1)
    assert not np.array_equal(first["input_ids"], other["input_ids"])
    assert not np.array_equal(first["input_ids"], second["input_ids"])


def test_a_position_of_another_task_is_refused(task):
    saved = make_input(task).iterator().state()
    changed = task.copy().set(rate=0.3)
    with pytest.raises(DataError, match="transform") as caught:
        make_input(changed).iterator().restore(saved)
    assert caught.value.code == "AX510"


def test_the_heldout_pass_is_always_the_same_and_has_no_bytes_to_count(task):
    inputs = make_input(task)
    heldout = inputs.heldout(max_documents=3)
    assert heldout.num_bytes is None
    passes = [list(heldout), list(inputs.heldout(max_documents=3))]
    assert len(passes[0]) == len(heldout) > 0
    for got, expected in zip(*passes, strict=True):
        np.testing.assert_array_equal(got["input_ids"], expected["input_ids"])
        assert got["target_mask"].any()
    for batch, whole in zip(inputs.heldout([1], max_documents=3), passes[0], strict=True):
        np.testing.assert_array_equal(batch["input_ids"], whole["input_ids"][[1]])


# -- masked tokens ---------------------------------------------------------------------------------


def test_masked_tokens_are_chosen_and_hidden_in_the_published_shares():
    batches = take(make_input(masked(), seq_len=512), 20)
    joined = {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}
    chosen, was, now = joined["target_mask"], joined["target_ids"], joined["input_ids"]
    assert not chosen[np.isin(was, [BOS, EOS, PAD])].any()
    eligible = ~np.isin(was, [BOS, EOS, PAD])
    np.testing.assert_array_equal(chosen.sum(1), np.round(0.15 * eligible.sum(1)))
    np.testing.assert_array_equal(now[~chosen], was[~chosen])
    num = chosen.sum()
    assert num > 6000
    deviation = 4 / np.sqrt(num)  # four standard deviations are at most this
    assert abs((now[chosen] == MASK).mean() - 0.8) < deviation
    kept = (now[chosen] == was[chosen]).mean()
    assert abs(kept - 0.1) < deviation
    changed = now[chosen & (now != MASK) & (now != was)]
    assert len(np.unique(changed)) > 150  # any id, not those of the text alone


def test_masked_rows_are_those_of_the_language_model():
    (plain,) = itertools.islice(
        TextInput.Config(batch_size=4, seq_len=128, seed=0, prefetch=0).instantiate().iterator(), 1
    )
    (batch,) = take(make_input(masked()), 1)
    np.testing.assert_array_equal(batch["target_ids"], plain["input_ids"])
    np.testing.assert_array_equal(batch["segment_ids"], plain["segment_ids"])
    np.testing.assert_array_equal(batch["positions"], plain["positions"])


def test_a_mask_token_that_the_tokenizer_lacks_is_an_error_before_training():
    with pytest.raises(DataError, match=r"\[MASK\]") as caught:
        make_input(MaskedTokens.Config()).prepare()
    assert caught.value.code == "AX551"
    with pytest.raises(DataError, match="264"):
        make_input(MaskedTokens.Config(mask_token=264)).prepare()


@pytest.mark.parametrize("fields", [{"rate": 0.0}, {"mask_share": 0.9, "random_share": 0.2}])
def test_impossible_shares_are_refused(fields):
    with pytest.raises(DataError) as caught:
        masked(**fields).instantiate()
    assert caught.value.code == "AX550"


# -- span corruption -------------------------------------------------------------------------------


def test_lengths_are_those_published_for_t5():
    # 512 tokens of source take 568 of text and give 114 of target: the example in the
    # docstring of random_spans_helper in google-research/text-to-text-transfer-transformer.
    transform = SpanCorruption.Config().instantiate()
    assert (transform.packed_len(512), transform.target_len(512)) == (568, 114)


def test_source_and_target_together_are_the_text():
    cfg = SpanCorruption.Config(num_sentinels=29)
    inputs = make_input(cfg)
    transform = cfg.instantiate()
    length = transform.packed_len(128)
    plain = TextInput.Config(batch_size=4, seq_len=length, seed=0, prefetch=0).instantiate()
    (batch,), (text,) = take(inputs, 1), itertools.islice(plain.iterator(), 1)
    assert batch["source_ids"].shape == (4, 128)
    assert batch["target_ids"].shape == (4, transform.target_len(128))
    for row in range(4):
        source = batch["source_ids"][row].tolist()
        target = batch["target_ids"][row].tolist()
        assert source[-1] == target[-1] == EOS  # both are full
        spans = _split(target[:-1])
        assert list(spans) == list(range(287, 287 - len(spans), -1))
        assert sum(map(len, spans.values())) == round(0.15 * length)
        restored: list[int] = []
        for token in source[:-1]:
            restored += spans[token] if token in spans else [token]
        assert restored == text["target_ids"][row].tolist()
        assert batch["input_ids"][row].tolist() == [PAD, *target[:-1]]


def _split(target: list[int]) -> dict[int, list[int]]:
    spans: dict[int, list[int]] = {}
    for token in target:
        if token > PAD:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    return spans


def test_span_lengths_have_the_mean_that_was_asked_for():
    counts = [
        len(_split(row[row != EOS].tolist()))
        for batch in take(make_input(SpanCorruption.Config(num_sentinels=29)), 3)
        for row in batch["target_ids"]
    ]
    length = SpanCorruption.Config().instantiate().packed_len(128)
    assert set(counts) == {round(round(0.15 * length) / 3)}


def test_a_row_that_is_not_full_is_padded_and_its_padding_no_target():
    (*_, last) = make_input(SpanCorruption.Config(num_sentinels=29)).heldout(max_documents=1)
    row = int(np.flatnonzero(last["target_mask"].any(1) & ~last["target_mask"].all(1))[-1])
    valid = last["target_mask"][row]
    assert last["target_ids"][row][valid][-1] == EOS
    assert (last["target_ids"][row][~valid] == PAD).all()
    np.testing.assert_array_equal(valid, last["segment_ids"][row] == 1)
    source_valid = last["source_segment_ids"][row] == 1
    assert last["source_ids"][row][source_valid][-1] == EOS


def test_too_few_sentinels_are_an_error_before_training():
    with pytest.raises(DataError, match="sentinels") as caught:
        make_input(SpanCorruption.Config(num_sentinels=2)).prepare()
    assert caught.value.code == "AX552"


def test_a_sentinel_that_is_text_is_an_error_before_training():
    with pytest.raises(DataError, match="token of text") as caught:
        make_input(SpanCorruption.Config(first_sentinel_id=ord("z"))).prepare()
    assert caught.value.code == "AX552"
    beyond = SpanCorruption.Config(first_sentinel_id=32_099)
    (batch,) = take(make_input(beyond), 1)
    assert batch["target_ids"].max() == 32_099


@pytest.mark.parametrize("seq_len", [1, 2, 3])
def test_every_length_either_works_or_says_that_it_is_too_short(seq_len):
    transform = SpanCorruption.Config().instantiate()
    try:
        length = transform.packed_len(seq_len)
    except DataError as error:
        assert re.search("too short", str(error))
    else:
        assert length >= 2


def test_a_task_reads_another_source_whole():
    inputs = make_input(masked())
    source = PythonReference.Config().instantiate()
    source.prepare()
    tokenizer = ByteTokenizer.Config().instantiate()
    first = next(iter(inputs.batches_of(source, tokenizer)))
    assert first["target_mask"].any()
    assert (first["input_ids"] == MASK).any()
