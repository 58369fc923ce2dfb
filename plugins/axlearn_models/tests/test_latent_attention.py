"""Latent attention: the absorbed form of decode, what the cache holds, a whole model in decode."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import experiments, functional
from axcore.errors import ModuleError
from axcore.layers import SequenceInfo
from axcore.layers.kv_cache import init_cache, merge_state
from axcore.ops.masks import TracedWindow
from axcore.parallel import ShardingRules
from axcore.testing import check_cached_decode
from axlearn_models._latent_attention import LatentAttention
from axlearn_rope import RoPE

SEQ, DIM, HEADS, RANK, ROTATED = 6, 16, 3, 10, 4


def attention(**fields: Any) -> LatentAttention:
    cfg = LatentAttention.Config(
        input_dim=DIM,
        num_heads=HEADS,
        head_dim=7,
        rotated_dim=ROTATED,
        value_dim=5,
        rank=RANK,
        query_rank=8,
        query_key_transform=RoPE.Config(pairing="interleaved"),
    )
    return cfg.set(**fields).instantiate(name="attention")


def info(start: int, stop: int, purpose: Any) -> SequenceInfo:
    positions = jnp.arange(start, stop, dtype=jnp.int32)[None].repeat(2, 0)
    return SequenceInfo(positions, purpose=purpose)


def step(module: LatentAttention, state: Any, x: jax.Array, info: SequenceInfo) -> Any:
    return functional(module, state=state, inputs=(x, info), is_training=False)


def compiled(run: Any, *arguments: Any) -> Any:
    options = {"xla_backend_optimization_level": 0}  # compiling takes most of the time
    return jax.jit(run).lower(*arguments).compile(compiler_options=options)(*arguments)


def test_prefill_and_absorbed_decode_give_what_the_whole_sequence_gives():
    module = attention()
    params = module.initialize(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, SEQ, DIM))

    def run(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        expected, _ = step(module, params, x, info(0, SEQ, "train"))
        caches = init_cache(module, 2, SEQ + 2)
        got = []
        for start, stop, purpose in ((0, 2, "prefill"), (2, 5, "prefill"), (5, 6, "decode")):
            state = merge_state(params, caches)
            out, found = step(module, state, x[:, start:stop], info(start, stop, purpose))
            entries = {n: found.state_updates[f"kv_cache/{n}"] for n in caches["kv_cache"]}
            caches = {"kv_cache": {name: entry.result() for name, entry in entries.items()}}
            got.append(out)
        return jnp.concatenate(got, axis=1), expected

    got, expected = compiled(run, params, x)
    # Sums in another order, float32.
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_the_cache_holds_a_latent_and_one_rotated_key_and_decode_expands_neither():
    module = attention()
    params = jax.eval_shape(module.initialize, jax.random.key(0))
    caches = init_cache(module, 2, 11)
    shapes = {name: array.shape for name, array in caches["kv_cache"].items()}
    assert shapes == {"latent": (2, 11, RANK), "rotated": (2, 11, ROTATED), "lengths": (2,)}

    def run(params: Any, caches: Any, x: jax.Array) -> Any:
        return step(module, merge_state(params, caches), x, info(0, 1, "decode"))[0]

    text = str(jax.make_jaxpr(run)(params, caches, jnp.zeros((2, 1, DIM))))
    assert f"2,11,{HEADS}" not in text  # no key or value of each head
    assert f"2,11,1,{RANK + ROTATED}" in text


def test_a_mask_that_needs_arrays_is_refused():
    with pytest.raises(ModuleError, match="AX392"):
        attention(mask=TracedWindow())


def test_a_latent_stays_whole_where_it_does_not_divide():
    # 512 dims of DeepSeek-V3 on a thousand devices.
    assert ShardingRules().table("param").alternatives("latent") == (("fsdp",), ())


@pytest.mark.slow
def test_the_model_decodes_as_it_computes_whole_sequences():
    model = experiments.get("deepseek-V3-test").instantiate(name="trainer").model
    generator = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: x + jnp.asarray(generator.normal(0.0, 0.2, x.shape), x.dtype),
        model.initialize(jax.random.key(0)),
    )
    check_cached_decode(model, state, vocab_size=264, length=16, max_len=20, num_splits=4)


def test_segments_of_a_row_do_not_see_each_other():
    module = attention()
    params = module.initialize(jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (1, 4, DIM))
    positions = jnp.array([[0, 1, 0, 1]], jnp.int32)
    packed = SequenceInfo(positions, jnp.array([[1, 1, 2, 2]], jnp.int32))
    alone = dataclasses.replace(packed, positions=positions[:, :2], segment_ids=None)

    def run(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        whole, _ = step(module, params, x, packed)
        return whole[:, 2:], step(module, params, x[:, 2:], alone)[0]

    both, second = compiled(run, params, x)
    np.testing.assert_allclose(both, second, atol=2e-6)
