"""Linear cross-entropy against float64 numpy, optax and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import axcore.ops._linear_cross_entropy._xla as xla
from axcore import ops
from axcore.errors import OpError
from axcore.testing import equations

D, V = 6, 11


def inputs(*lead, d=D, v=V, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    hidden = 2 * jax.random.normal(keys[0], (*lead, d))
    weight = jax.random.normal(keys[1], (v, d))
    targets = jax.random.randint(keys[2], lead, 0, v)
    return hidden.astype(dtype), weight.astype(dtype), targets


def oracle(hidden, weight, targets, *, cap=None, smoothing=0.0, valid=None):
    """(loss, log_z ** 2, correct) in float64."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(weight, np.float64).T
    if cap is not None:
        logits = cap * np.tanh(logits / cap)
    logits = logits[..., :valid]
    log_z = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]
    loss = log_z - (1 - smoothing) * picked - smoothing * logits.mean(-1)
    return loss, log_z**2, picked >= logits.max(-1)


def run(hidden, weight, targets, mask=None, **static):
    fn = jax.jit(lambda h, w, t, m: ops.linear_cross_entropy(h, w, t, m, **static))
    return fn(hidden, weight, targets, mask)


def check(got, expected, rtol=1e-5):
    np.testing.assert_allclose(got.loss, expected[0], rtol=rtol, atol=rtol)
    np.testing.assert_allclose(got.z_loss, expected[1], rtol=rtol, atol=rtol)
    np.testing.assert_array_equal(got.correct, expected[2])


@given(
    lead=st.lists(st.integers(1, 7), min_size=1, max_size=2),
    v=st.integers(1, 13),
    chunk_tokens=st.none() | st.integers(1, 9),
    layout=st.sampled_from(["vd", "dv"]),
)
@settings(max_examples=6)
def test_any_shape_and_chunk(lead, v, chunk_tokens, layout):
    hidden, weight, targets = inputs(*lead, v=v)
    stored = weight if layout == "vd" else weight.T
    got = run(hidden, stored, targets, layout=layout, chunk_tokens=chunk_tokens)
    check(got, oracle(hidden, weight, targets), rtol=2e-5)


@pytest.mark.parametrize("chunk_tokens", [None, 4])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"logit_cap": 3.0}, {"cap": 3.0}),
        ({"label_smoothing": 0.1}, {"smoothing": 0.1}),
        ({"valid_vocab_size": 9}, {"valid": 9}),
        (
            {"valid_vocab_size": 9, "label_smoothing": 0.2, "logit_cap": 5.0},
            {"valid": 9, "smoothing": 0.2, "cap": 5.0},
        ),
    ],
)
def test_options(ours, theirs, chunk_tokens):
    hidden, weight, targets = inputs(2, 7)
    targets = targets % 9
    got = run(hidden, weight, targets, chunk_tokens=chunk_tokens, **ours)
    check(got, oracle(hidden, weight, targets, **theirs))


@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_gradients_match_finite_differences(chunk_tokens):
    hidden, weight, targets = inputs(7)

    @jax.jit
    def losses(hidden, weight):
        out = ops.linear_cross_entropy(
            hidden,
            weight,
            targets % 9,
            chunk_tokens=chunk_tokens,
            logit_cap=4.0,
            label_smoothing=0.1,
            valid_vocab_size=9,
        )
        return out.loss, out.z_loss

    check_grads(losses, (hidden, weight), order=1, modes=["rev"], rtol=2e-2, atol=2e-2)


@pytest.mark.oracle
@pytest.mark.parametrize("layout", ["vd", "dv"])
@pytest.mark.parametrize("chunk_tokens", [None, 5])
def test_values_and_gradients_match_optax(layout, chunk_tokens):
    hidden, weight, targets = inputs(2, 8)
    weight = weight if layout == "vd" else weight.T
    per_token = jnp.cos(jnp.arange(16.0)).reshape(2, 8)

    def ours(hidden, weight):
        out = ops.linear_cross_entropy(
            hidden, weight, targets, layout=layout, chunk_tokens=chunk_tokens
        )
        return jnp.sum(per_token * (out.loss + 1e-2 * out.z_loss))

    def theirs(hidden, weight):
        logits = hidden @ (weight.T if layout == "vd" else weight)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(per_token * (loss + 1e-2 * jax.nn.logsumexp(logits, -1) ** 2))

    got = jax.jit(jax.value_and_grad(ours, (0, 1)))(hidden, weight)
    expected = jax.jit(jax.value_and_grad(theirs, (0, 1)))(hidden, weight)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


@pytest.mark.parametrize("chunk_tokens", [None, 3])
@pytest.mark.parametrize("kind", ["bool", "float32", "negative target"])
def test_masked_tokens_give_zero_and_no_gradient(kind, chunk_tokens):
    hidden, weight, targets = inputs(8)
    keep = jnp.arange(8) % 3 != 0
    mask = None if kind == "negative target" else keep.astype(kind)
    targets = targets if mask is not None else jnp.where(keep, targets, -1)

    def loss(hidden):
        out = ops.linear_cross_entropy(hidden, weight, targets, mask, chunk_tokens=chunk_tokens)
        return jnp.sum(out.loss + out.z_loss), out

    (_, out), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(hidden)
    for x in (*out, grad):
        np.testing.assert_array_equal(np.asarray(x)[~np.asarray(keep)], 0)
    expected = oracle(hidden, weight, jnp.maximum(targets, 0))
    np.testing.assert_allclose(out.loss[keep], expected[0][keep], rtol=1e-5)


