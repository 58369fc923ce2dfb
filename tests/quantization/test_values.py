"""Rounding to few bits against what numpy and ml_dtypes say in float64."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from axcore.errors import ConfigError
from axcore.quantization import (
    Operand,
    contract,
    contract_blocks,
    dequantize,
    quantize,
    quantize_blocks,
    quantize_weight,
)
from axcore.quantization._products import labels
from axcore.quantization._stored import group_size, pack_int4, unpack_int4

X = np.asarray(jax.random.normal(jax.random.key(0), (6, 64))) * np.logspace(-3, 3, 6)[:, None]


@pytest.mark.parametrize(("dtype", "levels"), [("int8", 127), ("int4", 7)])
def test_integers_are_the_nearest_multiples_of_the_scale(dtype, levels):
    q = quantize(jnp.asarray(X), Operand(dtype), (1,))
    scale = np.abs(X).max(1, keepdims=True) / levels
    np.testing.assert_allclose(q.scale, scale, rtol=1e-6)
    np.testing.assert_array_equal(q.values, np.round(X / np.asarray(q.scale, np.float64)))
    assert np.abs(np.asarray(q.values, np.int32)).max() == levels


def test_floats_round_as_ml_dtypes_does_and_saturate():
    q = quantize(jnp.asarray(X), Operand("float8_e4m3fn", "tensor"), (0, 1))
    ratio = np.float32(X) / np.asarray(q.scale)
    np.testing.assert_array_equal(
        np.asarray(q.values), np.clip(ratio, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    )
    low = quantize(jnp.asarray(X), Operand("float8_e4m3fn"), (), amax=jnp.float32(1.0))
    assert np.abs(np.asarray(low.values, np.float32)).max() == 448.0


def test_clipping_trades_the_largest_for_finer_steps():
    q = quantize(jnp.asarray(X), Operand("int8", clip=0.5), (1,))
    np.testing.assert_allclose(q.scale, np.abs(X).max(1, keepdims=True) / 254, rtol=1e-6)
    back, half = np.asarray(dequantize(q)), np.abs(X).max(1, keepdims=True) / 2
    assert (np.abs(back) <= half * (1 + 1e-6)).all()


def test_stochastic_rounding_keeps_the_mean():
    x = jnp.full((20_000,), 0.3).at[0].set(127.0)
    q = quantize(x, Operand("int8", stochastic=True), (0,), key=jax.random.key(1))
    assert set(np.unique(q.values[1:])) == {0, 1}
    # Five standard deviations of the mean of 20,000 draws.
    assert abs(float(np.mean(q.values[1:])) - 0.3) < 5 * np.sqrt(0.21 / 20_000)


def test_blocks_have_the_smallest_power_of_two_that_saturates_nothing():
    values, scale = quantize_blocks(jnp.asarray(X), Operand("float8_e4m3fn", "block"))
    amax = np.abs(X).reshape(6, 2, 32).max(-1)
    np.testing.assert_array_equal(
        np.asarray(scale, np.float64), 2.0 ** np.ceil(np.log2(amax / 448))
    )
    wide = np.asarray(values, np.float64) * np.repeat(np.asarray(scale, np.float64), 32, -1)
    # Half a step of a float with three bits; below that the block's smallest numbers.
    assert (np.abs(wide - X) <= np.abs(X) / 16 + np.repeat(amax, 32, -1) * 2.0**-17).all()


def test_zeros_and_tiny_numbers_have_a_scale():
    x = jnp.array([[0.0, 0.0], [1e-42, 0.0]])
    q = quantize(x, Operand("int8"), (1,))
    np.testing.assert_array_equal(q.values, 0)
    assert np.isfinite(np.asarray(q.scale)).all()


@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn"])
def test_what_is_no_number_comes_back_as_none(dtype):
    x = jnp.array([[jnp.nan, 1.0], [jnp.inf, 1.0], [2.0, 1.0]])
    back = dequantize(quantize(x, Operand(dtype), (1,)))
    assert not jnp.isfinite(back[:2, 0]).any()
    assert jnp.isfinite(back[2]).all()


@pytest.mark.parametrize("how", ["channels", "blocks"])
def test_any_contraction_equals_einsum_of_what_was_rounded(how):
    """Batch dims, several summed dims, and a sum that no block divides."""
    a = np.asarray(jax.random.normal(jax.random.key(2), (3, 5, 2, 35)))
    b = np.asarray(jax.random.normal(jax.random.key(3), (35, 3, 7, 2)))
    lhs, rhs, out = labels((((2, 3), (3, 0)), ((0,), (1,))), 4, 4)
    exact = np.einsum(f"{lhs},{rhs}->{out}", a.astype(np.float64), b.astype(np.float64))
    if how == "blocks":
        operand = Operand("float8_e4m3fn", "block")
        got = contract_blocks(jnp.asarray(a), lhs, operand, jnp.asarray(b), rhs, operand, out)
        assert np.linalg.norm(got - exact) < 0.06 * np.linalg.norm(exact)
        return
    qa = quantize(jnp.asarray(a), Operand("int8"), (2, 3))
    qb = quantize(jnp.asarray(b), Operand("int8"), (0, 3))
    rounded = [np.asarray(q.values, np.float64) * np.asarray(q.scale, np.float64) for q in (qa, qb)]
    want = np.einsum(f"{lhs},{rhs}->{out}", *rounded)
    # Integer sums are exact: what is left is the scales' float32.
    np.testing.assert_allclose(contract(qa, lhs, qb, rhs, out), want, rtol=1e-5, atol=1e-6)


def test_int4_pairs_share_bytes_and_come_back():
    values = jnp.arange(-8, 8, dtype=jnp.int8).reshape(2, 8, 1)
    packed = pack_int4(values, 1)
    assert packed.shape == (2, 4, 1) and packed.dtype == jnp.uint8
    np.testing.assert_array_equal(unpack_int4(packed, 1), values)


def test_groups_of_a_weight_have_scales_of_their_own():
    w = np.asarray(jax.random.normal(jax.random.key(4), (2, 48, 5)))
    q = quantize_weight(jnp.asarray(w), 2, "int8", group=32)
    assert group_size(48, 32) == 24
    assert q.scale.shape == (2, 2, 5)
    top = np.abs(w.reshape(2, 2, 24, 5)).max(2)
    np.testing.assert_allclose(q.scale, top / 127, rtol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [{"dtype": "int3"}, {"clip": 0.0}, {"block": 1}, {"dtype": "float8_e5m2", "stochastic": True}],
    ids=["dtype", "clip", "block", "stochastic"],
)
def test_what_cannot_be_is_refused(fields):
    with pytest.raises(ConfigError, match="AX433"):
        Operand(**{"dtype": "int8", **fields})
