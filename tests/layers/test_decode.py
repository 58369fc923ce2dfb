"""Prefill and cached decode are methods of the modules that train, and agree with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.collection import apply_state_updates
from axcore.layers import (
    Attention,
    CausalLM,
    Decoder,
    RepeatedTransformer,
    StackedTransformer,
    TransformerLayer,
    init_cache,
    merge_state,
)

KEY = jax.random.key(0)


def make(stack=None, **attention):
    layer = TransformerLayer.Config(
        attention=Attention.Config(num_heads=4, num_kv_heads=2, **attention)
    )
    return CausalLM.Config(
        vocab_size=40,
        model_dim=16,
        max_seq_len=16,
        decoder=Decoder.Config(
            num_layers=2, layer=layer, stack=stack or RepeatedTransformer.Config()
        ),
    ).instantiate(name="m")


@functools.cache
def compiled(module, method):
    @jax.jit
    def run(state, ids, positions):
        logits, col = functional(
            module, state=state, inputs=(ids, positions), is_training=False, method=method
        )
        return logits, apply_state_updates(state, col)

    return run


def step(module, state, ids, positions, method):
    return compiled(module, method)(state, ids, jnp.asarray(positions))


@pytest.mark.parametrize("stack", [RepeatedTransformer.Config(), StackedTransformer.Config()])
def test_cached_decode_equals_the_full_forward(stack):
    module = make(stack)
    params = module.initialize(KEY)
    ids = jax.random.randint(jax.random.key(1), (3, 10), 0, 40)
    full, _ = functional(module, state=params, inputs=(ids,), is_training=False, method="logits")
    lengths = np.array([4, 2, 5])  # prompts of different lengths, padded on the right
    positions = np.where(np.arange(6)[None] < lengths[:, None], np.arange(6)[None], -1)
    state = merge_state(params, init_cache(module, 3, 16))
    logits, state = step(module, state, ids[:, :6], jnp.asarray(positions), "prefill")
    rows = np.arange(3)
    np.testing.assert_allclose(logits, full[rows, lengths - 1], rtol=1e-4, atol=1e-5)
    for i in range(4):
        at = lengths + i
        logits, state = step(module, state, ids[rows, at][:, None], at[:, None], "decode")
        np.testing.assert_allclose(logits, full[rows, at], rtol=1e-4, atol=1e-5)


def test_rollback_forgets_the_last_tokens():
    module = make(StackedTransformer.Config())
    params = module.initialize(KEY)
    ids = jax.random.randint(jax.random.key(1), (1, 8), 0, 40)
    state = merge_state(params, init_cache(module, 1, 16))
    _, state = step(module, state, ids[:, :4], jnp.arange(4)[None], "prefill")
    expected, _ = step(module, state, ids[:, 4:5], jnp.array([[4]]), "decode")
    wrong = jnp.array([[7, 9, 11]])
    _, state = step(module, state, wrong, jnp.array([[4, 5, 6]]), "decode")
    cache = module.decoder.layer.children["0"].attention.kv_cache

    def rolled(path_state):
        _, col = functional(
            cache, state=path_state, inputs=(jnp.array([4]),), is_training=False, method="rollback"
        )
        return apply_state_updates(path_state, col)

    for name in ("0", "1"):
        attention = state["decoder"]["layer"][name]["attention"]
        attention["kv_cache"] = rolled(attention["kv_cache"])
    again, _ = step(module, state, ids[:, 4:5], jnp.array([[4]]), "decode")
    np.testing.assert_allclose(again, expected, rtol=1e-5, atol=1e-6)


def test_several_tokens_at_once_equal_one_at_a_time():
    """What speculative decoding needs of the cache."""
    module = make()
    params = module.initialize(KEY)
    ids = jax.random.randint(jax.random.key(1), (2, 8), 0, 40)
    start = merge_state(params, init_cache(module, 2, 16))
    _, start = step(module, start, ids[:, :3], jnp.tile(jnp.arange(3), (2, 1)), "prefill")
    together, _ = step(module, start, ids[:, 3:6], jnp.tile(jnp.arange(3, 6), (2, 1)), "decode")
    state = start
    for i in range(3, 6):
        single, state = step(module, state, ids[:, i : i + 1], jnp.full((2, 1), i), "decode")
    np.testing.assert_allclose(together, single, rtol=1e-4, atol=1e-5)
