"""Forms of the transformer layer and what attention takes, against plain formulas."""

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
    CrossAttention,
    CrossTransformerLayer,
    Embedding,
    FeedForward,
    FusedQKV,
    LayerNorm,
    LMHead,
    Normal,
    ParallelTransformerLayer,
    PostNormTransformerLayer,
    QKNorm,
    QueryKeyChain,
    RelativePositionBias,
    RMSNorm,
    SequenceInfo,
    TransformerLayer,
    VarianceScaling,
)
from axcore.ops import Full, PrefixLM, TracedWindow
from axcore.testing import LayerConformance

KEY = jax.random.key(0)
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]])


def info(batch=2, seq=6, **fields):
    positions = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32), (batch, seq))
    return SequenceInfo(positions, **fields)


def random_state(module, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda spec: rng.normal(0, 0.5, spec.shape).astype(np.float32), module.parameter_specs()
    )


def call(module, state, *inputs):
    run = jax.jit(lambda s: functional(module, state=s, inputs=inputs, is_training=False)[0])
    return np.asarray(run(state))


X = jax.random.normal(jax.random.key(1), (2, 6, 8))
ATTENTION = Attention.Config(num_heads=2)


def test_each_form_of_layer_is_its_formula():
    sandwich = TransformerLayer.Config(
        input_dim=8,
        attention=ATTENTION,
        attention_out_norm=RMSNorm.Config(),
        feed_forward_norm=None,
        feed_forward_out_norm=RMSNorm.Config(),
    ).instantiate(name="m")
    state = random_state(sandwich)
    f = {n: call_of(c, state[n]) for n, c in sandwich.children.items() if n in state}
    h = X + f["attention_out_norm"](f["attention"](f["attention_norm"](X)))
    y = h + f["feed_forward_out_norm"](f["feed_forward"](h))
    np.testing.assert_allclose(call(sandwich, state, X, info()), y, rtol=1e-5, atol=1e-5)

    post = PostNormTransformerLayer.Config(input_dim=8, attention=ATTENTION).instantiate(name="m")
    state = random_state(post)
    f = {n: call_of(c, state[n]) for n, c in post.children.items() if n in state}
    h = f["attention_norm"](X + f["attention"](X))
    y = f["feed_forward_norm"](h + f["feed_forward"](h))
    np.testing.assert_allclose(call(post, state, X, info()), y, rtol=1e-5, atol=1e-5)

    for norm in (None, LayerNorm.Config()):
        parallel = ParallelTransformerLayer.Config(
            input_dim=8, attention=ATTENTION, feed_forward_norm=norm
        ).instantiate(name="m")
        state = random_state(parallel)
        f = {n: call_of(c, state[n]) for n, c in parallel.children.items() if n in state}
        normed = f["attention_norm"](X)
        other = normed if norm is None else f["feed_forward_norm"](X)
        y = X + f["attention"](normed) + f["feed_forward"](other)
        np.testing.assert_allclose(call(parallel, state, X, info()), y, rtol=1e-5, atol=1e-5)


def call_of(child, state):
    extra = () if "norm" in child.name else (info(),)
    return lambda x: call(child, state, x, *extra)


def test_a_unit_offset_stores_the_scale_less_one():
    norm = RMSNorm.Config(input_dim=8, unit_offset=True, eps=0.0).instantiate(name="m")
    state = norm.initialize(KEY)
    np.testing.assert_array_equal(state["scale"], 0.0)
    x = np.asarray(X, np.float64)
    unit = x / np.sqrt(np.mean(x**2, -1, keepdims=True))
    np.testing.assert_allclose(call(norm, state, X), unit, rtol=1e-5)
    state["scale"] = jnp.linspace(-1, 1, 8)
    np.testing.assert_allclose(
        call(norm, state, X), unit * np.linspace(0, 2, 8), rtol=1e-5, atol=1e-7
    )


