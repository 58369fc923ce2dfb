"""The contiguous cache: what is written where, one token a row or many."""

import jax
import numpy as np
import pytest

from axcore import functional
from axcore.collection import apply_state_updates
from axcore.layers import ContiguousKVCache, SequenceInfo

MAX_LEN = 6


def cache(rows, shape=(2, 3)):
    made = ContiguousKVCache.Config(
        tensors={"key": shape}, axes={"key": ("kv_heads", "head_dim")[-len(shape) :]}
    ).instantiate(name="cache")
    state = made.init(rows, MAX_LEN)
    state["key"] = state["key"] + 7.0  # what is there already
    return made, state


def extended(made, state, value, positions):
    @jax.jit
    def run(state, value, positions):
        info = SequenceInfo(positions=positions, purpose="decode")
        _, collection = functional(
            made,
            state=state,
            inputs=({"key": value}, info),
            is_training=False,
            method="extend",
        )
        return apply_state_updates(state, collection)

    return run(state, value, positions)


@pytest.mark.parametrize(
    ("rows", "seq", "shape"),
    [(4, 1, (2, 3)), (40, 1, (2, 3)), (4, 3, (2, 3)), (4, 1, (3,))],
    ids=["slices", "many-rows", "many-tokens", "latent"],
)
def test_tokens_are_stored_at_their_positions_and_padding_nowhere(rows, seq, shape):
    rng = np.random.default_rng(0)
    made, state = cache(rows, shape)
    value = rng.normal(size=(rows, seq, *shape)).astype(np.float32)
    positions = np.array([rng.permutation(MAX_LEN)[:seq] for _ in range(rows)], np.int32)
    positions[0] = -1
    new = extended(made, state, value, positions)
    expected = np.full((rows, MAX_LEN, *shape), 7.0, np.float32)
    for row in range(1, rows):
        expected[row, positions[row]] = value[row]
    np.testing.assert_array_equal(np.moveaxis(np.asarray(new["key"]), -2, 1), expected)
    np.testing.assert_array_equal(new["lengths"], positions.max(axis=1) + 1)
