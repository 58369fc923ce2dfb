"""What stands at padded positions changes nothing, for every router and every dispatch."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_moe_tests import inputs, layer, run_layer, sequence_info

from axcore.layers import Linear
from axlearn_moe import (
    EinsumDispatch,
    ExpertChoiceRouter,
    GroupedDispatch,
    HashRouter,
    LoadBalanceLoss,
    RouterZLoss,
    SequenceBalanceLoss,
    Top2RandomRouter,
    TopKRouter,
)

ROUTERS = {
    "softmax": TopKRouter.Config(bias=True, jitter=0.1),
    "sigmoid in groups, balanced by bias": TopKRouter.Config(
        score="sigmoid", num_groups=2, num_chosen_groups=1, group_score="top2_sum", choice_bias=True
    ),
    "random second": Top2RandomRouter.Config(),
    "experts choose": ExpertChoiceRouter.Config(),
    "hash": HashRouter.Config(),
}
DISPATCHES = {"grouped": GroupedDispatch.Config(), "einsum": EinsumDispatch.Config()}
LOSSES = (LoadBalanceLoss(), SequenceBalanceLoss(), RouterZLoss())
SHAPE = (3, 6)


def padded(how: str):
    """The info of rows with padding, said in one of the two ways."""
    info = sequence_info(*SHAPE, num_padding=1)
    real = info.segment_ids > 0
    if how == "segments":
        return info, real
    everywhere = jnp.ones_like(info.segment_ids)
    positions = jnp.where(real, info.positions, -1)
    return dataclasses.replace(info, positions=positions, segment_ids=everywhere), real


def with_other_padding(x, info, real):
    """The same real tokens beside large inputs and other ids."""
    x = jnp.where(real[..., None], x, 1e3 * inputs(*SHAPE, seed=7))
    ids = info.token_values["input_ids"]
    ids = jnp.where(real, ids, 1000 + 13 * jnp.arange(ids.size).reshape(ids.shape))
    return x, dataclasses.replace(info, token_values={"input_ids": ids})


def assert_same(cfg, how):
    (info, real), x = padded(how), inputs(*SHAPE)
    first = run_layer(cfg, x, info)
    second = run_layer(cfg, *with_other_padding(x, info, real))
    np.testing.assert_array_equal(first[0][real], second[0][real])
    assert not np.any(first[0][~real]) and not np.any(second[0][~real])  # nothing is added there
    # Losses, summaries and the bias that balances loads.
    assert len(first[1].losses) == len(LOSSES)
    jax.tree.map(np.testing.assert_array_equal, first[1], second[1])
    for grads, others in zip(first[2], second[2], strict=True):
        jax.tree.map(np.testing.assert_array_equal, grads, others)
    assert not np.any(second[2][1][~real])  # nor is anything learned from it


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("router", ROUTERS)
def test_contents_of_padding_change_nothing(router, dispatch):
    cfg = layer(
        gate=Linear.Config(),
        router=ROUTERS[router],
        dispatch=DISPATCHES[dispatch],
        losses=LOSSES,
        capacity_factor=0.8,
    )
    assert_same(cfg, "segments")


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("how", ["segments", "positions"])
def test_nor_do_they_without_a_capacity(dispatch, how):
    """Padding is segment 0, or a position below 0."""
    cfg = layer(gate=Linear.Config(), dispatch=DISPATCHES[dispatch], losses=LOSSES)
    assert_same(cfg, how)


@pytest.mark.parametrize("router", ROUTERS)
def test_padding_takes_no_ones_place(router):
    """In front of the real tokens it would fill the experts first, if it counted."""
    cfg = layer(router=ROUTERS[router], losses=LOSSES, capacity_factor=0.5)
    info = sequence_info(*SHAPE)
    late = jnp.zeros(SHAPE, jnp.int32).at[:, 4:].set(1)
    _, collection, _ = run_layer(cfg, inputs(*SHAPE), dataclasses.replace(info, segment_ids=late))
    # Two tokens of a row, and each expert takes up to two: nothing is dropped.
    assert float(collection.summaries["dropped_fraction"].result()) == pytest.approx(0.0, abs=1e-6)
