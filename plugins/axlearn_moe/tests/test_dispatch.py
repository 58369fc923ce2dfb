"""Every dispatch does what the one-hot reference does, whatever goes where."""

from __future__ import annotations

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_moe_tests import (
    assert_close,
    inputs,
    layer,
    random_params,
    run_layer,
    sequence_info,
)

from axcore import functional
from axcore.errors import ModuleError
from axcore.layers import Linear
from axcore.ops import DotGeneral
from axcore.quantization import Int8Dot
from axcore.testing import equations
from axlearn_moe import ClampedGLU, EinsumDispatch, ExpertChoiceRouter, Experts, GroupedDispatch
from axlearn_moe._exchange import Exchange, exchanged
from axlearn_moe._routing import Routing, drop_over_capacity, expert_capacity

DIM = 4


def dense(x, experts, gates, valid, weight):
    """What a dispatch does, by definition: every expert on every token."""
    made = jnp.einsum("bsd,edf->bsef", x, weight)
    picked = jnp.take_along_axis(made, experts[..., None], axis=2)
    return jnp.einsum("bskf,bsk->bsf", picked, jnp.where(valid, gates, 0.0))


@functools.cache
def compiled(num_experts: int, capacity: int | None):
    plan = Exchange(num_experts, (), (), (), False, capacity, None)

    def grouped(weights, rows, sizes, *, is_first):
        del is_first
        return jax.lax.ragged_dot(rows, weights["w"], sizes)

    def one(run):
        def scalar(x, gates, weight, experts, valid):
            y = run(x, gates, weight, experts, valid)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

        return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1, 2), has_aux=True))

    def sorted_rows(x, gates, weight, experts, valid):
        return exchanged(plan, grouped, x, experts, gates, valid, None, {"w": weight})[0]

    return one(sorted_rows), one(lambda x, g, w, e, v: dense(x, e, g, v, w))


SHAPES = [(1, 5, 3, 1), (2, 6, 4, 2), (3, 4, 5, 3)]  # batch, seq, experts, choices


@hypothesis.given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2]))
@hypothesis.settings(max_examples=30)
def test_sorting_equals_every_expert_on_every_token(shape, seed, kind):
    batch, seq, num_experts, choices = shape
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((batch, seq, num_experts)), axis=-1)[..., :choices]
    if kind == 1:  # all tokens to the same experts, the others get none
        experts = np.broadcast_to(experts[:1, :1], experts.shape)
    valid = rng.random(experts.shape) < (0.0 if kind == 2 and seed % 3 == 0 else 0.8)
    x = rng.normal(size=(batch, seq, DIM)).astype(np.float32)
    gates = rng.random(experts.shape).astype(np.float32)
    weight = rng.normal(size=(num_experts, DIM, DIM)).astype(np.float32)
    grouped, reference = compiled(num_experts, None)
    arrays = (x, gates, weight, experts.astype(np.int32), valid)
    ((_, y), grads), ((_, wanted), wanted_grads) = grouped(*arrays), reference(*arrays)
    assert_close((y, grads), (wanted, wanted_grads))  # the sum of all y may cancel


@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(1, 6))
@hypothesis.settings(max_examples=30)
def test_what_exceeds_the_capacity_goes_in_order_of_priority(seed, capacity):
    rng = np.random.default_rng(seed)
    experts = np.argsort(rng.random((2, 6, 4)), axis=-1)[..., :2].astype(np.int32)
    valid = rng.random(experts.shape) < 0.8
    nothing = jnp.zeros((2, 6, 4))
    routing = Routing(
        jnp.asarray(experts), nothing[..., :2], jnp.asarray(valid), nothing, nothing, valid[..., 0]
    )
    kept = np.asarray(drop_over_capacity(routing, capacity).valid)
    for b in range(2):
        taken = dict.fromkeys(range(4), 0)
        for k in range(2):  # all first choices, then all second ones
            for s in range(6):
                e = int(experts[b, s, k])
                want = bool(valid[b, s, k]) and taken[e] < capacity
                taken[e] += want
                assert kept[b, s, k] == want


def test_an_experts_capacity():
    assert expert_capacity(16, 2, 8, 1.0) == 4
    assert expert_capacity(16, 2, 8, 1.25) == 5
    assert expert_capacity(4, 1, 64, 1.0) == 1  # never none
    assert expert_capacity(4, 2, 2, 10.0) == 4  # never more than there are tokens