def test_a_fused_projection_equals_separate_ones():
    dims = dict(input_dim=8, num_heads=4, num_kv_heads=2)
    fused = Attention.Config(**dims, qkv=FusedQKV.Config()).instantiate(name="m")
    separate = Attention.Config(**dims).instantiate(name="m")
    state = random_state(fused)
    weight, bias = state["qkv"]["projection"]["weight"], state["qkv"]["projection"]["bias"]
    assert weight.shape == (8, 2, 2 + 2, 2)
    parts = {"query": slice(0, 2), "key": slice(2, 3), "value": slice(3, 4)}
    qkv = {
        name: {"weight": weight[:, :, at].reshape(8, -1, 2), "bias": bias[:, at].reshape(-1, 2)}
        for name, at in parts.items()
    }
    expected = call(separate, {**state, "qkv": qkv}, X, info())
    np.testing.assert_allclose(call(fused, state, X, info()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("over", ["head_dim", "heads"])
def test_query_key_norm_normalizes_what_it_says(over):
    norm = QKNorm.Config(num_heads=4, num_kv_heads=2, head_dim=3, over=over).instantiate(name="m")
    state = random_state(norm)
    rng = np.random.default_rng(1)
    q, k = (rng.normal(size=(2, 5, n, 3)).astype(np.float32) for n in (4, 2))
    run = jax.jit(
        lambda s: functional(norm, state=s, inputs=(q, k, info(seq=5)), is_training=False)[0]
    )
    for got, x, name in zip(run(state), (q, k), ("query_norm", "key_norm"), strict=True):
        scale = state[name]["scale"]
        axes = -1 if over == "head_dim" else (-2, -1)
        scale = scale if over == "head_dim" else scale.reshape(x.shape[-2:])
        expected = x / np.sqrt(np.mean(x**2, axes, keepdims=True) + 1e-6) * scale
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)


def cross_oracle(state, x, memory, seen):
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), state)
    project = {
        n: np.einsum("btd,dnh->bnth", np.asarray(a, np.float64), p[n]["weight"])
        + p[n]["bias"][None, :, None]
        for n, a in (("query", x), ("key", memory), ("value", memory))
    }
    logits = project["query"] @ project["key"].swapaxes(-1, -2) / np.sqrt(4)
    weights = np.where(seen[:, None], np.exp(logits), 0.0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = np.einsum("bnth,nhd->btd", weights @ project["value"], p["output"]["weight"])
    return out + p["output"]["bias"]


def test_cross_attention_reads_the_memory_of_its_own_segment():
    layer = CrossAttention.Config(input_dim=8, memory_dim=5, num_heads=2).instantiate(name="m")
    state = random_state(layer)
    memory = jax.random.normal(KEY, (2, 4, 5))
    ids = jnp.array([[1, 1, 2, 0], [1, 0, 0, 0]])
    whole = call(layer, state, X, info(memory=memory))
    np.testing.assert_allclose(
        whole, cross_oracle(state, X, memory, np.ones((2, 6, 4), bool)), rtol=1e-4, atol=1e-5
    )
    padded = call(layer, state, X, info(memory=memory, memory_segment_ids=ids))
    seen = np.broadcast_to(np.asarray(ids != 0)[:, None], (2, 6, 4))
    np.testing.assert_allclose(padded, cross_oracle(state, X, memory, seen), rtol=1e-4, atol=1e-5)
    packed = info(memory=memory, memory_segment_ids=ids, segment_ids=SEGMENTS)
    seen = (SEGMENTS[:, :, None] == ids[:, None]) & (SEGMENTS[:, :, None] != 0)
    np.testing.assert_allclose(
        call(layer, state, X, packed),
        cross_oracle(state, X, memory, np.asarray(seen)),
        rtol=1e-4,
        atol=1e-5,
    )


def test_what_attention_lacks_is_said():
    x = jnp.ones((1, 4, 8))
    for mask, needed in ((PrefixLM(), "prefix_lengths"), (TracedWindow(), "layer_values")):
        layer = Attention.Config(input_dim=8, num_heads=2, mask=mask).instantiate(name="m")
        with pytest.raises(ModuleError, match=f"AX350.*\n*.*{needed}"):
            call(layer, layer.initialize(KEY), x, info(1, 4))
    layer = CrossAttention.Config(input_dim=8, num_heads=2).instantiate(name="m")
    with pytest.raises(ModuleError, match="no memory to attend to"):
        call(layer, layer.initialize(KEY), x, info(1, 4))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Attention.Config(input_dim=8, num_heads=2, logit_cap=0.0), "logit_cap is 0.0"),
        (lambda: CrossAttention.Config(input_dim=8, num_heads=2, logit_cap=-1.0), "logit_cap is"),
        (lambda: Embedding.Config(input_dim=2, vocab_size=3, logit_cap=-2.0), "logit_cap is -2.0"),
        (lambda: LMHead.Config(input_dim=2, vocab_size=3, logit_cap=0.0), "logit_cap is 0.0"),
        (lambda: RMSNorm.Config(input_dim=2, eps=-1e-6), "eps is -1e-06"),
        (lambda: LayerNorm.Config(input_dim=2, eps=float("nan")), "eps is nan"),
        (lambda: Normal(stddev=-0.02), "stddev=-0.02"),
        (lambda: VarianceScaling(scale=-1.0), "scale=-1.0"),
    ],
)
def test_numbers_that_could_only_give_nan_are_refused(make, named):
    with pytest.raises(ModuleError, match=named):
        make().instantiate(name="m")


