"""Rules and compiler options of GPU machines."""

import dataclasses
import functools

import jax
import pytest

from axcore import experiments
from axcore.parallel import MeshShapeModifier
from axcore.plugins import host
from axcore.remat import Remat
from axcore.testing import DENSE_7B, DENSE_70B, BackendConformance, FitCase, apply_rule
from axcore.train import assemble
from axlearn_gpu._gpus import MACHINES
from axlearn_gpu.rules import gpu

# Experiments that two other packages provide.
mixture = functools.partial(FitCase, requires=("axlearn_models", "axlearn_moe"))
SAVED = Remat("sites", save=("qkv_proj", "attn_out"))


def test_h100_is_the_published_rule():
    """fsdp=-1, model=8 within the node, saved projections and output of attention."""
    shape, remat, steps = apply_rule(gpu, DENSE_7B, "gpu-p5.48xlarge-256")
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
    assert apply_rule(gpu, DENSE_7B, name).mesh_shape.model == model


def test_tensors_are_split_as_their_dims_allow():
    odd = dataclasses.replace(DENSE_7B, tensor_parts=6)
    assert apply_rule(gpu, odd, "gpu-h100-64").mesh_shape.model == 2


def test_memory_decides_what_is_saved():
    # By hand: 0.6 * (84.9 GB - 4 * 280 GB / 512) / (2 * 80 * 8192 * (2 + 3/8) B) = 16.0k tokens,
    # less than four rows; each eight GPUs share sixteen.
    assert apply_rule(gpu, DENSE_70B, "gpu-h100-512")[1:] == (SAVED, 8)
    # 0.6 * (42.3 GB - 4 * 280 GB / 32) leave 1.4k tokens, less than a row.
    assert apply_rule(gpu, DENSE_70B, "gpu-p4d.24xlarge-32").remat == Remat("full")


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


class TestBackend(BackendConformance):
    distribution = "axlearn-gpu"
    absent = ("gpu-p5.48xlarge-100", "gpu-h100-3", "gpu-gb200-70")
    fits = (
        mixture(
            "qwen3-30B-A3B",
            "gpu-b200-512",
            "b200-experts",
            {"expert": 1, "model": 1},
            "sites",
            sets=("seq_len=16384",),
        ),
        mixture(
            "deepseek-V3", "gpu-h100-2048", "h100-experts", {"expert": 2, "model": 2}, "full", 5
        ),
        mixture("mixtral-8x7B", "gpu-h100-64", "h100-experts", {"expert": 1, "model": 1}, "full"),
        mixture(
            "mixtral-8x7B", "gpu-h100-16", "h100-experts", {"expert": 1, "model": 1}, "full", 32
        ),
    )