GPT_OSS = dict(
    gate=Linear.Config(),
    experts=Experts.Config(glu=ClampedGLU(limit=0.5)),
    capacity_factor=0.8,
)


@pytest.mark.parametrize(
    "fields",
    [dict(gate=Linear.Config(bias=False)), GPT_OSS, dict(router=ExpertChoiceRouter.Config())],
    ids=["dropless", "capacity_bias_clamp", "experts_choose"],
)
def test_the_layer_equals_the_einsum_reference(fields):
    x, info = inputs(3, 6), sequence_info(3, 6, 1)
    grouped = run_layer(layer(**fields), x, info)
    einsum = run_layer(layer(dispatch=EinsumDispatch.Config(), **fields), x, info)
    assert_close(grouped, einsum)
    assert (float(grouped[1].summaries["dropped_fraction"].result()) > 0) == (fields is GPT_OSS)


def test_a_large_capacity_drops_nothing():
    x, info = inputs(3, 6), sequence_info(3, 6, 1)
    cfg = layer(gate=Linear.Config(bias=False))
    free = run_layer(cfg, x, info)
    roomy = run_layer(cfg.copy().set(capacity_factor=100.0), x, info)
    assert_close(roomy, free)


def test_runs_are_bitwise_equal():
    x, info = inputs(3, 6), sequence_info(3, 6, 1)
    cfg = layer(gate=Linear.Config(bias=False))
    first, second = run_layer(cfg, x, info), run_layer(cfg, x, info)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_padding_changes_nothing():
    cfg = layer(gate=Linear.Config(bias=False), capacity_factor=0.8)
    x, info = inputs(3, 6), sequence_info(3, 6, 1)
    real = info.segment_ids > 0
    noise = jnp.where(real[..., None], x, 1e3 * inputs(3, 6, seed=7))
    first, second = run_layer(cfg, x, info), run_layer(cfg, noise, info)
    np.testing.assert_array_equal(first[0][real], second[0][real])
    assert not np.any(first[0][~real])  # experts add nothing to padding
    jax.tree.map(np.testing.assert_array_equal, first[1], second[1])  # losses and summaries
    jax.tree.map(np.testing.assert_array_equal, first[2][0], second[2][0])  # gradients of weights


def test_no_array_has_experts_beside_tokens_and_their_places():
    """Of 64 tokens and 8 experts the one-hot tensors are larger than all else together."""
    tokens, experts = 64, 8
    x, info = inputs(1, tokens, 4), sequence_info(1, tokens)

    def largest(dispatch):
        cfg = layer(input_dim=4, num_experts=experts, hidden_dim=4, dispatch=dispatch)
        module = cfg.instantiate(name="layer")

        def loss(params):
            y, _ = functional(module, state=params, inputs=(x, info), is_training=True)
            return jnp.sum(y**2)

        program = jax.make_jaxpr(jax.grad(loss))(random_params(module))
        shapes = (getattr(v.aval, "shape", ()) for e in equations(program) for v in e.outvars)
        return max(map(math.prod, shapes))

    # Comparisons of ids with experts: (tokens, choices, experts), which the compiler fuses.
    assert largest(GroupedDispatch.Config()) == tokens * 2 * experts
    assert largest(EinsumDispatch.Config()) >= tokens * experts * tokens


def test_products_that_grouped_matmul_does_not_know_are_refused():
    exact = Linear.Config(bias=False, dot=DotGeneral.Config(precision="highest"))
    with pytest.raises(ModuleError, match="AX916") as raised:
        layer(up=exact).instantiate(name="layer")
    assert "EinsumDispatch" in str(raised.value)
    layer(up=exact, dispatch=EinsumDispatch.Config()).instantiate(name="layer")


def test_no_room_in_a_buffer_is_refused():
    with pytest.raises(ModuleError, match="AX912"):
        layer(dispatch=GroupedDispatch.Config(buffer_factor=0.5)).instantiate(name="layer")


def test_int8_experts_give_the_same_in_both_dispatches():
    """Both have a scale for each token and for each output of an expert."""
    dots = dict.fromkeys(("up", "down"), Linear.Config(dot=Int8Dot.Config()))
    x, info = inputs(2, 6), sequence_info(2, 6, 1)
    grouped, _, _ = run_layer(layer(**dots), x, info)
    einsum, _, _ = run_layer(layer(dispatch=EinsumDispatch.Config(), **dots), x, info)
    plain, _, _ = run_layer(layer(), x, info)
    assert_close(grouped, einsum)
    assert not np.allclose(grouped, plain, atol=1e-4)
