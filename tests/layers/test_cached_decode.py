"""Every kind of attention and layer: prefill and cached decode equal the full forward.

The law is the same for all: however a text is split into a prompt that is read at once and tokens
that follow one by one, the scores are those of the whole text.
"""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axcore import functional
from axcore.collection import apply_state_updates
from axcore.layers import (
    ALiBi,
    Attention,
    CausalLM,
    ContiguousKVCache,
    Decoder,
    FusedQKV,
    ParallelTransformerLayer,
    PostNormTransformerLayer,
    QKNorm,
    QueryKeyChain,
    RelativePositionBias,
    RelativePositionTable,
    RepeatedTransformer,
    RMSNorm,
    StackedTransformer,
    TransformerLayer,
    init_cache,
    merge_state,
)
from axcore.ops import Causal, PrefixLM, SlidingWindow, TracedWindow

ROWS, PROMPT, LENGTH = 3, 6, 9


def attention(**fields):
    return Attention.Config(**{"num_heads": 4, **fields})


def layer(**fields):
    return TransformerLayer.Config(attention=attention(**fields))


SCAN, UNROLLED = RepeatedTransformer.Config, StackedTransformer.Config
NORM = RMSNorm.Config(unit_offset=True)
SHARED_BIAS = RelativePositionBias.Config(num_buckets=6, max_distance=5, table="relative_position")
# name -> fields of the decoder
KINDS = {
    "multi-head": dict(layer=layer()),
    "grouped-query-fused": dict(layer=layer(num_kv_heads=2, qkv=FusedQKV.Config())),
    "window-pattern": dict(
        num_layers=3, layer=(layer(mask=Causal() & SlidingWindow(left=2)), layer())
    ),
    "window-by-layer": dict(
        layer=layer(mask=Causal() & TracedWindow()),
        stack=SCAN(layer_values={"window": (1.0, float("inf"))}),
    ),
    "sinks": dict(layer=layer(sinks=True, logit_cap=4.0)),
    "alibi": dict(layer=layer(bias=ALiBi.Config(), num_kv_heads=1)),
    "relative-bias": dict(
        layer=layer(bias=SHARED_BIAS),
        shared=RelativePositionTable.Config(num_heads=4, num_buckets=6),
    ),
    "prefix-lm": dict(layer=layer(mask=PrefixLM())),
    "qk-norm": dict(
        layer=layer(
            num_kv_heads=2,
            query_key_transform=QueryKeyChain.Config(
                transforms=(QKNorm.Config(), QKNorm.Config(over="heads"))
            ),
        )
    ),
    "sandwich": dict(
        layer=TransformerLayer.Config(
            attention=attention(),
            attention_norm=NORM,
            attention_out_norm=NORM,
            feed_forward_norm=None,
            feed_forward_out_norm=NORM,
        )
    ),
    "post-norm": dict(layer=PostNormTransformerLayer.Config(attention=attention())),
    "parallel": dict(
        layer=ParallelTransformerLayer.Config(attention=attention()), stack=UNROLLED()
    ),
    "a-toy-cache": dict(
        layer=layer(
            num_kv_heads=2,
            sinks=True,
            bias=ALiBi.Config(),
            mask=Causal() & SlidingWindow(left=3),
        )
    ),
    "a-toy-cache-prefix-lm": dict(layer=layer(mask=PrefixLM()), stack=UNROLLED()),
}


@pytest.fixture(scope="module")
def model(toy_cache):
    """Makes each kind of model once."""
    return functools.cache(lambda kind: make(kind, toy_cache))


def make(kind, toy_cache):
    """Returns the empty state, and compiled full, prefill and decode of a model of this kind."""
    cfg = CausalLM.Config(
        vocab_size=40,
        model_dim=16,
        max_seq_len=LENGTH,
        decoder=Decoder.Config(**{"num_layers": 2, **KINDS[kind]}),
    )
    if "toy" in kind:
        cfg.replace(ContiguousKVCache.Config, toy_cache)
    module = cfg.instantiate(name="m")
    # Drawn, since initial values that are 0 or 1 would hide what they multiply.
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda spec: rng.normal(0, 0.3, spec.shape).astype(np.float32), module.parameter_specs()
    )
    state = merge_state(params, init_cache(module, ROWS, LENGTH))

    def compiled(method):
        @jax.jit
        def run(state, **inputs):
            logits, col = functional(
                module, state=state, inputs=inputs, is_training=False, method=method
            )
            return logits, apply_state_updates(state, col)

        return run

    return state, compiled("logits"), compiled("prefill"), compiled("decode")


# Each kind compiles three programs. These together have every feature but the norms' places.
EVERY_DAY = ("grouped-query-fused", "window-by-layer", "prefix-lm", "qk-norm", "a-toy-cache")


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in EVERY_DAY else pytest.mark.slow) for k in KINDS]
)
@given(
    lengths=st.tuples(*[st.integers(1, PROMPT)] * ROWS),
    prefixes=st.tuples(*[st.integers(0, PROMPT)] * ROWS),
    seed=st.integers(0, 99),
)
@settings(max_examples=4, deadline=None)
def test_cached_decode_equals_the_full_forward_for_any_split(model, kind, lengths, prefixes, seed):
    state, full, prefill, decode = model(kind)
    lengths = np.array(lengths)
    prefixes = np.minimum(prefixes, lengths).astype(np.int32)
    ids = np.random.default_rng(seed).integers(0, 40, (ROWS, LENGTH), np.int32)
    expected, _ = full(state, input_ids=ids, prefix_lengths=prefixes)
    rows, slots = np.arange(ROWS), np.arange(PROMPT)[None]
    positions = np.where(slots < lengths[:, None], slots, -1).astype(np.int32)
    logits, state = prefill(
        state, input_ids=ids[:, :PROMPT], positions=positions, prefix_lengths=prefixes
    )
    expected = np.asarray(expected)
    np.testing.assert_allclose(logits, expected[rows, lengths - 1], rtol=1e-4, atol=1e-4)
    for step in range(LENGTH - PROMPT):
        at = lengths + step
        now = at[:, None].astype(np.int32)
        logits, state = decode(state, input_ids=ids[rows[:, None], now], positions=now)
        np.testing.assert_allclose(logits, expected[rows, at], rtol=1e-4, atol=1e-4)
