"""What a count of parameters cannot see: windows, scales, caps, where the norms stand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import experiments, functional
from axcore.layers import Embedding
from axcore.ops.masks import Causal, SlidingWindow
from axlearn_rope import LinearScaling

LAYER = "decoder.layer"
ROPE = "attention.query_key_transform"


def tokens(count: int):
    """The mask of a token that sees so many, its own included."""
    return Causal() & SlidingWindow(left=count - 1)


# From the reports and the config.json published with the weights.
PUBLISHED = [
    ("gpt2-1.5B", "max_seq_len", 1024),
    ("gpt2-1.5B", f"{LAYER}.dropout.rate", 0.1),
    ("gpt2-1.5B", f"{LAYER}.feed_forward.activation", "gelu_tanh"),
    ("mistral-7B-v0.1", f"{LAYER}.attention.mask", tokens(4096)),
    ("mistral-7B-v0.3", f"{LAYER}.attention.mask", Causal()),
    ("phi3-mini-4k", f"{LAYER}.attention.mask", tokens(2047)),
    ("phi3-mini-128k", f"{LAYER}.attention.mask", Causal()),
    ("phi3-medium-4k", f"{LAYER}.attention.mask", tokens(2047)),
    ("gemma2-9B", f"{LAYER}.0.attention.mask", tokens(4096)),
    ("gemma2-9B", f"{LAYER}.1.attention.mask", Causal()),
    ("gemma2-9B", f"{LAYER}.1.attention.logit_cap", 50.0),
    ("gemma2-9B", f"{LAYER}.1.attention.logit_scale", 1 / 16),
    ("gemma2-9B", "embedding.logit_cap", 30.0),
    ("gemma2-2B", "embedding.embedding_scale", 48.0),
    ("gemma2-27B", f"{LAYER}.0.attention.logit_scale", 1 / 12),
    ("gemma3-270M", f"{LAYER}.4.attention.mask", tokens(512)),
    ("gemma3-12B", f"{LAYER}.4.attention.mask", tokens(1024)),
    ("gemma3-12B", f"{LAYER}.5.attention.mask", Causal()),
    ("gemma3-12B", f"{LAYER}.5.attention.logit_cap", None),
    ("gemma3-12B", f"{LAYER}.4.{ROPE}.transforms.1.base", 10_000.0),
    ("gemma3-12B", f"{LAYER}.4.{ROPE}.transforms.1.scaling", None),
    ("gemma3-12B", f"{LAYER}.5.{ROPE}.transforms.1.base", 1_000_000.0),
    ("gemma3-12B", f"{LAYER}.5.{ROPE}.transforms.1.scaling", LinearScaling(factor=8.0)),
    ("gemma3-270M", f"{LAYER}.5.{ROPE}.transforms.1.scaling", None),
    ("gemma3-27B", f"{LAYER}.0.attention.logit_scale", 168**-0.5),
    ("gemma3-27B", f"{LAYER}.0.{ROPE}.transforms.0.norm.unit_offset", True),
    ("gemma3-27B", f"{LAYER}.0.feed_forward.activation", "gelu_tanh"),
    ("olmo2-32B", f"{LAYER}.attention_norm", None),
    ("olmo2-32B", f"{LAYER}.feed_forward_norm", None),
    ("olmo2-32B", f"{LAYER}.{ROPE}.transforms.0.over", "heads"),
    ("afm-on-device", f"{LAYER}.{ROPE}.transforms.0.over", "head_dim"),
    ("afm-server", "lm_head", None),
]


@pytest.mark.parametrize(("name", "path", "value"), PUBLISHED)
def test_a_member_is_built_as_published(name, path, value):
    assert experiments.get(name).model.get_path(path) == value


def test_a_global_layer_is_every_sixth_and_the_last_period_may_end_early():
    cfg = experiments.get("gemma3-1B")
    period = cfg.model.decoder.layer
    local = [period[i % len(period)].attention.mask != Causal() for i in range(26)]
    assert [i for i, here in enumerate(local) if not here] == [5, 11, 17, 23]


def test_what_feeds_gpt2s_residual_stream_starts_smaller():
    model = experiments.get("gpt2-355M").model
    small = 0.02 / math.sqrt(2 * 24)
    assert model.get_path(f"{LAYER}.attention.output.weight_init").stddev == small
    assert model.get_path(f"{LAYER}.feed_forward.down.weight_init").stddev == small
    assert model.get_path(f"{LAYER}.feed_forward.up.weight_init").stddev == 0.02


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 34.0), ("float32", math.sqrt(1152))])
def test_gemmas_scale_of_embeddings_is_rounded_where_embeddings_are(dtype, scale):
    cfg = experiments.get("gemma3-1B").model.embedding
    assert isinstance(cfg, Embedding.Config)
    embedding = cfg.copy().set(vocab_size=4, input_dim=1152, compute_dtype=dtype)
    module = embedding.instantiate(name="embedding")
    state = {"weight": jnp.ones((4, 1152))}
    ids = jnp.zeros((1, 1), jnp.int32)
    out, _ = functional(module, state=state, inputs=(ids,), is_training=False)
    assert out.dtype == dtype
    np.testing.assert_allclose(np.asarray(out, np.float32), scale, rtol=1e-6)


def test_gemma3_s_layers_start_with_norms_of_one():
    model = experiments.get("gemma3-test").instantiate(name="trainer").model
    state = model.initialize(jax.random.key(0))
    scales = [
        leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if "scale" in jax.tree_util.keystr(path)
    ]
    assert len(scales) == 4 * 6 + 1
    assert all(float(jnp.abs(scale).max()) == 0.0 for scale in scales)  # stored less one
