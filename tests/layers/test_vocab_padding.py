"""A padded vocabulary changes the shapes of parameters and nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.errors import ModuleError
from axcore.layers import Embedding, LMHead

VOCAB, DIM, MULTIPLE = 13, 6, 8
HEADS = {
    "tied": Embedding.Config(vocab_size=VOCAB, input_dim=DIM, head_bias=True, logit_cap=3.0),
    "untied": LMHead.Config(vocab_size=VOCAB, input_dim=DIM, bias=True),
}


def built(head, multiple):
    layer = HEADS[head].copy().set(vocab_multiple_of=multiple).instantiate(name="head")
    state = layer.initialize(jax.random.key(0))
    # A bias that is not zero, in the entries that are no padding.
    name = "head_bias" if head == "tied" else "bias"
    state[name] = state[name].at[:VOCAB].set(jnp.linspace(-1.0, 1.0, VOCAB))
    return layer, state


def call(layer, state, method, *inputs):
    return functional(layer, state=state, inputs=inputs, is_training=True, method=method)[0]


@pytest.mark.parametrize("head", HEADS)
def test_logits_loss_and_gradients_are_those_of_the_plain_head(head):
    hidden = jax.random.normal(jax.random.key(1), (2, 3, DIM))
    targets = jnp.array([[0, 5, 12], [12, 3, 1]])
    found = {}
    for multiple in (1, MULTIPLE):
        layer, state = built(head, multiple)

        def loss(state, hidden, layer=layer):
            out = call(layer, state, "cross_entropy", hidden, targets)
            return jnp.sum(out.loss + 0.1 * out.z_loss)

        logits = call(layer, state, "logits", hidden)
        value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(state, hidden)
        found[multiple] = (logits, value, grads)
    (logits, value, (of_state, of_hidden)) = found[MULTIPLE]
    plain_logits, plain_value, (plain_of_state, plain_of_hidden) = found[1]
    assert logits.shape == plain_logits.shape == (2, 3, VOCAB)
    # float32: a matmul of another width rounds otherwise.
    close = {"rtol": 1e-6, "atol": 1e-6}
    np.testing.assert_allclose(logits, plain_logits, **close)
    np.testing.assert_allclose(value, plain_value, **close)
    np.testing.assert_allclose(of_hidden, plain_of_hidden, **close)
    for name, grad in of_state.items():
        dim = grad.shape.index(16)
        real, padding = np.split(np.asarray(grad), [VOCAB], axis=dim)
        np.testing.assert_allclose(real, plain_of_state[name], **close)
        assert not padding.any()


@pytest.mark.parametrize("head", HEADS)
def test_the_first_weights_are_those_of_the_plain_head_then_zeros(head):
    plain, state = (built(head, multiple)[1]["weight"] for multiple in (1, MULTIPLE))
    dim = 0 if head == "tied" else 1
    real, padding = np.split(np.asarray(state), [VOCAB], axis=dim)
    np.testing.assert_array_equal(real, plain)
    assert padding.shape[dim] == 3 and not padding.any()


def test_an_unknown_id_does_not_find_the_padding():
    ids = jnp.array([[0, 12, 13, 15, 16, -1, -14]])
    rows = []
    for multiple in (1, MULTIPLE):
        layer, state = built("tied", multiple)
        rows.append(call(layer, state, "forward", ids))
    np.testing.assert_array_equal(rows[0], rows[1])
    assert np.isnan(rows[1][0, 2:5]).all()


def test_specs_tell_what_is_padding():
    spec = HEADS["tied"].copy().set(vocab_multiple_of=MULTIPLE).instantiate(name="h")
    weight = spec.parameter_specs()["weight"]
    assert (weight.shape, weight.valid_shape) == ((16, DIM), (VOCAB, DIM))
    stacked = weight.stacked(2)
    assert (stacked.shape, stacked.valid_shape) == ((2, 16, DIM), (2, VOCAB, DIM))


def test_a_multiple_below_one_is_refused():
    with pytest.raises(ModuleError, match="vocab_multiple_of is 0, expected at least 1"):
        HEADS["tied"].copy().set(vocab_multiple_of=0).instantiate(name="h")