@pytest.mark.parametrize(("valid", "unknown"), [(None, V), (9, 9), (9, V + 3)])
def test_a_target_past_the_vocabulary_has_no_loss(valid, unknown):
    hidden, weight, targets = inputs(6)
    targets = (targets % 9).at[1:3].set(unknown)
    mask = jnp.arange(6) != 2
    out = run(hidden, weight, targets, mask, valid_vocab_size=valid, chunk_tokens=4)
    np.testing.assert_array_equal(jnp.isnan(out.loss), jnp.arange(6) == 1)
    assert not out.correct[1:3].any()


def test_weight_gradients_are_summed_over_chunks_in_float32():
    tokens = 2048
    hidden = jnp.ones((tokens, 2), jnp.bfloat16)
    weight = jnp.zeros((4, 2), jnp.bfloat16)
    targets = jnp.zeros(tokens, jnp.int32)

    def loss(weight):
        out = ops.linear_cross_entropy(hidden, weight, targets, chunk_tokens=1)
        return jnp.sum(out.loss)

    grad = jax.jit(jax.grad(loss))(weight)
    assert grad.dtype == jnp.bfloat16
    # 2048 steps of 0.25: a bfloat16 running sum would stop at 64.
    np.testing.assert_array_equal(grad[1:], tokens / 4)


def test_losses_are_float32():
    out = jax.eval_shape(ops.linear_cross_entropy, *inputs(4, dtype=jnp.bfloat16))
    assert (out.loss.dtype, out.z_loss.dtype, out.correct.dtype) == ("float32", "float32", "bool")


def test_large_logits_stay_finite():
    hidden, weight, targets = inputs(4)
    out = run(1e3 * hidden, weight, targets)
    assert jnp.isfinite(out.loss).all()


def test_is_deterministic():
    hidden, weight, targets = inputs(32)

    @jax.jit
    def step(hidden, weight):
        loss = lambda *x: jnp.sum(ops.linear_cross_entropy(*x, targets, chunk_tokens=8).loss)  # noqa: E731
        return jax.grad(loss, (0, 1))(hidden, weight)

    jax.tree.map(np.testing.assert_array_equal, step(hidden, weight), step(hidden, weight))


def test_the_product_can_be_replaced():
    hidden, weight, targets = inputs(2, 6)

    def doubled(lhs, rhs, dims, preferred_element_type=None):
        return 2 * jax.lax.dot_general(
            lhs, rhs, dims, preferred_element_type=preferred_element_type
        )

    for chunk_tokens in (None, 5):
        got = run(hidden, weight, targets, dot_general=doubled, chunk_tokens=chunk_tokens)
        check(got, oracle(2 * hidden, weight, targets))


@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_full_logits_never_exist(layout):
    tokens, v, d = 8192, 8192, 8
    assert tokens * v > xla.CHUNK_LOGITS
    weight_shape = (v, d) if layout == "vd" else (d, v)
    args = (
        jax.ShapeDtypeStruct((4, tokens // 4, d), jnp.float32),
        jax.ShapeDtypeStruct(weight_shape, jnp.float32),
        jax.ShapeDtypeStruct((4, tokens // 4), jnp.int32),
    )

    def loss(hidden, weight, targets):
        out = ops.linear_cross_entropy(hidden, weight, targets, layout=layout)
        return jnp.sum(out.loss + out.z_loss)

    step = jax.grad(loss, (0, 1))
    sizes = [v.aval.size for e in equations(jax.make_jaxpr(step)(*args)) for v in e.outvars]
    assert max(sizes) <= xla.CHUNK_LOGITS
    memory = jax.jit(step).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * tokens * v


def test_a_chunk_of_a_large_vocabulary_has_tokens_enough_for_a_product():
    """2**24 logits would be 64 tokens; each chunk reads the whole weight."""
    args = (
        jax.ShapeDtypeStruct((2048, 4), jnp.float32),
        jax.ShapeDtypeStruct((2**18, 4), jnp.float32),
        jax.ShapeDtypeStruct((2048,), jnp.int32),
    )
    jaxpr = jax.make_jaxpr(ops.linear_cross_entropy)(*args).jaxpr
    (scan,) = (e for e in equations(jaxpr) if e.primitive.name == "scan")
    assert scan.params["length"] == 2048 // xla.CHUNK_TOKENS == 4


def test_one_recompute_at_most():
    """Backward of a chunked loss: logits, again, and two products for the gradients."""
    hidden, weight, targets = inputs(64, d=32, v=64)

    def dots(chunk_tokens):
        def loss(hidden, weight):
            out = ops.linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
            return jnp.sum(out.loss)

        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, weight)
        return sum(e.primitive.name == "dot_general" for e in equations(jaxpr))

    assert dots(None) == 3
    assert dots(16) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layout": "dv"}, "is the layout right"),
        ({"layout": "x"}, "layout is 'x', expected 'vd' or 'dv'"),
        ({"targets": jnp.zeros((3,), jnp.int32)}, r"targets \(3,\)"),
        ({"mask": jnp.zeros((3,), bool)}, r"mask \(3,\)"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"valid_vocab_size": 12}, "valid_vocab_size is 12, expected 1 to 11"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    hidden, weight, targets = inputs(4)
    kwargs = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(OpError, match=message):
        ops.linear_cross_entropy(**kwargs)
