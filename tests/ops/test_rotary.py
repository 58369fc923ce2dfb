"""Rotary application: complex multiplication is the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import ops
from axcore.errors import OpError


@pytest.fixture(scope="module")
def call():
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(2, 5, n, 16)).astype("float32") for n in (4, 2))
    angles = rng.uniform(-3, 3, size=(2, 5, 8))
    return q, k, angles


def turned(x, angles, pairing):
    """exp(i t) times each pair as a complex number, in float64."""
    num = angles.shape[-1]
    x = x.astype("float64")
    first, rest = x[..., : 2 * num], x[..., 2 * num :]
    pairs = {
        "half": lambda: (first[..., :num], first[..., num:]),
        "interleaved": lambda: (first[..., 0::2], first[..., 1::2]),
    }
    a, b = pairs[pairing]()
    out = (a + 1j * b) * np.exp(1j * angles)[:, :, None, :]
    if pairing == "half":
        first = np.concatenate([out.real, out.imag], axis=-1)
    else:
        first = np.stack([out.real, out.imag], axis=-1).reshape(first.shape)
    return np.concatenate([first, rest], axis=-1)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("num", [8, 3], ids=["whole", "partial"])
def test_pairs_are_turned_as_complex_numbers(call, pairing, num):
    q, k, angles = call
    angles = angles[..., :num]
    cos, sin = np.cos(angles).astype("float32"), np.sin(angles).astype("float32")
    got = ops.rotary(jnp.asarray(q), jnp.asarray(k), cos, sin, pairing=pairing)
    for x, out in zip((q, k), got, strict=True):
        # float32 rounds each of two products and a sum of normal variates
        np.testing.assert_allclose(out, turned(x, angles, pairing), atol=1e-6)


def test_low_precision_is_rounded_once(call):
    q, k, angles = call
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k)]
    cos, sin = np.cos(angles).astype("float32"), np.sin(angles).astype("float32")
    wide = ops.rotary(*(x.astype(jnp.float32) for x in low), cos, sin)
    for got, expected in zip(ops.rotary(*low, cos, sin), wide, strict=True):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_array_equal(got, expected.astype(jnp.bfloat16))


def test_shapes_and_pairing_are_checked(call):
    q, k, angles = (jnp.asarray(x, jnp.float32) for x in call)
    with pytest.raises(OpError, match=r"'halves'.*half, interleaved.*AX412"):
        ops.rotary(q, k, angles, angles, pairing="halves")
    with pytest.raises(OpError, match="2P <= H"):
        ops.rotary(q, k, jnp.ones((2, 5, 9)), jnp.ones((2, 5, 9)))
    with pytest.raises(OpError, match=r"cos \(2, 4, 8\)"):
        ops.rotary(q, k, angles[:, 1:], angles[:, 1:])


def test_the_call_says_what_kernels_need(call):
    q, k, angles = (jnp.asarray(x, jnp.float32) for x in call)
    with ops.record_choices() as choices:
        jax.eval_shape(lambda: ops.rotary(q, k, angles, angles, pairing="interleaved"))
    seen = choices[0].call
    assert seen.options == {"pairing": "interleaved"}
    assert seen.axes["k"] == ("batch", "seq", "kv_heads", "head_dim")
    assert seen.axes["cos"] == ("batch", "seq", None)
