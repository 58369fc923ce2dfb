"""Biases by distance against the papers' numbers and plain formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.errors import ModuleError
from axcore.layers import (
    ALiBi,
    Attention,
    Decoder,
    Encoder,
    RelativePositionBias,
    RelativePositionTable,
    RepeatedTransformer,
    SequenceInfo,
    StackedTransformer,
    TransformerLayer,
)
from axcore.layers.attention_bias import alibi_slopes, relative_position_buckets
from axcore.ops import Full
from axcore.testing import LayerConformance

KEY = jax.random.key(0)


def run(module, state, *inputs):
    return jax.jit(lambda s: functional(module, state=s, inputs=inputs, is_training=False)[0])(
        state
    )


def info(batch=2, seq=6):
    return SequenceInfo(jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq)))


def test_alibi_slopes_are_those_of_the_paper():
    # arXiv:2108.12409, section 3: for 8 heads 1/2, 1/4, ..., 1/256; for 16 with roots between.
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    np.testing.assert_allclose(alibi_slopes(16), [2.0 ** (-i / 2) for i in range(1, 17)])
    # Its code for other numbers: the 8 of the next smaller power, then 1st, 3rd, ... of 16.
    assert alibi_slopes(10)[:8] == alibi_slopes(8)
    np.testing.assert_allclose(alibi_slopes(10)[8:], [2.0**-0.5, 2.0**-1.5])
    assert alibi_slopes(1) == (2.0**-8,)


def test_small_distances_have_buckets_of_their_own_and_far_ones_share():
    one_way = relative_position_buckets(8, 16, bidirectional=False)
    # Keys 0, 1, 2, 3 before the query; then ranges 4-5, 6-7, 8-11, 12-; later keys share bucket 0.
    # Bounds 4 * 4^(k/4): 5.66, 8, 11.3.
    expected = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7]
    assert one_way[16::-1].tolist() == expected
    assert not one_way[17:].any()
    both = relative_position_buckets(8, 16, bidirectional=True)
    assert both[16] == 0
    np.testing.assert_array_equal(both[17:], both[15::-1] + 4)


def attention_oracle(state, x, bias, seen, num_heads):
    """Attention of float64 numpy with an additive (N, T, T) bias."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), state)
    x = np.asarray(x, np.float64)
    q, k, v = (
        np.einsum("btd,dnh->bnth", x, p["qkv"][n]["weight"]) + p["qkv"][n]["bias"][None, :, None]
        for n in ("query", "key", "value")
    )
    logits = q @ k.swapaxes(-1, -2) / np.sqrt(x.shape[-1] // num_heads) + bias
    weights = np.where(seen, np.exp(logits), 0)
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bnth,nhd->btd", weights @ v, p["output"]["weight"]) + p["output"]["bias"]


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_adds_minus_slope_times_distance(causal):
    cfg = Attention.Config(input_dim=8, num_heads=4, bias=ALiBi.Config())
    layer = (cfg if causal else cfg.set(mask=Full())).instantiate(name="m")
    state = layer.initialize(KEY)
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    got = run(layer, state, x, info())
    i, j = np.arange(6)[:, None], np.arange(6)[None]
    bias = -np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * np.abs(i - j)
    expected = attention_oracle(state, x, bias, j <= i if causal else True, 4)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_relative_bias_is_looked_up_by_bucket():
    bias_cfg = RelativePositionBias.Config(num_buckets=6, max_distance=5, bidirectional=True)
    layer = Attention.Config(input_dim=8, num_heads=2, bias=bias_cfg, mask=Full()).instantiate(
        name="m"
    )
    state = layer.initialize(KEY)
    state["bias"]["weight"] = jax.random.normal(KEY, (6, 2))
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))
    got = run(layer, state, x, info())
    # Three buckets a direction: 0, then 1 for 1 (and 2: 1 * 5^(1/2) = 2.2), and 2 from 3 on.
    bucket = {0: 0, 1: 1, 2: 1, 3: 2, 4: 2, 5: 2}
    table = np.asarray(state["bias"]["weight"], np.float64)
    bias = np.zeros((2, 6, 6))
    for i in range(6):
        for j in range(6):
            bias[:, i, j] = table[bucket[abs(i - j)] + (3 if j > i else 0)]
    expected = attention_oracle(state, x, bias, True, 2)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stack", [StackedTransformer, RepeatedTransformer])
