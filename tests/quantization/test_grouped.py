"""Quantized products of groups of rows, against float64 and its error bounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.quantization import Magnitudes, Operand, Plan, quantized_grouped_product

M, K, N, E = 23, 16, 12, 4
SIZES = np.array([7, 0, 11, 3], np.int32)  # one group is empty, two rows belong to none
INT8 = Plan(Operand("int8"), Operand("int8"), Operand("int8"))
FP8 = Plan(
    Operand("float8_e4m3fn", "tensor"),
    Operand("float8_e4m3fn", "tensor"),
    Operand("float8_e5m2", "tensor"),
)
INT4 = Plan(Operand("int8"), Operand("int4"))


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=s).astype(np.float32) for s in ((M, K), (E, K, N), (M, N)))
    x *= np.exp(rng.normal(size=(M, 1))).astype(np.float32)  # tokens of different size
    return x, w, g


def groups():
    return np.repeat(np.arange(E), SIZES)


def exact(x, w, g):
    """Result and gradients in float64."""
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    y, dx, dw = np.zeros((M, N)), np.zeros((M, K)), np.zeros((E, K, N))
    for i, e in enumerate(groups()):
        y[i], dx[i] = x[i] @ w[e], g[i] @ w[e].T
        dw[e] += np.outer(x[i], g[i])
    return y, dx, dw


def run(plan, x, w, g):
    def product(x, w):
        return quantized_grouped_product(plan, x, w, jnp.asarray(SIZES))

    y, pull = jax.vjp(jax.jit(product), jnp.asarray(x), jnp.asarray(w))
    return (y, *pull(jnp.asarray(g)))


def test_int8_keeps_within_half_a_step_of_each_operand(arrays):
    x, w, g = arrays
    got, dx, _ = run(INT8, x, w, g)
    expected, expected_dx, _ = exact(x, w, g)
    half = 0.5 / 127
    for i, e in enumerate(groups()):
        steps_w = half * np.abs(w[e]).max(0)  # a scale for each output
        step_x = half * np.abs(x[i]).max()
        bound = np.abs(x[i]) @ np.ones((K, N)) * steps_w + step_x * np.abs(w[e]).sum(0)
        bound += K * step_x * steps_w
        assert np.all(np.abs(got[i] - expected[i]) <= bound * (1 + 1e-5))
        steps_w, step_g = half * np.abs(w[e]).max(1), half * np.abs(g[i]).max()
        bound = np.abs(g[i]).sum() * steps_w + step_g * np.abs(w[e]).sum(1) + N * step_g * steps_w
        assert np.all(np.abs(dx[i] - expected_dx[i]) <= bound * (1 + 1e-5))
    assert np.all(np.asarray(got)[len(groups()) :] == 0)


@pytest.mark.parametrize(
    # An int8 step is 1/127 of the largest of 12 to 16 values: a percent of error in all. e4m3 and
    # e5m2 are off by 2^-4 and 2^-3 at most, which mostly cancel in a sum. int4 has steps of a
    # seventh of the largest.
    ("plan", "forward", "backward"),
    [(INT8, 0.015, 0.015), (FP8, 0.05, 0.08), (INT4, 0.12, 0.12)],
    ids=["int8", "fp8", "int4"],
)
def test_result_and_gradients_are_near_the_exact_ones(arrays, plan, forward, backward):
    got, expected = run(plan, *arrays), exact(*arrays)
    for value, right, tolerance in zip(got, expected, (forward, backward, backward), strict=True):
        error = np.linalg.norm(value - right) / np.linalg.norm(right)
        assert 0 < error < tolerance


def test_a_row_does_not_depend_on_the_others(arrays):
    """So experts may be split over devices, each with some of the rows."""
    x, w, _ = arrays
    for plan in (INT8, FP8):
        whole = quantized_grouped_product(plan, jnp.asarray(x), jnp.asarray(w), jnp.asarray(SIZES))
        part = quantized_grouped_product(
            plan, jnp.asarray(x[7:18]), jnp.asarray(w[2:3]), jnp.array([11], jnp.int32)
        )
        np.testing.assert_allclose(part, whole[7:18], rtol=1e-6)


def test_known_magnitudes_scale_each_groups_matrix_in_both_products(arrays):
    """Those at hand, given by hand, change nothing; halves of them saturate their group alone."""
    channel = Plan(*(Operand(o.dtype, "channel") for o in FP8[:3]))
    x, w, g = (jnp.asarray(a) for a in arrays)
    at_hand = {
        FP8: Magnitudes(rhs=jnp.abs(w).max((1, 2), keepdims=True)),
        channel: Magnitudes(
            rhs=jnp.abs(w).max(1, keepdims=True), rhs_back=jnp.abs(w).max(2, keepdims=True)
        ),
    }
    for plan, known in at_hand.items():
        if known.rhs_back is None:
            known = known._replace(rhs_back=known.rhs)

        def result(magnitudes, plan=plan):
            def product(x, w):
                sizes = jnp.asarray(SIZES)
                return quantized_grouped_product(plan, x, w, sizes, magnitudes=magnitudes)

            y, pull = jax.vjp(product, x, w)
            return (y, *pull(g))

        whole = result(known)
        for a, b in zip(whole, run(plan, *arrays), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        halves = Magnitudes(*(None if a is None else a.at[2].multiply(0.5) for a in known))
        y, dx, _ = result(halves)
        of_two = np.flatnonzero(groups() == 2)
        for value, before in ((y, whole[0]), (dx, whole[1])):
            changed = np.any(np.asarray(value) != np.asarray(before), axis=1)
            assert set(np.flatnonzero(changed)) == set(of_two)
