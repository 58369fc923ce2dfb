"""Batches and positions: exact resumption, any process count, reading ahead."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from axcore.data import merge_states
from axcore.errors import DataError

_FIXTURE_OK = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def _take(iterator, count: int) -> list[dict[str, np.ndarray]]:
    return list(itertools.islice(iterator, count))


def _assert_equal(got, expected) -> None:
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@settings(max_examples=20, deadline=None, suppress_health_check=_FIXTURE_OK)
@given(
    n=st.integers(0, 25),
    batch_size=st.integers(1, 50),
    seq_len=st.integers(1, 64),
    prefetch=st.sampled_from([0, 1, 3]),
)
def test_resumes_exactly_at_any_batch(make_input, corpus, n, batch_size, seq_len, prefetch):
    fields = dict(batch_size=batch_size, seq_len=seq_len, prefetch=prefetch)
    with make_input(corpus, **fields).iterator() as it:
        _take(it, n)
        saved = json.dumps(it.state())
        expected = _take(it, 4)
    with make_input(corpus, **fields).iterator() as it:
        it.restore(json.loads(saved))
        assert json.dumps(it.state()) == saved
        _assert_equal(_take(it, 4), expected)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_any_process_count_gives_the_same_batches_and_the_same_position(
    make_input, corpus, processes
):
    whole = make_input(corpus, batch_size=8).iterator()
    expected = _take(whole, 6)
    # Interleaved on purpose: which rows a process owns is the mesh's business.
    rows = [list(range(p, 8, processes)) for p in range(processes)]
    parts = [make_input(corpus, batch_size=8).iterator(r) for r in rows]
    for batch in expected:
        for part, owned in zip(parts, rows, strict=True):
            got = next(part)
            for name, array in got.items():
                np.testing.assert_array_equal(array, batch[name][owned])
    merged = merge_states([part.state() for part in reversed(parts)])
    assert json.dumps(merged) == json.dumps(whole.state())


def test_a_position_restores_on_another_process_count(make_input, corpus):
    make = lambda rows: make_input(corpus, batch_size=8).iterator(rows)  # noqa: E731
    four = [make(range(2 * p, 2 * p + 2)) for p in range(4)]
    for part in four:
        _take(part, 5)
    state = make_input(corpus, batch_size=8).merge_states([p.state() for p in four])
    two = [make(range(4)), make(range(4, 8))]
    for part in two:
        part.restore(state)
    whole = make(None)
    expected = _take(whole, 8)[5:]
    for batch in expected:
        got = [next(part) for part in two]
        for name in batch:
            joined = np.concatenate([g[name] for g in got])
            np.testing.assert_array_equal(joined, batch[name])


def test_one_epoch_of_all_rows_holds_every_token_once(make_input, corpus):
    inputs = make_input(corpus, batch_size=4, seq_len=8, heldout_fraction=0.0)
    it = inputs.iterator()
    seen: list[list[int]] = [[] for _ in range(4)]
    for batch in _take(it, 400):
        for row in range(4):
            seen[row] += batch["input_ids"][row].tolist()
    # 40 documents over 4 rows: the first ten of every row are the first epoch.
    texts = []
    for row in seen:
        parts = bytes(0 if t == 256 else t for t in row).decode().split("\0")[1:]
        texts += parts[:10]
    assert sorted(texts) == sorted(corpus)


def test_epochs_are_shuffled_differently_and_reproducibly(make_input, corpus):
    a, b = (make_input(corpus, seed=5).order() for _ in range(2))
    train = len(list(make_input(corpus).train_documents()))
    first = [a[i] for i in range(train)]
    assert first == [b[i] for i in range(train)]
    assert sorted(first) == sorted(a[train + i] for i in range(train))
    assert first != [a[train + i] for i in range(train)]


def test_rows_beyond_the_number_of_documents_are_fed_from_later_epochs(make_input):
    it = make_input(["one", "two", "three"], batch_size=16, heldout_fraction=0.0).iterator()
    assert next(it)["target_mask"].all()


def test_training_rows_have_no_padding_and_the_agreed_form(make_input, corpus):
    batch = next(make_input(corpus, batch_size=3, seq_len=10).iterator())
    assert {n: (a.shape, str(a.dtype)) for n, a in batch.items()} == {
        "input_ids": ((3, 10), "int32"),
        "target_ids": ((3, 10), "int32"),
        "segment_ids": ((3, 10), "int32"),
        "positions": ((3, 10), "int32"),
        "target_mask": ((3, 10), "bool"),
    }
    assert (batch["segment_ids"] > 0).all()


def test_split_sides_share_no_document(make_input, corpus):
    inputs = make_input(corpus, heldout_fraction=0.3)
    train = {d.text for d in inputs.train_documents()}
    held = {d.text for d in inputs.heldout().documents()}
    assert train and held
    assert not train & held
    assert train | held == set(corpus)


def test_split_heldout_streams_the_held_out_documents(make_input, corpus):
    inputs = make_input(corpus, heldout_fraction=0.3, split="heldout")
    held = {d.text for d in make_input(corpus, heldout_fraction=0.3).heldout().documents()}
    assert {d.text for d in inputs.train_documents()} == held


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (dict(seed=1), "seed"),
        (dict(batch_size=5), "batch_size"),
        (dict(heldout_fraction=0.2), "heldout_fraction"),
        (dict(shuffle=False), "shuffle"),
    ],
)
def test_a_position_of_other_settings_is_refused_by_name(make_input, corpus, fields, named):
    state = make_input(corpus).iterator().state()
    with pytest.raises(DataError, match=named) as caught:
        make_input(corpus, **fields).iterator().restore(state)
    assert caught.value.hint


def test_a_position_of_other_data_is_refused(make_input, corpus):
    state = make_input(corpus).iterator().state()
    with pytest.raises(DataError, match="source"):
        make_input([*corpus, "more"]).iterator().restore(state)


def test_a_position_that_lacks_rows_is_refused(make_input, corpus):
    state = make_input(corpus).iterator([0, 1]).state()
    with pytest.raises(DataError, match=r"lacks rows \[2, 3\]"):
        make_input(corpus).iterator().restore(state)


def test_positions_of_different_batches_do_not_merge(make_input, corpus):
    a, b = (make_input(corpus).iterator([row]) for row in (0, 1))
    next(a)
    with pytest.raises(DataError, match="different batches"):
        merge_states([a.state(), b.state()])


@pytest.mark.parametrize("rows", [[4], [-1], [0, 0]])
def test_rows_outside_the_global_batch_are_refused(make_input, corpus, rows):
    with pytest.raises(DataError, match="got rows"):
        make_input(corpus).iterator(rows)


def test_a_position_is_of_batches_handed_out_not_of_those_read_ahead(make_input, corpus):
    plain = make_input(corpus).iterator()
    with make_input(corpus, prefetch=4).iterator() as ahead:
        for _ in range(5):
            next(plain)
            next(ahead)
            assert ahead.state() == plain.state()


def test_restoring_discards_what_was_read_ahead(make_input, corpus):
    with make_input(corpus, prefetch=3).iterator() as it:
        start = it.state()
        expected = _take(it, 3)
        it.restore(start)
        _assert_equal(_take(it, 3), expected)


def _failing(make_input, corpus, prefetch, error, after=6):
    """An input whose source fails at its ``after``-th document."""
    inputs = make_input(corpus, prefetch=prefetch, batch_size=1, heldout_fraction=0.0)
    inputs.prepare()
    source = inputs.source
    read = type(source).__getitem__
    reads = itertools.count()

    class Failing(type(source)):
        def __getitem__(self, index):
            if next(reads) >= after:
                raise error
            return read(self, index)

    source.__class__ = Failing
    return inputs


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_failure_in_reading_reaches_the_caller_every_time(make_input, corpus, prefetch):
    error = DataError("disk on fire", where="file.txt")
    with _failing(make_input, corpus, prefetch, error).iterator() as it:
        for _ in range(2):
            with pytest.raises(DataError, match="disk on fire"):
                _take(it, 1000)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_a_passing_failure_the_same_batch_is_read(make_input, corpus, prefetch):
    expected = _take(make_input(corpus).iterator(), 6)
    inputs = make_input(corpus, prefetch=prefetch)
    inputs.prepare()
    kind = type(inputs.source)
    reads = itertools.count()

    class Shaky(kind):
        def __getitem__(self, index):
            if next(reads) in (1, 6, 7, 15, 20):
                raise DataError("the network is away")
            return kind.__getitem__(self, index)

    inputs.source.__class__ = Shaky
    got = []
    with inputs.iterator() as it:
        while len(got) < 6:
            try:
                got.append(next(it))
            except DataError:
                continue
    _assert_equal(got, expected)


def test_batches_before_a_failure_are_handed_out(make_input, corpus):
    error = DataError("late")
    counts = []
    for prefetch in (0, 2):
        with _failing(make_input, corpus, prefetch, error).iterator() as it:
            count = 0
            with pytest.raises(DataError, match="late"):
                for _ in it:
                    count += 1
            counts.append(count)
    assert counts[0] == counts[1] > 0


@pytest.fixture
def prefetching():
    """Says which threads read ahead for iterators that this test made."""

    def alive() -> set[threading.Thread]:
        return {t for t in threading.enumerate() if t.name == "axcore-data-prefetch"}

    before = alive()
    return lambda: alive() - before


def test_closing_ends_the_thread_and_further_batches_are_an_error(make_input, corpus, prefetching):
    it = make_input(corpus, prefetch=2).iterator()
    next(it)
    assert len(prefetching()) == 1
    it.close()
    it.close()
    assert not prefetching()
    with pytest.raises(DataError, match="closed"):
        next(it)


def test_no_thread_is_made_before_the_first_batch(make_input, corpus):
    before = set(threading.enumerate())
    it = make_input(corpus, prefetch=2).iterator()
    assert set(threading.enumerate()) <= before
    it.close()


def test_a_process_that_forgets_to_close_still_ends():
    code = """
        from axcore.data import TextInput
        it = TextInput.Config(batch_size=2, seq_len=8, seed=0).instantiate().iterator()
        print(next(it)["input_ids"].shape)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("(2, 8)\n", "")