def test_layers_can_share_one_table(stack):
    """The shared table equals the same table in each layer, and gets the sum of its gradients."""

    def make(table):
        bias = RelativePositionBias.Config(num_buckets=4, max_distance=6, table=table)
        return Decoder.Config(
            input_dim=8,
            num_layers=2,
            layer=TransformerLayer.Config(attention=Attention.Config(num_heads=2, bias=bias)),
            stack=stack.Config(),
            shared=RelativePositionTable.Config(num_heads=2, num_buckets=4) if table else None,
        ).instantiate(name="m")

    shared, own = make("relative_position"), make(None)
    x = jax.random.normal(jax.random.key(1), (2, 6, 8))

    def loss(module, state):
        out, _ = functional(module, state=state, inputs=(x, info()), is_training=True)
        return jnp.sum(jnp.cos(out))

    state = shared.initialize(KEY)
    state["shared"]["weight"] = jax.random.normal(KEY, (4, 2))
    own_state = own.initialize(KEY)
    layers = own_state["layer"]
    for layer in layers.values():
        shape = layer["attention"]["bias"]["weight"].shape
        layer["attention"]["bias"]["weight"] = jnp.broadcast_to(state["shared"]["weight"], shape)
    value, grads = jax.jit(jax.value_and_grad(lambda s: loss(shared, s)))(state)
    own_value, own_grads = jax.jit(jax.value_and_grad(lambda s: loss(own, s)))(own_state)
    np.testing.assert_allclose(value, own_value, rtol=1e-6)
    each = [g["attention"]["bias"]["weight"].reshape(-1, 4, 2) for g in own_grads["layer"].values()]
    np.testing.assert_allclose(
        grads["shared"]["weight"], jnp.concatenate(each).sum(0), rtol=1e-4, atol=1e-6
    )


def test_what_does_not_fit_is_refused():
    with pytest.raises(ModuleError, match="2 slopes for 4 heads"):
        ALiBi.Config(num_heads=4, slopes=(1.0, 0.5)).instantiate(name="m")
    with pytest.raises(ModuleError, match="max_distance above 8"):
        RelativePositionBias.Config(num_heads=4, num_buckets=16, max_distance=8).instantiate(
            name="m"
        )
    layer = TransformerLayer.Config(
        attention=Attention.Config(
            num_heads=2, mask=Full(), bias=RelativePositionBias.Config(table="relative_position")
        )
    )
    module = Encoder.Config(input_dim=8, num_layers=1, layer=layer).instantiate(name="m")
    with pytest.raises(ModuleError, match=r"shared table 'relative_position' of shape \(32, 2\)"):
        functional(
            module,
            state=module.initialize(KEY),
            inputs=(jnp.ones((2, 6, 8)), info()),
            is_training=False,
        )


class TestAttentionWithEverything(LayerConformance):
    """A learned bias, sinks, a cap and grouped heads, in a scan and out of it."""

    def config(self):
        return Attention.Config(
            input_dim=8,
            num_heads=4,
            num_kv_heads=2,
            sinks=True,
            logit_cap=5.0,
            bias=RelativePositionBias.Config(num_buckets=4, max_distance=4),
        )

    def inputs(self, key):
        ids = jnp.array([[1, 1, 1, 2, 2, 0]] * 2)
        return jax.random.normal(key, (2, 6, 8)), dataclasses.replace(info(), segment_ids=ids)
