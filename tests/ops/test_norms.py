import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from axcore import ops
from axcore.errors import OpError


def rms64(x, scale, eps):
    x = np.asarray(x, np.float64)
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * np.asarray(scale, np.float64)


def layer64(x, scale, bias, eps):
    x = np.asarray(x, np.float64)
    centered = x - x.mean(-1, keepdims=True)
    out = centered / np.sqrt(x.var(-1, keepdims=True) + eps)
    return out * np.asarray(scale, np.float64) + np.asarray(bias, np.float64)


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@given(
    lead=st.lists(st.integers(1, 3), max_size=3),
    dim=st.integers(1, 9),
    shift=st.sampled_from([0.0, 100.0]),
    eps=st.sampled_from([1e-6, 1e-2]),
)
@settings(max_examples=8)
def test_match_float64(lead, dim, shift, eps):
    x = normal(0, *lead, dim) + shift
    scale, bias = normal(1, dim), normal(2, dim)
    np.testing.assert_allclose(
        ops.rms_norm(x, scale, eps), rms64(x, scale, eps), rtol=1e-5, atol=1e-5
    )
    # The input's own rounding, 100 * 2**-24, is what is left of the variance.
    np.testing.assert_allclose(
        ops.layer_norm(x, scale, bias, eps),
        layer64(x, scale, bias, eps),
        rtol=1e-4,
        atol=1e-4 if shift == 0 else 3e-2,
    )


def test_scale_and_bias_are_optional():
    x = normal(0, 3, 8)
    np.testing.assert_array_equal(ops.rms_norm(x), ops.rms_norm(x, jnp.ones(8)))
    plain = ops.layer_norm(x)
    np.testing.assert_array_equal(plain, ops.layer_norm(x, jnp.ones(8), jnp.zeros(8)))


@pytest.mark.parametrize("norm", [ops.rms_norm, ops.layer_norm])
def test_statistics_are_float32_and_the_output_keeps_its_dtype(norm):
    # Squares of 300 overflow float16.
    x = (300.0 * normal(0, 4, 64)).astype(jnp.float16)
    got = norm(x, normal(1, 64))
    assert got.dtype == jnp.float16
    expected = norm(x.astype(jnp.float32), normal(1, 64))
    np.testing.assert_allclose(got, expected, rtol=2e-3, atol=2e-3)


def test_gradients_match_finite_differences():
    x, scale, bias = normal(0, 2, 5), normal(1, 5), normal(2, 5)
    check_grads(jax.jit(ops.rms_norm), (x, scale), order=1, modes=["rev"], rtol=1e-2, atol=1e-2)
    check_grads(
        jax.jit(ops.layer_norm), (x, scale, bias), order=1, modes=["rev"], rtol=1e-2, atol=1e-2
    )


def test_a_constant_row_has_finite_gradients():
    grads = jax.grad(lambda x: jnp.sum(jnp.sin(ops.layer_norm(x))))(jnp.full((2, 4), 3.0))
    assert jnp.isfinite(grads).all()


def test_are_deterministic():
    x, scale = normal(0, 16, 64), normal(1, 64)
    step = jax.jit(jax.grad(lambda x, s: jnp.sum(ops.rms_norm(x, s) ** 3), (0, 1)))
    jax.tree.map(np.testing.assert_array_equal, step(x, scale), step(x, scale))


def test_a_scale_of_another_size_is_refused():
    with pytest.raises(OpError, match=r"x \(2, 8\) and scale \(4,\): expected scale \(8,\)"):
        ops.rms_norm(jnp.ones((2, 8)), jnp.ones(4))
    with pytest.raises(OpError, match="layer_norm got a scalar"):
        ops.layer_norm(jnp.ones(()))


def test_add_rms_norm_is_the_two_steps_apart_to_the_bit():
    x, residual = (jax.random.normal(jax.random.key(i), (2, 3, 8), jnp.bfloat16) for i in (0, 1))
    scale = jnp.linspace(0.5, 2.0, 8)
    normed, total = ops.add_rms_norm(x, residual, scale, eps=1e-5)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_array_equal(normed, ops.rms_norm(x + residual, scale, eps=1e-5))


def test_add_rms_norm_wants_equal_shapes():
    with pytest.raises(OpError, match=r"residual float32\(2, 8\)"):
        ops.add_rms_norm(jnp.ones((3, 8)), jnp.ones((2, 8)))
