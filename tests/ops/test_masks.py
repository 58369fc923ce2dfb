import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axcore.errors import OpError
from axcore.ops.masks import (
    And,
    Causal,
    Full,
    MaskArrays,
    PrefixLM,
    SegmentIds,
    SlidingWindow,
    TracedWindow,
)

sides = st.none() | st.integers(0, 6)
masks = st.recursive(
    st.sampled_from([Causal(), Full(), PrefixLM(3)]) | st.builds(SlidingWindow, sides, sides),
    lambda inner: st.builds(lambda a, b: a & b, inner, inner),
    max_leaves=3,
)


def pairwise(predicate, t, s):
    return np.array([[predicate(i, j) for j in range(s)] for i in range(t)])


@pytest.mark.parametrize(
    ("mask", "predicate"),
    [
        (Full(), lambda i, j: True),
        (Causal(), lambda i, j: j <= i),
        (SlidingWindow(2), lambda i, j: i - j <= 2),
        (SlidingWindow(None, 1), lambda i, j: j - i <= 1),
        (SlidingWindow(2, 1), lambda i, j: -1 <= i - j <= 2),
        (PrefixLM(3), lambda i, j: j <= i or j < 3),
        (Causal() & SlidingWindow(1), lambda i, j: i - 1 <= j <= i),
    ],
)
def test_dense_says_who_sees_whom(mask, predicate):
    dense = mask.dense(np.arange(5), np.arange(7))
    np.testing.assert_array_equal(dense, pairwise(predicate, 5, 7))


def test_segments_see_only_themselves_and_padding_sees_nothing():
    ids = np.array([[1, 1, 2, 0]])
    arrays = MaskArrays(q_segment_ids=ids, kv_segment_ids=ids)
    expected = [[[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]]
    dense = SegmentIds().dense(np.arange(4), np.arange(4), arrays)
    np.testing.assert_array_equal(dense, np.array(expected, bool))


def test_prefix_lengths_differ_by_example():
    arrays = MaskArrays(prefix_lengths=np.array([0, 2]))
    dense = PrefixLM().dense(np.arange(3), np.arange(3), arrays)
    np.testing.assert_array_equal(dense[0], np.tril(np.ones((3, 3), bool)))
    np.testing.assert_array_equal(dense[1], pairwise(lambda i, j: j <= i or j < 2, 3, 3))


def test_a_traced_window_equals_the_static_one():
    def dense(window):
        return TracedWindow().dense(jnp.arange(6), jnp.arange(6), MaskArrays(window=window))

    for window in (0, 3):
        expected = SlidingWindow(window).dense(np.arange(6), np.arange(6))
        np.testing.assert_array_equal(jax.jit(dense)(window), expected)


def test_positions_may_differ_by_example():
    positions = np.array([[0, 1], [5, 6]])
    dense = Causal().dense(positions, np.arange(6))
    assert dense.shape == (2, 2, 6)
    np.testing.assert_array_equal(dense.sum(-1), [[1, 2], [6, 6]])


@given(mask=masks, q_start=st.integers(0, 11), length=st.integers(1, 12), s=st.integers(1, 14))
def test_nothing_visible_lies_outside_kv_range(mask, q_start, length, s):
    q_stop = q_start + length
    lo, hi = mask.kv_range(q_start, q_stop, s)
    assert 0 <= lo <= hi <= s
    dense = np.asarray(mask.dense(np.arange(q_start, q_stop), np.arange(s)))
    assert not dense[:, :lo].any() and not dense[:, hi:].any()


@given(a=masks, b=masks)
def test_and_is_the_conjunction_and_stays_flat(a, b):
    both = a & b
    q, kv = np.arange(9), np.arange(9)
    np.testing.assert_array_equal(both.dense(q, kv), a.dense(q, kv) & b.dense(q, kv))
    assert not any(isinstance(part, And | Full) for part in both.parts()) or both == Full()
    assert len(set(both.parts())) == len(both.parts())


@given(masks, st.integers(1, 9))
def test_a_relative_mask_ignores_where_positions_start(mask, offset):
    assert not PrefixLM(3).is_relative
    if mask.is_relative:
        positions = np.arange(7)
        moved = mask.dense(positions + offset, positions + offset)
        np.testing.assert_array_equal(moved, mask.dense(positions, positions))


def test_masks_are_values():
    assert Causal() & SlidingWindow(4) == Causal() & SlidingWindow(4)
    assert hash(Causal() & Full()) == hash(Causal())
    assert (SegmentIds() & PrefixLM()).needs == (
        "q_segment_ids",
        "kv_segment_ids",
        "prefix_lengths",
    )


def test_a_negative_window_is_refused():
    with pytest.raises(OpError, match=r"SlidingWindow\(left=-1\): expected >= 0"):
        SlidingWindow(-1)


def test_masks_import_no_jax():
    code = (
        "import axcore.ops.masks, axcore.ops, sys; axcore.ops.Causal(); print('jax' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"


blocks = st.tuples(st.integers(0, 9), st.integers(1, 4)).map(lambda b: np.arange(b[0], sum(b)))
ids = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(masks, blocks, blocks)
def test_a_block_that_is_not_reached_holds_no_visible_pair(mask, q, kv):
    seen = mask.dense(q, kv).any()
    assert mask.reaches((q[0], q[-1]), (kv[0], kv[-1])) or not seen


@given(ids, ids)
def test_segments_reach_where_their_ids_overlap(q, kv):
    arrays = MaskArrays(q_segment_ids=np.array([q]), kv_segment_ids=np.array([kv]))
    seen = SegmentIds().dense(np.arange(len(q)), np.arange(len(kv)), arrays).any()
    reached = SegmentIds().reaches((0, len(q)), (0, len(kv)), arrays)
    assert reached or not seen
    # Packing numbers the segments of a row in order: then a gap between the ids is seen.
    if max(q) < min(i or 9 for i in kv):
        assert not reached


@pytest.mark.parametrize(
    ("mask", "kv", "reached"),
    [
        (TracedWindow(), (0, 3), False),
        (TracedWindow(), (4, 7), True),
        (PrefixLM(), (9, 12), True),
        (PrefixLM(), (10, 12), False),
    ],
)
def test_arrays_tell_what_is_reached(mask, kv, reached):
    arrays = MaskArrays(window=np.int32(2), prefix_lengths=np.array([3, 10]))
    assert (
        bool(mask.reaches((8, 9) if mask.needs == ("window",) else (6, 8), kv, arrays)) == reached
    )
