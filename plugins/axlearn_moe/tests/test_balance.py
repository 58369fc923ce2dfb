"""Losses against closed forms, and loads that even out."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_moe_tests import inputs, layer, random_params, sequence_info

from axcore import functional
from axcore.collection import apply_state_updates
from axcore.errors import ModuleError
from axlearn_moe import (
    LoadBalanceLoss,
    RouterZLoss,
    Routing,
    SequenceBalanceLoss,
    TopKRouter,
)


def routing(experts, probs, real=None, logits=None):
    """A routing of one choice a token; experts (batch, seq), probs (batch, seq, experts)."""
    experts = jnp.asarray(experts)[..., None]
    probs = jnp.asarray(probs, jnp.float32)
    real = jnp.ones(experts.shape[:2], bool) if real is None else jnp.asarray(real)
    valid = real[..., None]
    logits = probs if logits is None else jnp.asarray(logits, jnp.float32)
    return Routing(experts, valid.astype(jnp.float32), valid, logits, probs, real)


UNIFORM = np.full((2, 4, 4), 0.25)
ALL_TO_FIRST = np.tile([1.0, 0.0, 0.0, 0.0], (2, 4, 1))


@pytest.mark.parametrize("loss", [LoadBalanceLoss(), SequenceBalanceLoss()])
def test_balance_is_one_and_collapse_is_the_number_of_experts(loss):
    balanced, _ = loss(routing([[0, 1, 2, 3]] * 2, UNIFORM))
    collapsed, _ = loss(routing(np.zeros((2, 4), int), ALL_TO_FIRST))
    assert float(balanced) == pytest.approx(1.0)
    assert float(collapsed) == pytest.approx(4.0)


def test_rows_balance_each_other_for_the_batch_and_not_by_sequence():
    experts = np.array([[0, 0, 0, 0], [1, 1, 1, 1]])
    probs = np.eye(4)[experts]
    batch, tokens = LoadBalanceLoss()(routing(experts, probs))
    rows, num_rows = SequenceBalanceLoss()(routing(experts, probs))
    assert float(batch) == pytest.approx(4 * (0.5 * 0.5 + 0.5 * 0.5))
    assert float(rows) == pytest.approx(4.0)
    assert (float(tokens), float(num_rows)) == (8.0, 2.0)


def test_the_z_loss_is_the_mean_square_of_logsumexp():
    logits = np.log(np.array([[[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]]))
    value, num = RouterZLoss()(routing([[0, 0]], np.full((1, 2, 4), 0.25), logits=logits))
    assert float(value) == pytest.approx((math.log(4) ** 2 + math.log(8) ** 2) / 2)
    assert float(num) == 2.0


@pytest.mark.parametrize("loss", [LoadBalanceLoss(), SequenceBalanceLoss(), RouterZLoss()])
def test_padding_weighs_nothing(loss):
    rng = np.random.default_rng(0)
    experts, logits = rng.integers(0, 4, (2, 4)), rng.normal(size=(2, 4, 4))
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    real = np.array([[True, True, False, False], [True, True, False, False]])
    padded, num = loss(routing(experts, probs, real, logits))
    cut, num_cut = loss(routing(experts[:, :2], probs[:, :2], None, logits[:, :2]))
    assert float(padded) == pytest.approx(float(cut), rel=1e-6)
    assert float(num) == float(num_cut)
    nothing, none = loss(routing(experts, probs, np.zeros((2, 4), bool), logits))
    assert (float(nothing), float(none)) == (0.0, 0.0)


def test_losses_are_for_training_and_weighted():
    cfg = layer(losses=(LoadBalanceLoss(0.5), RouterZLoss(0.25)))
    x, info = inputs(2, 6), sequence_info(2, 6, 1)
    module = cfg.instantiate(name="layer")
    params = random_params(module)

    def collect(is_training):
        return functional(module, state=params, inputs=(x, info), is_training=is_training)[1]

    collection = jax.eval_shape(lambda: collect(True))
    assert {n: e.weight for n, e in collection.losses.items()} == {
        "load_balance": 0.5,
        "router_z": 0.25,
    }
    collection = jax.eval_shape(lambda: collect(False))
    assert not collection.losses and "load" in collection.summaries


def test_the_choice_bias_balances_loads_and_is_never_trained():
    cfg = TopKRouter.Config(input_dim=8, num_experts=8, top_k=2, score="sigmoid")
    cfg.set(choice_bias=True, choice_bias_rate=0.02)
    router = cfg.instantiate(name="router")
    spec = router.parameter_specs()["choice_bias"]
    assert (spec.kind, spec.dtype, spec.shape) == ("state", "float32", (8,))
    params = random_params(router)
    # A direction that all inputs share makes some experts everyone's favourites.
    x = inputs(8, 32) + 2.0
    info = sequence_info(8, 32)

    @jax.jit
    def step(params):
        routing, collection = functional(
            router, state=params, inputs=(x, info.segment_ids > 0, info), is_training=True
        )
        return routing.loads(), apply_state_updates(params, collection)

    loads = []
    for _ in range(150):
        load, params = step(params)
        loads.append(np.asarray(load) / np.mean(load))
    assert loads[0].max() > 1.8
    settled = np.mean(loads[-50:], axis=0)  # a step of the bias moves a few of 512 assignments
    assert settled.max() < 1.1 and settled.min() > 0.9

    def loss(params):
        routing, _ = functional(
            router, state=params, inputs=(x, info.segment_ids > 0, info), is_training=True
        )
        return jnp.sum(routing.gates * jnp.cos(jnp.arange(2.0)))

    assert not np.any(jax.grad(loss)(params)["choice_bias"])


def test_a_loss_twice_or_negative_is_refused():
    with pytest.raises(ModuleError, match="AX918"):
        layer(losses=(RouterZLoss(), RouterZLoss(0.1))).instantiate(name="layer")
    with pytest.raises(ModuleError, match="AX918"):
        dataclasses.replace(RouterZLoss(), weight=-1.0)
