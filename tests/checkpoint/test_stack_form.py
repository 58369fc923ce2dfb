"""Layer stacks convert between the unrolled and the stacked form, bit for bit."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axcore.checkpoint import stack_form


def unrolled(num_layers: int) -> dict:
    rng = np.random.default_rng(0)
    layers = {
        str(i): {"w": rng.normal(size=(16, 8)).astype(np.float32), "b": np.full((8,), i, np.int32)}
        for i in range(num_layers)
    }
    return {"decoder": {"layer": layers, "norm": rng.normal(size=(3,)).astype(np.float32)}}


def stacked(tree: dict, ranges: list[range]) -> dict:
    """The stacked form of an unrolled tree, made by hand."""
    layers = tree["decoder"]["layer"]
    keys = {f"{r.start}:{r.stop}:{r.step}": r for r in ranges}
    inside = {
        key: {name: np.stack([layers[str(i)][name] for i in r]) for name in ("w", "b")}
        for key, r in keys.items()
    }
    loose = set(map(int, layers)) - {i for r in ranges for i in r}
    return {
        "decoder": {
            "layer": {**inside, **{str(i): layers[str(i)] for i in loose}},
            "norm": tree["decoder"]["norm"],
        }
    }


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


FORMS = [
    [],
    [range(0, 6)],
    [range(0, 3), range(3, 6)],
    [range(0, 6, 2), range(1, 6, 2)],
    [range(0, 4, 2), range(1, 4, 2)],  # layers 4 and 5 are a remainder
]


@pytest.mark.parametrize("source", FORMS)
@pytest.mark.parametrize("target", FORMS)
def test_every_form_converts_to_every_other(source, target):
    tree = unrolled(6)
    wanted = stacked(tree, target)
    assert_same(stack_form.restack(stacked(tree, source), wanted), wanted)


@pytest.mark.parametrize("source", FORMS)
def test_jax_arrays_convert_too(source):
    tree = unrolled(6)
    given = jax.tree.map(jnp.asarray, stacked(tree, source))
    assert_same(stack_form.restack(given, tree), tree)
    assert_same(stack_form.restack(jax.tree.map(jnp.asarray, tree), given), given)


def test_shapes_convert_without_arrays():
    tree = unrolled(4)
    given, wanted = (
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), t)
        for t in (stacked(tree, [range(0, 4)]), tree)
    )
    assert stack_form.restack(given, wanted) == wanted


def test_canonical_paths_are_per_layer():
    tree = unrolled(4)
    flat = stack_form.canonical(stack_form.flatten(stacked(tree, [range(0, 4, 2), range(1, 4, 2)])))
    expected = stack_form.flatten(tree)
    assert sorted(flat) == sorted(expected)
    for path, value in expected.items():
        np.testing.assert_array_equal(flat[path], value)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.chain(optax.clip(1.0), optax.lion(1e-3)),
        optax.sgd(1e-2, momentum=0.9),
        optax.adafactor(1e-2, min_dim_size_to_factor=8, factored=True),
    ],
    ids=["adamw", "chain-lion", "momentum", "adafactor"],
)
def test_optimizer_state_converts(optimizer):
    """The state after one step, restacked, is the state that the other form steps to."""
    tree = unrolled(4)
    tree = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    other = jax.tree.map(jnp.asarray, stacked(tree, [range(0, 4)]))

    def state_of(params):
        grads = jax.tree.map(lambda p: p * 0.5 + 1, params)
        _, state = optimizer.update(grads, optimizer.init(params), params)
        return state

    converted = stack_form.restack(state_of(tree), state_of(other))
    assert jax.tree.structure(converted) == jax.tree.structure(state_of(other))
    back = stack_form.restack(converted, state_of(tree))
    assert_same(back, state_of(tree))
    if optimizer.init(other) and "Factored" not in str(jax.tree.structure(state_of(other))):
        assert_same(converted, state_of(other))


class Nested(NamedTuple):
    inner: dict


def test_a_stack_within_a_stack_converts():
    flat = {f"a/{i}/b/{j}/w": np.array([i, j], np.int8) for i in range(2) for j in range(3)}
    tree = Nested({"a": {str(i): {"b": {str(j): {"w": flat[f"a/{i}/b/{j}/w"]} for j in range(3)}}
                         for i in range(2)}})  # fmt: skip
    target = Nested({"a": {"0:2:1": {"b": {"0:3:1": {"w": np.zeros((2, 3, 2), np.int8)}}}}})
    got = stack_form.restack(tree, target).inner["a"]["0:2:1"]["b"]["0:3:1"]["w"]
    np.testing.assert_array_equal(got, np.moveaxis(np.indices((2, 3)), 0, -1))
    assert_same(
        stack_form.restack(Nested({"a": {"0:2:1": {"b": {"0:3:1": {"w": got}}}}}), tree), tree
    )


def test_a_shared_placeholder_is_taken_once():
    layers = {"0": {"v": np.zeros((1,))}, "1": {"v": np.zeros((1,))}}
    target = {"0:2:1": {"v": np.zeros((1,))}}
    assert stack_form.restack(layers, target)["0:2:1"]["v"].shape == (1,)
    assert_same(stack_form.restack(target, layers), layers)


def test_a_shared_value_that_differs_between_layers_raises():
    layers = {"0": {"v": np.zeros((1,))}, "1": {"v": np.ones((1,))}}
    with pytest.raises(ValueError, match=r"layers differ.*0/v, 1/v"):
        stack_form.restack(layers, {"0:2:1": {"v": np.zeros((1,))}})


def test_differences_are_named():
    stored = {"x/0:2:1/w": np.zeros((2, 3)), "only_here": np.zeros(1)}
    target = {"x/0/w": np.zeros(3), "x/1/w": np.zeros(4), "x/2/w": np.zeros(3)}
    plan = stack_form.plan(stored, target)
    assert list(plan.recipes) == ["x/0/w"]
    assert plan.missing == {"x/2/w": "x/2/w"}
    assert plan.reshaped == {"x/1/w": ((2, 3), (4,))}
    assert plan.unexpected == ("only_here",)


def test_layers_that_the_target_lacks_are_unexpected():
    plan = stack_form.plan({"x/0:3:1/w": np.zeros((3, 3))}, {"x/0:2:1/w": np.zeros((2, 3))})
    assert plan.unexpected == ("x/0:3:1/w",)


def test_separators_in_keys_are_escaped():
    assert list(stack_form.flatten({"a/b": {"c%": 1}})) == ["a%2Fb/c%25"]


@hypothesis.given(
    cuts=st.lists(st.integers(0, 7), max_size=4), step=st.integers(1, 3), seed=st.integers(0, 9)
)
@hypothesis.settings(max_examples=50, deadline=None)
def test_conversion_and_back_is_the_identity(cuts, step, seed):
    edges = sorted({0, 7, *cuts})
    ranges = [
        range(a + offset, b, step)
        for a, b in itertools.pairwise(edges)
        for offset in range(min(step, b - a))
    ]
    rng = np.random.default_rng(seed)
    tree = jax.tree.map(lambda x: rng.permutation(x), unrolled(7))
    assert_same(stack_form.restack(stacked(tree, ranges), tree), tree)
