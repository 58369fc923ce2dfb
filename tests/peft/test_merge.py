"""Merged weights: a plain model that computes the same, in both stack forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import experiments, functional
from axcore.config import apply_modifier
from axcore.errors import CheckpointError
from axcore.layers import StackedTransformer
from axcore.module import flatten_specs
from axcore.peft import DoRAModifier, LoRAModifier, merge_state, plain_config

IDS = np.arange(8, dtype=np.int32)[None] * 11 % 250


def tiny():
    cfg = experiments.get("tiny-lm").set(seq_len=8)
    cfg.model.set(model_dim=16)
    cfg.model.decoder.layer.attention.set(num_heads=2)
    return cfg


def logits(model, state):
    @jax.jit
    def run(state):
        return functional(model, state=state, inputs=(IDS,), is_training=False, method="logits")[0]

    return run(state)


@pytest.mark.parametrize("form", ["scanned", "unrolled"])
def test_a_merged_state_is_that_of_the_plain_model_and_computes_the_same(form):
    cfg, modifier = tiny(), LoRAModifier.Config(rank=2, targets=("**/qkv/*", "**/output"))
    if form == "unrolled":
        cfg.model.decoder.stack = StackedTransformer.Config()
        modifier = DoRAModifier.Config(rank=2, targets="decoder/layer/1/**")
    before = cfg.to_text()
    cfg = apply_modifier(cfg, modifier)
    plain_cfg = plain_config(cfg)
    assert plain_cfg.to_text() == before
    model, plain = (c.instantiate(name="t").model for c in (cfg, plain_cfg))
    drawn = model.initialize(jax.random.key(0))
    # Adapters that do something, in every layer something else.
    state = jax.tree.map(
        lambda x: x + 0.1 * jnp.sin(1.0 + jnp.arange(x.size).reshape(x.shape)), drawn
    )
    merged = merge_state(model, state, plain)
    wanted = {p: (s.shape, s.dtype) for p, s in flatten_specs(plain.parameter_specs()).items()}
    assert {p: (x.shape, x.dtype.name) for p, x in flatten_specs_like(merged).items()} == wanted
    adapted = logits(model, state)
    np.testing.assert_allclose(logits(plain, merged), adapted, atol=1e-5)
    assert np.abs(logits(model, drawn) - adapted).max() > 1e-2


def flatten_specs_like(tree, prefix=""):
    flat = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        flat.update(
            flatten_specs_like(value, f"{path}/") if isinstance(value, dict) else {path: value}
        )
    return flat


def test_a_model_without_adapters_has_nothing_to_merge():
    model = tiny().instantiate(name="t").model
    with pytest.raises(CheckpointError, match="no adapters"):
        merge_state(model, {}, model)