def test_a_forgotten_iterator_takes_its_thread_with_it(make_input, corpus, prefetching):
    it = make_input(corpus, prefetch=2).iterator()
    next(it)
    (thread,) = prefetching()
    del it
    gc.collect()
    thread.join()  # a thread that stays is a hang, which pytest ends
    assert not prefetching()


def test_the_position_protocol_is_grains(make_input, corpus):
    from grain.experimental import ThreadPrefetchDatasetIterator

    from axcore.data._iterator import _Batches

    inner = make_input(corpus).iterator()._inner
    assert isinstance(inner, _Batches)
    ahead = ThreadPrefetchDatasetIterator(inner, 2)
    expected = _take(make_input(corpus).iterator(), 4)
    got = [next(ahead) for _ in range(2)]
    ahead.set_state(ahead.get_state())
    _assert_equal(got + [next(ahead) for _ in range(2)], expected)
    ahead.close()


def test_importing_the_package_imports_neither_grain_nor_pyarrow_nor_jax():
    code = (
        "import sys, axcore.data;"
        "print([m for m in ('grain', 'pyarrow', 'jax', 'tensorflow', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_documents_without_text_are_passed_over_but_not_forever(make_input):
    it = make_input(["", "a", ""], heldout_fraction=0.0, batch_size=1, seq_len=2).iterator()
    assert next(it)["input_ids"].tolist() == [[256, 97]]
    with pytest.raises(DataError, match="hold no text"):
        next(make_input(["", "", ""], heldout_fraction=0.0).iterator())
