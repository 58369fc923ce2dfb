"""Rules of Trainium machines."""

import dataclasses

import pytest

from axcore import experiments
from axcore.parallel import MeshShapeModifier, Traits, resolve_instance
from axcore.parallel.cost import memory_estimate
from axcore.plugins import host
from axcore.remat import Remat
from axcore.train import assemble
from axlearn_neuron import rules
from axlearn_neuron._machines import MACHINES

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


def fitted(rule, traits, name):
    """Returns mesh shape, remat and microbatches that a rule gives."""
    mesh, *rest = rule(traits, resolve_instance(name))
    remat = next((m.remat for m in rest if "remat" in m.fields()), None)
    values = next((m.values for m in rest if "values" in m.fields()), {})
    return mesh.mesh_shape, remat, values.get("accumulation_steps", 1)


@pytest.mark.parametrize(
    ("rule", "name", "model", "remat", "steps"),
    [
        (rules.trn2, "neuron-trn2.48xlarge-64", 4, SAVED, 1),
        (rules.trn2, "neuron-trn2.48xlarge-8", 4, SAVED, 2),
        (rules.trn3, "neuron-trn3.48xlarge-16", 4, SAVED, 1),
        (rules.trn1, "neuron-trn1.32xlarge-16", 8, Remat("full"), 2),
    ],
)
def test_tensors_are_split_over_a_chip_and_memory_decides_the_rest(rule, name, model, remat, steps):
    shape, got, microbatches = fitted(rule, SMALL, name)
    assert (shape.fsdp, shape.model) == (-1, model)
    assert (got, microbatches) == (remat, steps)


def test_more_devices_than_rows_split_tensors_further():
    shape, _, _ = fitted(rules.trn2, SMALL, "neuron-trn2.48xlarge-128")
    assert shape.model == 8
    assert shape.sizes(128 * 64)["fsdp"] == 1024


def test_tensors_are_split_as_their_dims_allow():
    odd = dataclasses.replace(SMALL, tensor_parts=3)
    assert fitted(rules.trn2, odd, "neuron-trn2.48xlarge-1")[0].model == 1


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_has_one_rule(machine):
    name, rule = host().active_for(f"neuron-{machine}-1").mesh_rule()
    assert (name, rule.pattern) == (f"axlearn-neuron:{machine}", f"neuron-{machine}-*")


def test_an_experiment_of_core_is_fitted_and_ones_own_rule_beats_the_plugins():
    cfg, name = experiments.get("tiny-lm"), "neuron-trn2.48xlarge-1"
    fitted_cfg = assemble(cfg, instance=name).cfg
    assert fitted_cfg.set_by("mesh_shape").name == "axlearn-neuron:trn2.48xlarge"
    assert dict(fitted_cfg.compiler_options) == {}
    own = ("neuron-*", (MeshShapeModifier.Config(mesh_shape={"data": -1}),))
    assert assemble(cfg, instance=name, rules=(own,)).cfg.mesh_shape.data == -1


@pytest.mark.parametrize(
    ("experiment", "machine", "mesh", "remat", "steps"),
    [
        ("qwen3-30B-A3B", "neuron-trn2.48xlarge-16", {"expert": 1, "model": 1}, "sites", 1),
        ("deepseek-V3", "neuron-trn2.48xlarge-64", {"expert": 2, "model": 4}, "full", 15),
        ("mixtral-8x7B", "neuron-trn2.48xlarge-4", {"expert": 1, "model": 1}, "full", 1),
    ],
)
def test_a_mixture_of_experts_fits_by_the_memory_model(experiment, machine, mesh, remat, steps):
    pytest.importorskip("axlearn_models", reason="needs axlearn-models")
    pytest.importorskip("axlearn_moe", reason="needs axlearn-moe")
    cfg = experiments.get(experiment)
    if experiment.startswith("qwen3"):
        cfg.set(seq_len=4096)
    assembled = assemble(cfg, instance=machine)
    cfg, instance = assembled.cfg, assembled.instance
    found = {axis: n for axis, n in dataclasses.asdict(cfg.mesh_shape).items() if axis in mesh}
    policies = {n.remat.policy for _, n in cfg.walk() if "remat" in n.fields()}
    assert (found, policies, cfg.accumulation_steps) == (mesh, {remat}, steps)
    assert host().active_for(machine).mesh_rule(("moe",))[0].endswith("-experts")
    memory = memory_estimate(cfg, num_devices=instance.num_devices)
    # What compilers leave to a program.
    assert memory.total < 0.92 * instance.hbm_bytes