class TestSandwich(LayerConformance):
    """With sinks, a prefix, and a chain of two normalizations of a fused projection."""

    # Heavy to compile; test_cached_decode runs this form in a scan every day.
    test_stacked_equals_scanned = pytest.mark.slow(LayerConformance.test_stacked_equals_scanned)

    def config(self):
        norm = RMSNorm.Config(unit_offset=True)
        chain = QueryKeyChain.Config(transforms=(QKNorm.Config(over="heads"), QKNorm.Config()))
        return TransformerLayer.Config(
            input_dim=8,
            attention_norm=norm,
            attention=Attention.Config(
                num_heads=2,
                qkv=FusedQKV.Config(),
                query_key_transform=chain,
                sinks=True,
                mask=PrefixLM(),
            ),
            attention_out_norm=norm,
            feed_forward_norm=norm,
            feed_forward_out_norm=norm,
        )

    def inputs(self, key):
        lengths = jnp.array([2, 4])
        return jax.random.normal(key, (2, 6, 8)), info(segment_ids=SEGMENTS, prefix_lengths=lengths)


class TestPostNorm(LayerConformance):
    """An encoder's layer with linear biases; padding at the end of a row."""

    # Heavy to compile; test_cached_decode runs this form in a scan every day.
    test_stacked_equals_scanned = pytest.mark.slow(LayerConformance.test_stacked_equals_scanned)

    def config(self):
        attention = Attention.Config(num_heads=2, mask=Full(), bias=ALiBi.Config(), sinks=True)
        return PostNormTransformerLayer.Config(input_dim=8, attention=attention)

    def inputs(self, key):
        return jax.random.normal(key, (2, 6, 8)), info(segment_ids=SEGMENTS)


class TestParallel(LayerConformance):
    # Heavy to compile; test_cached_decode runs this form in a scan every day.
    test_stacked_equals_scanned = pytest.mark.slow(LayerConformance.test_stacked_equals_scanned)

    def config(self):
        return ParallelTransformerLayer.Config(
            input_dim=8,
            attention=Attention.Config(num_heads=2, num_kv_heads=1, sinks=True),
            feed_forward=FeedForward.Config(hidden_dim=8),
        )

    def inputs(self, key):
        return jax.random.normal(key, (2, 6, 8)), info(segment_ids=SEGMENTS)


class TestCross(LayerConformance):
    """A decoder's layer over a memory with padding, keys without bias."""

    # Heavy to compile; test_encoder_decoder runs this form in a scan every day.
    test_stacked_equals_scanned = pytest.mark.slow(LayerConformance.test_stacked_equals_scanned)

    def config(self):
        cfg = CrossTransformerLayer.Config(
            input_dim=8,
            attention=Attention.Config(num_heads=2, sinks=True),
            cross_attention=CrossAttention.Config(num_heads=2, memory_dim=5),
        )
        cfg.cross_attention.key.bias = False  # it moves all logits of a row alike: no gradient
        return cfg

    def inputs(self, key):
        memory = jax.random.normal(key, (2, 4, 5))
        ids = jnp.array([[1, 1, 2, 2], [1, 1, 1, 0]])
        more = dict(memory=memory, memory_segment_ids=ids, segment_ids=SEGMENTS)
        return jax.random.normal(key, (2, 6, 8)), dataclasses.replace(info(), **more)


class TestRelativeBias(LayerConformance):
    def config(self):
        return RelativePositionBias.Config(num_heads=2, num_buckets=4, max_distance=4)

    def inputs(self, key):
        del key
        return jnp.arange(6), jnp.arange(6), info()
