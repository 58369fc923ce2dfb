import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from axcore import ops
from axcore.errors import OpError

X = jnp.linspace(-4.0, 4.0, 41)

CLOSED_FORMS = {
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "identity": lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "squared_relu": lambda x: max(x, 0.0) ** 2,
    "tanh": math.tanh,
}


def test_every_name_has_a_closed_form_here():
    assert set(CLOSED_FORMS) == set(ops.ACTIVATIONS)


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_matches_its_closed_form(name):
    expected = [CLOSED_FORMS[name](float(x)) for x in X]
    np.testing.assert_allclose(ops.activation(name)(X), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh"])
def test_gated_is_the_product(name):
    up = jnp.cos(X)
    got = ops.gated_activation(X[None], up[None], name)
    expected = [CLOSED_FORMS[name](float(x)) * float(u) for x, u in zip(X, up, strict=True)]
    np.testing.assert_allclose(got[0], expected, rtol=1e-5, atol=1e-6)


def test_a_function_is_an_activation():
    assert ops.activation(jnp.sin) is jnp.sin
    np.testing.assert_allclose(ops.gated_activation(X, X, jnp.sin), jnp.sin(X) * X)


def test_gated_gradients_match_finite_differences():
    gate, up = X[::5], jnp.cos(X[::5])
    check_grads(ops.gated_activation, (gate, up), order=1, modes=["rev"], rtol=1e-2, atol=1e-2)


def test_gated_keeps_the_dtype():
    x = jnp.ones((2, 3, 4), jnp.bfloat16)
    assert jax.eval_shape(ops.gated_activation, x, x).dtype == jnp.bfloat16


def test_an_unknown_name_gets_near_misses():
    with pytest.raises(OpError, match=r"no activation named 'gelutanh'.*\n.*'gelu_tanh'"):
        ops.activation("gelutanh")


def test_unequal_gates_are_refused():
    with pytest.raises(OpError, match=r"gate float32\(2,\) and up float32\(3,\)"):
        ops.gated_activation(jnp.ones(2), jnp.ones(3))
