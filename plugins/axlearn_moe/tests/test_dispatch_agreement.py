"""Whole layers of every dispatch agree, whatever the weights, the padding and the loads are."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_moe_tests import assert_close, compiled_layer, layer, sequence_info

from axcore.layers import Linear
from axlearn_moe import EinsumDispatch, MoE, TopKRouter

SHAPES = [(1, 5, 3, 1), (2, 6, 4, 2), (3, 4, 5, 3)]  # batch, seq, experts, choices
LOADS = ["as it comes", "all to one expert first", "two experts get nothing"]


def cfg_of(num_experts: int, top_k: int, **fields: Any) -> MoE.Config:
    return layer(
        num_experts=num_experts,
        top_k=top_k,
        gate=Linear.Config(),
        router=TopKRouter.Config(bias=True),
        **fields,
    )


def run(cfg: MoE.Config, shape: tuple[int, int], seed: int, loads: str) -> Any:
    """Output, collection and gradients of (parameters, x), all of them drawn from the seed."""
    rng = np.random.default_rng(seed)
    params, step = compiled_layer(cfg.to_text(), (*shape, 8), True)
    params = jax.tree.map(lambda p: jnp.asarray(rng.normal(0.0, 0.4, p.shape), jnp.float32), params)
    bias = np.zeros(cfg.num_experts, np.float32)
    if loads == LOADS[1]:
        bias[rng.integers(cfg.num_experts)] = 20.0
    elif loads == LOADS[2]:
        # Only where enough are left to choose from do these get none.
        bias[rng.permutation(cfg.num_experts)[:2]] = -20.0
    params["router"]["bias"] = jnp.asarray(bias)
    info = sequence_info(*shape, num_padding=int(rng.integers(0, 3)))
    (_, (y, collection)), grads = step(
        params, jnp.asarray(rng.normal(size=(*shape, 8)), jnp.float32), info
    )
    return y, collection, grads


# Values and weights are of size 1, and so are the terms of every sum. Some gradients of a router
# are small only because such terms cancel, so errors are measured against 1, not against those.


@pytest.mark.slow
@hypothesis.given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1), st.sampled_from(LOADS))
@hypothesis.settings(max_examples=60, deadline=None)
def test_layers_agree_with_the_one_hot_reference_and_with_unlimited_capacity(shape, seed, loads):
    batch, seq, num_experts, top_k = shape

    def made(**fields: Any) -> Any:
        return run(cfg_of(num_experts, top_k, **fields), (batch, seq), seed, loads)

    reference = made(dispatch=EinsumDispatch.Config())
    assert float(reference[1].summaries["dropped_fraction"].result()) == 0
    assert_close(made(), reference, least_scale=1.0)
    assert_close(made(capacity_factor=1e6), reference, least_scale=1.0)  # infinity


@pytest.mark.slow
@hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from(LOADS))
@hypothesis.settings(max_examples=40, deadline=None)
def test_layers_that_drop_agree_with_the_one_hot_reference(seed, loads):
    batch, seq, num_experts, top_k = SHAPES[1]
    made = [
        run(cfg_of(num_experts, top_k, capacity_factor=0.7, **fields), (batch, seq), seed, loads)
        for fields in ({}, {"dispatch": EinsumDispatch.Config()})
    ]
    assert_close(*made, least_scale=1.0)
    if loads == LOADS[1]:
        assert float(made[0][1].summaries["dropped_fraction"].result()) > 0
