"""Rules and compiler options of GPU machines."""

import dataclasses

import jax
import pytest

from axcore import experiments
from axcore.parallel import MeshShapeModifier, Traits, resolve_instance
from axcore.parallel.cost import memory_estimate
from axcore.plugins import host
from axcore.remat import Remat
from axcore.train import assemble
from axlearn_gpu._gpus import MACHINES
from axlearn_gpu.rules import gpu

SAVED = Remat("sites", save=("qkv_proj", "attn_out"))
# A dense model of 7 billion parameters in float32, 1,024 rows of 4,096 tokens.
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
LARGE = dataclasses.replace(
    SMALL,
    num_parameters=70 * 10**9,
    parameter_bytes=280 * 10**9,
    num_layers=80,
    embed_dim=8192,
    tensor_parts=64,
)


def fitted(traits, name):
    """Returns mesh shape, remat and microbatches that the rule gives."""
    mesh, *rest = gpu(traits, resolve_instance(name))
    remat = next((m.remat for m in rest if "remat" in m.fields()), None)
    values = next((m.values for m in rest if "values" in m.fields()), {})
    return mesh.mesh_shape, remat, values.get("accumulation_steps", 1)


def test_h100_is_the_published_rule():
    """fsdp=-1, model=8 within the node, saved projections and output of attention."""
    shape, remat, steps = fitted(SMALL, "gpu-p5.48xlarge-256")
    assert (shape.fsdp, shape.model, shape.data) == (-1, 8, 1)
    assert remat == SAVED
    # By hand: 0.6 * (84.9 GB - 4 * 28 GB / 256) / (2 * 32 * 4096 * (2 + 3/8) B) = 81k tokens of
    # the 131k that eight GPUs share.
    assert steps == 2


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gpu-h100-8", 1),  # NVLink reaches all
        ("gpu-h100-16", 8),
        ("gpu-gb200-64", 1),
        ("gpu-gb200-512", 4),
        ("gpu-a2-megagpu-16g-16", 1),
        ("gpu-a2-megagpu-16g-32", 8),
    ],
)
def test_tensors_are_split_within_the_host_where_nvlink_ends(name, model):
    assert fitted(SMALL, name)[0].model == model


def test_tensors_are_split_as_their_dims_allow():
    odd = dataclasses.replace(SMALL, tensor_parts=6)
    assert fitted(odd, "gpu-h100-64")[0].model == 2


def test_memory_decides_what_is_saved():
    # By hand: 0.6 * (84.9 GB - 4 * 280 GB / 512) / (2 * 80 * 8192 * (2 + 3/8) B) = 16.0k tokens,
    # less than four rows; each eight GPUs share sixteen.
    assert fitted(LARGE, "gpu-h100-512")[1:] == (SAVED, 8)
    # 0.6 * (42.3 GB - 4 * 280 GB / 32) leave 1.4k tokens, less than a row.
    assert fitted(LARGE, "gpu-p4d.24xlarge-32")[1] == Remat("full")


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_has_one_rule_and_the_options(machine):
    active = host().active_for(f"gpu-{machine}-8")
    name, rule = active.mesh_rule()
    assert (name, rule.pattern) == (f"axlearn-gpu:{machine}", f"gpu-{machine}-*")
    assert active.options()["xla_gpu_enable_latency_hiding_scheduler"] is True


def test_the_installed_compiler_knows_the_options():
    """XLA's options are one list for all its backends, so the CPU's refuses what does not exist."""
    options = dict(host().active_for("gpu-h100-8").options())
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile(compiler_options=options)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={**options, "xla_gpu_no_such_option": True})


def test_an_experiment_of_core_is_fitted_and_says_by_whom():
    assembled = assemble(experiments.get("tiny-lm"), instance="gpu-a3-highgpu-8g-16")
    assert assembled.cfg.set_by("mesh_shape").name == "axlearn-gpu:a3-highgpu-8g"
    assert assembled.cfg.compiler_options["xla_gpu_enable_triton_gemm"] is False
    assert all(o.name.startswith("axlearn-gpu:") and o.reason for o in assembled.rules.options)


def test_ones_own_rule_beats_the_plugins():
    own = ("gpu-h100-*", (MeshShapeModifier.Config(mesh_shape={"data": -1}),))
    cfg = assemble(experiments.get("tiny-lm"), instance="gpu-h100-16", rules=(own,)).cfg
    assert (cfg.mesh_shape.data, cfg.mesh_shape.fsdp) == (-1, 1)


@pytest.mark.parametrize(
    ("experiment", "machine", "mesh", "remat", "steps"),
    [
        ("qwen3-30B-A3B", "gpu-b200-512", {"expert": 1, "model": 1}, "sites", 1),
        ("deepseek-V3", "gpu-h100-2048", {"expert": 2, "model": 2}, "full", 5),
        ("mixtral-8x7B", "gpu-h100-64", {"expert": 1, "model": 1}, "full", 1),
        ("mixtral-8x7B", "gpu-h100-16", {"expert": 1, "model": 1}, "full", 32),
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
