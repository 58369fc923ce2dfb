"""Rules of TPU slices: what they make of a model's traits, and that they know nothing else."""

import dataclasses

import pytest

from axcore import experiments
from axcore.parallel import MeshShape, MeshShapeModifier, Traits, resolve_instance
from axcore.parallel.cost import memory_estimate
from axcore.plugins import host
from axcore.remat import Remat
from axcore.train import assemble
from axlearn_tpu import rules

SAVED = Remat("sites", save=("qkv_proj", "attn_out"))
# Dense models of 7 and 70 billion parameters in float32, 1,024 rows of 4,096 tokens.
SMALL = Traits(
    num_parameters=7 * 10**9,
    parameter_bytes=28 * 10**9,
    seq_len=4096,
    batch_size=1024,
    num_layers=32,
    embed_dim=4096,
    tensor_parts=32,
    rematerializes=True,
)
LARGE = Traits(
    num_parameters=70 * 10**9,
    parameter_bytes=280 * 10**9,
    seq_len=4096,
    batch_size=1024,
    num_layers=80,
    embed_dim=8192,
    tensor_parts=64,
    rematerializes=True,
)


def fitted(rule, traits, name):
    """Returns mesh shape, remat and microbatches that a rule gives."""
    mesh, *rest = rule(traits, resolve_instance(name))
    remat = next((m.remat for m in rest if "remat" in m.fields()), None)
    values = next((m.values for m in rest if "values" in m.fields()), {})
    return mesh.mesh_shape, remat, values.get("accumulation_steps", 1)


def test_v5e_is_the_published_rule():
    """data=-1 across slices, fsdp=256 inside, products offloaded."""
    shape, remat, steps = fitted(rules.v5e, SMALL, "tpu-v5e-256-4")
    assert shape == MeshShape(fsdp=-1, across_slices={"data": -1})
    assert shape.sizes(1024, 4) | {"data": 4, "fsdp": 256} == shape.sizes(1024, 4)
    assert (remat, steps) == (Remat("offload_dots"), 1)


@pytest.mark.parametrize(
    ("rule", "traits", "name", "remat", "steps"),
    [
        (rules.v5p, SMALL, "tpu-v5p-512", SAVED, 1),
        (rules.v5p, LARGE, "tpu-v5p-1024", SAVED, 1),
        (rules.v5p, SMALL, "tpu-v5p-64", SAVED, 4),
        (rules.v6e, SMALL, "tpu-v6e-256", SAVED, 2),
        (rules.v6e, LARGE, "tpu-v6e-256", Remat("offload_dots"), 4),
        (rules.v5e, SMALL, "tpu-v5e-256", Remat("offload_dots"), 2),
        (rules.v4, LARGE, "tpu-v4-512", Remat("full"), 2),
        (rules.v7x, LARGE, "tpu-7x-256", SAVED, 1),
    ],
)
def test_memory_decides_what_is_saved_and_how_many_microbatches(rule, traits, name, remat, steps):
    shape, got, microbatches = fitted(rule, traits, name)
    assert shape.model == 1
    assert (got, microbatches) == (remat, steps)


def test_tensors_are_split_when_there_are_fewer_rows_than_devices():
    shape, _, _ = fitted(rules.v5p, SMALL, "tpu-v5p-8192")
    assert shape.sizes(4096)["fsdp"] == 1024
    assert shape.model == 4


def test_a_model_that_rematerializes_nothing_is_left_so():
    shape, remat, _ = fitted(rules.v5p, Traits(batch_size=64, seq_len=128), "tpu-v5p-8")
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


@pytest.mark.parametrize(
    ("experiment", "machine", "mesh", "remat", "steps"),
    [
        ("qwen3-30B-A3B", "tpu-v5p-1024", {"expert": 1, "model": 1}, "sites", 1),
        ("deepseek-V3", "tpu-v5p-2048", {"expert": 2, "model": 1}, "full", 5),
        ("mixtral-8x7B", "tpu-v5p-128", {"expert": 1, "model": 1}, "full", 1),
        ("mixtral-8x7B", "tpu-v5e-256", {"expert": 2, "model": 1}, "full", 2),
    ],
)
def test_a_mixture_of_experts_fits_by_the_memory_model(experiment, machine, mesh, remat, steps):
    pytest.importorskip("axlearn_models", reason="needs axlearn-models")
    pytest.importorskip("axlearn_moe", reason="needs axlearn-moe")
    cfg = experiments.get(experiment)
    if experiment.startswith("qwen3"):
        cfg.set(seq_len=16384)
    assembled = assemble(cfg, instance=machine)
    cfg, instance = assembled.cfg, assembled.instance
    found = {axis: n for axis, n in dataclasses.asdict(cfg.mesh_shape).items() if axis in mesh}
    policies = {n.remat.policy for _, n in cfg.walk() if "remat" in n.fields()}
    assert (found, policies, cfg.accumulation_steps) == (mesh, {remat}, steps)
    assert host().active_for(machine).mesh_rule(("moe",))[0].endswith("-experts")
    memory = memory_estimate(cfg, num_devices=instance.num_devices)
    # What compilers leave to a program.
    assert memory.total < 0.92 * instance.hbm_bytes
