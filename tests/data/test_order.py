"""Document order: permutations per epoch, mixing shares, the held-out split."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axcore.data._order import (
    DocumentOrder,
    Permutation,
    heldout_mask,
    indexed_hashes,
    mixing_slots,
)
from axcore.errors import DataError


def _order(*sizes: int, weights=None, seed=0, shuffle=True) -> DocumentOrder:
    starts = np.cumsum([0, *sizes])
    return DocumentOrder(
        [np.arange(a, b) for a, b in itertools.pairwise(starts)],
        names=[f"s{i}" for i in range(len(sizes))],
        weights=weights or [1.0] * len(sizes),
        seed=seed,
        shuffle=shuffle,
    )


@settings(max_examples=30, deadline=None)
@given(size=st.integers(1, 200), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
def test_each_epoch_is_a_permutation(size, seed, epoch):
    order = _order(size, seed=seed)
    documents = [order[epoch * size + i] for i in range(size)]
    assert sorted(documents) == list(range(size))


def test_epochs_and_seeds_differ_and_repeat():
    order = _order(100, seed=3)
    first = [order[i] for i in range(100)]
    assert first != [order[100 + i] for i in range(100)]
    assert first != [_order(100, seed=4)[i] for i in range(100)]
    assert first == [_order(100, seed=3)[i] for i in range(100)]


def test_epoch_of_a_seed_is_no_epoch_of_the_next_seed():
    # grain's own shuffle adds the epoch to the seed: there seed 0's second epoch is seed 1's first.
    assert [_order(50, seed=0)[50 + i] for i in range(50)] != [
        _order(50, seed=1)[i] for i in range(50)
    ]


def test_order_is_the_recorded_one():
    # A change here would change the meaning of every saved position.
    assert [_order(10, seed=7)[i] for i in range(10)] == [3, 8, 0, 6, 4, 1, 5, 2, 9, 7]
    assert [_order(10**6, seed=7)[i] for i in range(4)] == [828451, 231921, 26170, 88597]


@pytest.mark.parametrize("size", [2, 5, 16, 79])
def test_every_document_comes_equally_often_at_every_place(size):
    runs = 2000
    counts = np.zeros((size, size))
    for run in range(runs):
        permutation = Permutation(size, f"run {run}")
        for place in range(size):
            counts[place, permutation(place)] += 1
    expected = runs / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # (size - 1)^2 degrees of freedom: mean and standard deviation in closed form.
    freedom = (size - 1) ** 2
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def test_neighbours_are_separated():
    size = 1000
    permutation = Permutation(size, "any")
    distance = np.abs(np.diff([permutation(i) for i in range(size)]))
    # A random permutation's neighbours are size / 3 apart on average.
    assert distance.mean() == pytest.approx(size / 3, rel=0.1)


def test_without_shuffling_documents_come_in_order():
    order = _order(5, shuffle=False)
    assert [order[i] for i in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_mixture_shares_are_exact_in_every_block():
    order = _order(10, 1000, weights=[0.7, 0.3], seed=1)
    for block in range(2):
        groups = Counter(order.locate(block * 10_000 + i)[0] for i in range(10_000))
        assert groups == {0: 7000, 1: 3000}


def test_mixture_shares_do_not_depend_on_the_row():
    # A fixed interleaving pattern of two equal sources would give row 0 only one of them.
    order = _order(50, 50, seed=1)
    row = Counter(order.locate(2 * i)[0] for i in range(1000))
    assert 350 < row[0] < 650


def test_mixture_sources_have_their_own_epochs():
    order = _order(7, 31, weights=[1, 2], seed=5)
    by_group: dict[int, list[int]] = {0: [], 1: []}
    for place in range(400):
        group, rank = order.locate(place)
        assert rank == len(by_group[group])
        by_group[group].append(order[place])
    assert sorted(by_group[0][:7]) == sorted(by_group[0][7:14]) == list(range(7))
    assert sorted(by_group[1][:31]) == list(range(7, 38))


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=8))
def test_slots_are_within_one_of_the_exact_share(weights):
    slots = mixing_slots(weights)
    exact = np.array(weights) / sum(weights) * 10_000
    assert slots.sum() == 10_000
    assert (np.abs(slots - exact) < 1 + 1e-6).all()


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [1, float("nan")], [1, 1e-9]])
def test_impossible_weights_are_refused(weights):
    with pytest.raises(DataError, match="mixture weights"):
        mixing_slots(weights)


def test_heldout_share_is_near_the_fraction_and_stable_under_growth():
    hashes = indexed_hashes("file.txt", 20_000)
    mask = heldout_mask(hashes, 0.1)
    assert 0.09 < mask.mean() < 0.11
    assert (heldout_mask(hashes[:10_000], 0.1) == mask[:10_000]).all()


@given(count=st.integers(2, 30), fraction=st.floats(0.001, 0.999))
def test_no_side_of_the_split_is_empty(count, fraction):
    mask = heldout_mask(indexed_hashes("f", count), fraction)
    assert mask.any() and not mask.all()


def test_nothing_is_held_out_at_fraction_zero_or_of_one_document():
    assert not heldout_mask(indexed_hashes("f", 100), 0.0).any()
    assert not heldout_mask(indexed_hashes("f", 1), 0.5).any()
