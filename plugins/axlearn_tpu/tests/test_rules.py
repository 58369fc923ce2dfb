"""Rules of TPU slices: what they make of a model's traits, and that they know nothing else."""

import dataclasses
import functools

import pytest

from axcore import experiments
from axcore.parallel import MeshShape, MeshShapeModifier, Traits
from axcore.plugins import host
from axcore.remat import Remat
from axcore.testing import DENSE_7B, DENSE_70B, BackendConformance, FitCase, apply_rule
from axcore.train import assemble
from axlearn_tpu import rules

# Experiments that two other packages provide.
mixture = functools.partial(FitCase, requires=("axlearn_models", "axlearn_moe"))
SAVED = Remat("sites", save=("qkv_proj", "attn_out"))


def test_v5e_is_the_published_rule():
    """data=-1 across slices, fsdp=256 inside, products offloaded."""
    shape, remat, steps = apply_rule(rules.v5e, DENSE_7B, "tpu-v5e-256-4")
    assert shape == MeshShape(fsdp=-1, across_slices={"data": -1})
    assert shape.sizes(1024, 4) | {"data": 4, "fsdp": 256} == shape.sizes(1024, 4)
    assert (remat, steps) == (Remat("offload_dots"), 1)


@pytest.mark.parametrize(
    ("rule", "traits", "name", "remat", "steps"),
    [
        (rules.v5p, DENSE_7B, "tpu-v5p-512", SAVED, 1),
        (rules.v5p, DENSE_70B, "tpu-v5p-1024", SAVED, 1),
        (rules.v5p, DENSE_7B, "tpu-v5p-64", SAVED, 4),
        (rules.v6e, DENSE_7B, "tpu-v6e-256", SAVED, 2),
        (rules.v6e, DENSE_70B, "tpu-v6e-256", Remat("offload_dots"), 4),
        (rules.v5e, DENSE_7B, "tpu-v5e-256", Remat("offload_dots"), 2),
        (rules.v4, DENSE_70B, "tpu-v4-512", Remat("full"), 2),
        (rules.v7x, DENSE_70B, "tpu-7x-256", SAVED, 1),
    ],
)
def test_memory_decides_what_is_saved_and_how_many_microbatches(rule, traits, name, remat, steps):
    shape, got, microbatches = apply_rule(rule, traits, name)
    assert shape.model == 1
    assert (got, microbatches) == (remat, steps)


@pytest.mark.parametrize(
    ("traits", "replicas"),
    [
        (DENSE_7B, 1),  # 4096 over 256 are two tiles
        (dataclasses.replace(DENSE_7B, embed_dim=1024), 2),
        (dataclasses.replace(DENSE_7B, embed_dim=1024, parameter_bytes=400 * 2**30), 1),  # no room
        (dataclasses.replace(DENSE_7B, embed_dim=1000), 1),  # 125 tiles: whole on one device
    ],
)
def test_shards_are_whole_tiles_where_replicas_take_little(traits, replicas):
    shape, _, _ = apply_rule(rules.v5p, traits, "tpu-v5p-512")
    assert shape == MeshShape(data=replicas, fsdp=-1, across_slices={"data": -1})


def test_tensors_are_split_when_there_are_fewer_rows_than_devices():
    shape, _, _ = apply_rule(rules.v5p, DENSE_7B, "tpu-v5p-8192")
    # Shards of 4096 / 1024 would be half a tile.
    assert shape.sizes(4096) | {"data": 2, "fsdp": 512, "model": 4} == shape.sizes(4096)


def test_a_model_that_rematerializes_nothing_is_left_so():
    shape, remat, _ = apply_rule(rules.v5p, Traits(batch_size=64, seq_len=128), "tpu-v5p-8")
    assert (shape.fsdp, remat) == (-1, None)


@pytest.mark.parametrize("spec", [s.name for s in host().instance_types.specs()
                                  if s.family.startswith("tpu-")])  # fmt: skip
def test_every_generation_has_one_rule_and_its_options(spec):
    active = host().active_for(spec.replace("*", "8"))
    name, rule = active.mesh_rule()
    assert (name, rule.pattern) == (f"axlearn-tpu:{spec[4:-2]}", spec)
    options = active.options()
    assert options["xla_tpu_enable_latency_hiding_scheduler"] is True
    assert "xla_tpu_enable_data_parallel_all_reduce_opt" not in options
    several = host().active_for(spec.replace("*", "8-2")).options()
    assert several["xla_tpu_enable_data_parallel_all_reduce_opt"] is True


def test_an_experiment_of_core_is_fitted():
    assembled = assemble(experiments.get("tiny-lm"), instance="tpu-v5p-8")
    assert assembled.cfg.mesh_shape.fsdp == -1
    assert assembled.cfg.set_by("mesh_shape").plugin == "axlearn-tpu"
    assert {o.name for o in assembled.rules.options} >= {"axlearn-tpu:latency-hiding"}
    assert all(o.reason for o in assembled.rules.options)


def test_ones_own_rule_and_flag_beat_the_plugins():
    own = ("tpu-v5e-*", (MeshShapeModifier.Config(mesh_shape={"data": -1, "model": 2}),))
    cfg = experiments.get("tiny-lm")
    assert assemble(cfg, instance="tpu-v5e-8", rules=(own,)).cfg.mesh_shape.model == 2
    kept = assemble(cfg, instance="tpu-v5e-8", sets=["mesh_shape.data=8"]).rules.kept
    assert [k.path for k in kept] == ["mesh_shape"]


class TestBackend(BackendConformance):
    distribution = "axlearn-tpu"
    absent = ("tpu-v5e-100", "tpu-v5p-500", "tpu-v4-4")
    fits = (
        mixture(
            "qwen3-30B-A3B",
            "tpu-v5p-1024",
            "v5p-experts",
            {"data": 2, "expert": 1, "model": 1},  # shards of 2048 / 256 are tiles
            "sites",
            sets=("seq_len=16384",),
        ),
        mixture(
            "deepseek-V3", "tpu-v5p-2048", "v5p-experts", {"expert": 2, "model": 1}, "full", 15
        ),
        mixture("mixtral-8x7B", "tpu-v5p-128", "v5p-experts", {"expert": 1, "model": 1}, "full"),
        mixture("mixtral-8x7B", "tpu-v5e-256", "v5e-experts", {"expert": 2, "model": 1}, "full", 2),
    )
