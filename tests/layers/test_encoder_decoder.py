"""The encoder-decoder: what it computes in one go, and step by step from its caches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axcore import functional
from axcore.collection import apply_state_updates
from axcore.layers import (
    ALiBi,
    Attention,
    CrossAttention,
    CrossTransformerLayer,
    Decoder,
    Encoder,
    EncoderDecoder,
    RepeatedTransformer,
    StackedTransformer,
    init_cache,
    merge_state,
)

ROWS, SOURCE, PROMPT, LENGTH = 3, 5, 4, 6


def make(kind, toy_cache=None):
    layer = CrossTransformerLayer.Config(
        attention=Attention.Config(num_heads=2), cross_attention=CrossAttention.Config(num_heads=2)
    )
    if kind == "a-toy-cache":
        layer.attention.set(kv_cache=toy_cache, bias=ALiBi.Config())
        layer.cross_attention.set(kv_cache=toy_cache, num_kv_heads=1)
    stack = StackedTransformer if kind == "unrolled" else RepeatedTransformer
    encoder = Encoder.Config(num_layers=1, stack=stack.Config())
    encoder.layer.attention.num_heads = 2
    return EncoderDecoder.Config(
        vocab_size=30,
        model_dim=8,
        max_seq_len=LENGTH,
        encoder=encoder,
        decoder=Decoder.Config(num_layers=2, layer=layer, stack=stack.Config()),
    )


@pytest.fixture(scope="module")
def model(toy_cache):
    """Makes each kind of model once."""
    return functools.cache(lambda kind: programs(kind, toy_cache))


def programs(kind, toy_cache):
    """Returns the empty state, and the compiled methods by name."""
    module = make(kind, toy_cache).instantiate(name="m")
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: rng.normal(0, 0.3, spec.shape).astype(np.float32), module.parameter_specs()
    )

    def compiled(method):
        @jax.jit
        def run(state, **inputs):
            out, col = functional(
                module, state=state, inputs=inputs, is_training=False, method=method
            )
            return out, apply_state_updates(state, col)

        return run

    cache = init_cache(module, ROWS, LENGTH, memory_len=SOURCE)
    names = ("logits", "encode", "prefill", "decode")
    return merge_state(params, cache), {n: compiled(n) for n in names}


@pytest.mark.parametrize(
    "kind", ["scanned", pytest.param("unrolled", marks=pytest.mark.slow), "a-toy-cache"]
)
@given(
    lengths=st.tuples(*[st.integers(1, PROMPT)] * ROWS),
    sources=st.tuples(*[st.integers(1, SOURCE)] * ROWS),
    left=st.booleans(),
)
@settings(max_examples=4, deadline=None)
def test_decoding_from_the_caches_equals_the_full_forward(model, kind, lengths, sources, left):
    """For any split of the target, and sources padded on either side."""
    state, methods = model(kind)
    lengths, slots = np.array(lengths), np.arange(SOURCE)
    rng = np.random.default_rng(1)
    source = rng.integers(0, 30, (ROWS, SOURCE)).astype(np.int32)
    ids = rng.integers(0, 30, (ROWS, LENGTH)).astype(np.int32)
    order = slots[::-1] if left else slots
    padding = (order[None] < np.array(sources)[:, None]).astype(np.int32)
    inputs = dict(source_ids=source, source_segment_ids=padding)
    expected, _ = methods["logits"](state, input_ids=ids, **inputs)
    expected = np.asarray(expected)
    memory, _ = methods["encode"](state, **inputs)
    rows, slots = np.arange(ROWS), np.arange(PROMPT)[None]
    positions = np.where(slots < lengths[:, None], slots, -1).astype(np.int32)
    logits, state = methods["prefill"](
        state,
        input_ids=ids[:, :PROMPT],
        positions=positions,
        memory=memory,
        memory_segment_ids=padding,
    )
    np.testing.assert_allclose(logits, expected[rows, lengths - 1], rtol=1e-4, atol=1e-5)
    for step in range(LENGTH - PROMPT):
        at = (lengths + step)[:, None].astype(np.int32)
        logits, state = methods["decode"](state, input_ids=ids[rows[:, None], at], positions=at)
        np.testing.assert_allclose(logits, expected[rows, at[:, 0]], rtol=1e-4, atol=1e-5)


def test_padding_of_the_source_changes_nothing(model):
    state, methods = model("scanned")
    source = np.arange(10, dtype=np.int32).reshape(2, 5)[:, :3]
    ids = np.array([[3, 1, 4], [1, 5, 9]], np.int32)
    alone, _ = methods["logits"](state, source_ids=source, input_ids=ids)
    padded = np.concatenate([source, np.full((2, 2), 7, np.int32)], axis=1)
    segments = np.array([[1, 1, 1, 0, 0]] * 2, np.int32)
    got, _ = methods["logits"](state, source_ids=padded, input_ids=ids, source_segment_ids=segments)
    np.testing.assert_allclose(got, alone, rtol=1e-4, atol=1e-5)


def test_packed_pairs_do_not_see_each_other(model):
    state, methods = model("scanned")
    source = np.array([[4, 8, 2, 9, 5]], np.int32)
    ids = np.array([[3, 1, 4, 1]], np.int32)
    packed, _ = methods["logits"](
        state,
        source_ids=source,
        input_ids=ids,
        source_segment_ids=np.array([[1, 1, 2, 2, 2]], np.int32),
        segment_ids=np.array([[1, 2, 2, 2]], np.int32),
        source_positions=np.array([[0, 1, 0, 1, 2]], np.int32),
        positions=np.array([[0, 0, 1, 2]], np.int32),
    )
    second, _ = methods["logits"](state, source_ids=source[:, 2:], input_ids=ids[:, 1:])
    np.testing.assert_allclose(packed[:, 1:], second, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_cross_entropy_of_the_logits(model):
    state, methods = model("scanned")
    module = make("scanned").set(z_loss_weight=0.1).instantiate(name="m")
    rng = np.random.default_rng(2)
    inputs = {n: rng.integers(0, 30, (2, 4)).astype(np.int32) for n in ("source_ids", "input_ids")}
    targets = rng.integers(0, 30, (2, 4)).astype(np.int32)
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0]], bool)
    logits, _ = methods["logits"](state, **inputs)
    log_z = jax.nn.logsumexp(logits, -1)
    nll = log_z - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]

    @jax.jit
    def losses(state):
        batch = dict(**inputs, target_ids=targets, target_mask=mask)
        return functional(module, state=state, inputs=batch, is_training=False)[1]

    found = losses(state).losses
    np.testing.assert_allclose(found["cross_entropy"].result(), (nll * mask).sum() / 4, rtol=1e-5)
    np.testing.assert_allclose(found["z_loss"].result(), (log_z**2 * mask).sum() / 4, rtol=1e-5)
