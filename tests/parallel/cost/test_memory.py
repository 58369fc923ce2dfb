"""The memory model: exact where bytes follow from shapes; elsewhere beside a trace."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from models_for_tests import language_model, llama2_7b, trainer

from axcore.config import apply_modifier
from axcore.errors import ShardingError
from axcore.layers import RepeatedTransformer
from axcore.parallel import SequenceParallelModifier, ShardingRules, abstract_mesh
from axcore.parallel.cost import kv_cache_bytes, memory_estimate
from axcore.remat import Remat
from axcore.train import Trainer

SMALL = dict(layers=3, dim=32, heads=8, kv_heads=2, hidden=48, vocab=128)
GIB = 2**30


def small(remat: Remat | None = None, **fields: Any) -> Trainer.Config:
    model = language_model(**SMALL)
    model.decoder.stack = RepeatedTransformer.Config(remat=remat or Remat())
    return trainer(model, batch_size=8, seq_len=16).set(**fields)


def weights(cfg: Trainer.Config) -> int:
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(cfg.instantiate(name="t").abstract_state().model)
    )


def forward_residual_bytes(cfg: Trainer.Config) -> int:
    """Bytes that the scan over layers hands from the forward to the backward pass."""
    built = cfg.instantiate(name="trainer")
    shape = (cfg.batch_size, cfg.seq_len)
    batch = {n: jax.ShapeDtypeStruct(shape, jnp.int32) for n in ("input_ids", "target_ids")}
    equations = jax.make_jaxpr(built.train_step)(built.abstract_state(), batch).jaxpr.eqns
    forward, backward = (e for e in equations if e.primitive.name == "scan")
    made = set(forward.outvars[forward.params["num_carry"] :])
    handed = {v for v in backward.invars if not hasattr(v, "val") and v in made}
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in handed)


def test_one_device_holds_all_parameters_twice_over_for_adamw():
    cfg = small()
    found = memory_estimate(cfg, {"data": 1}, num_devices=1)
    assert found.parameters == found.gradients == weights(cfg)
    # Two moments and a few counters.
    assert 2 * weights(cfg) <= found.optimizer < 2 * weights(cfg) + 64
    assert found.total == sum(
        (found.parameters, found.optimizer, found.gradients, found.activations, found.workspace)
    )


def test_sharding_divides_what_it_splits():
    cfg = small()
    one = memory_estimate(cfg, {"data": 1}, num_devices=1)
    data = memory_estimate(cfg, {"data": 8}, num_devices=8)
    fsdp = memory_estimate(cfg, {"fsdp": 8}, num_devices=8)
    both = memory_estimate(cfg, {"fsdp": 4, "model": 2}, num_devices=8)
    assert data.parameters == one.parameters and data.activations == one.activations // 8
    assert fsdp.parameters == one.parameters // 8  # every weight has a dim of `embed`
    assert both.parameters < one.parameters / 7
    assert both.activations > fsdp.activations  # the stream between layers is whole
    assert fsdp.num_devices == 8


def test_zero_1_splits_the_optimizer_only():
    rules = ShardingRules(param_rules={"embed": ()}, optimizer_rules={"embed": ("fsdp",)})
    found = memory_estimate(small(sharding_rules=rules), {"fsdp": 8}, num_devices=8)
    assert found.parameters == weights(small())
    assert found.optimizer < 2 * weights(small()) / 7


def test_accumulation_halves_activations_and_adds_a_sum_of_gradients():
    whole = memory_estimate(small(), {"data": 1}, num_devices=1)
    halves = memory_estimate(small(accumulation_steps=2), {"data": 1}, num_devices=1)
    assert halves.activations == whole.activations // 2
    assert halves.gradients == 2 * whole.gradients


@pytest.mark.parametrize(
    "remat",
    [
        Remat("full"),
        Remat("sites", save=("attn_context", "ffn_hidden", "ffn_gate")),
        Remat("dots_no_batch"),
        Remat("dots"),
    ],
    ids=["full", "sites", "products-with-weights", "products"],
)
def test_activations_are_those_that_the_traced_step_keeps(remat):
    cfg = small(remat)
    found = memory_estimate(cfg, {"data": 1}, num_devices=1, attention="reference")
    assert found.activations == forward_residual_bytes(cfg)


def test_without_remat_the_estimate_stays_below_what_a_trace_keeps():
    cfg = small()
    found = memory_estimate(cfg, {"data": 1}, num_devices=1, attention="reference")
    # A trace also keeps statistics, and arrays in the order the reference wants them.
    assert 0.7 <= found.activations / forward_residual_bytes(cfg) <= 1.0


def test_offloaded_sites_live_on_the_host():
    saved = memory_estimate(
        small(Remat("sites", save=("qkv_proj", "attn_out"))), {"data": 1}, num_devices=1
    )
    moved = memory_estimate(
        small(Remat("sites", save=("attn_out",), offload=("qkv_proj",))),
        {"data": 1},
        num_devices=1,
    )
    assert moved.host == saved.activations_by_name["qkv_proj"]
    assert moved.activations == saved.activations - moved.host


def test_a_mesh_of_any_size_needs_no_devices():
    model = llama2_7b()
    model.compute_dtype = "bfloat16"
    model.decoder.stack = RepeatedTransformer.Config(remat=Remat("full"))
    cfg = trainer(model, batch_size=256, seq_len=4096)
    found = memory_estimate(cfg, {"fsdp": 256}, num_devices=256)
    # libtpu's own account for v5p x 256 with a kernel for attention is 2.7 GiB.
    assert found.total / GIB == pytest.approx(2.7, abs=0.3)
    assert found.activations == 32 * 4096 * 4096 * 2  # one row, the input of each layer
    larger = memory_estimate(cfg.set(batch_size=4096), {"fsdp": 4096}, num_devices=4096)
    assert larger.parameters == found.parameters // 16


def test_a_cache_has_a_key_and_a_value_per_token():
    model = language_model(**SMALL)
    lengths = 3 * 4 * 4  # one int32 for each row and layer
    one = kv_cache_bytes(model, {"data": 1}, num_devices=1, batch=4, max_len=64)
    assert one == 3 * 4 * 64 * 2 * (2 * 4) * 4 + lengths
    split = kv_cache_bytes(model, {"data": 2, "model": 2}, num_devices=4, batch=4, max_len=64)
    assert split == (one - lengths) // 4 + lengths // 2


def test_slices_multiply_the_data_axis():
    assert abstract_mesh({"fsdp": -1}, 16, num_slices=2).shape["data"] == 2


def test_bad_input_is_refused():
    with pytest.raises(ShardingError, match=r"multiply to 8, expected exactly 16"):
        memory_estimate(small(), {"fsdp": 8}, num_devices=16)
    with pytest.raises(ShardingError, match=r"dim 0 \('batch'\) of size 8 does not divide"):
        memory_estimate(small(), {"data": 16}, num_devices=16)
    with pytest.raises(ShardingError, match="expected a trainer's config"):
        memory_estimate(language_model(**SMALL).set(max_seq_len=16), {"data": 1}, num_devices=1)


def test_sequence_parallel_divides_what_is_kept_between_branches():
    cfg = small(Remat("full"))
    whole = memory_estimate(cfg, {"model": 4}, num_devices=4)
    split = apply_modifier(cfg, SequenceParallelModifier.Config())
    parts = memory_estimate(split, {"model": 4}, num_devices=4)
    # Whole layers are recomputed, so their inputs alone are kept.
    assert set(whole.activations_by_name) == {"block_in"}
    assert parts.activations_by_name["block_in"] == whole.activations_by_name["block_in"] // 4


def test_state_in_host_memory_is_no_device_memory():
    cfg = small()
    here = memory_estimate(cfg, num_devices=1)
    cfg.learner.state_memory = "host"
    there = memory_estimate(cfg, num_devices=1)
    assert there.optimizer == 0 and there.host == here.host + here.optimizer
    assert there.total == here.total - here.optimizer
