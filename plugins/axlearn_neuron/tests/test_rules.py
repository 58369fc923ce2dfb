"""Rules of Trainium machines."""

import dataclasses
import functools

import pytest

from axcore import experiments
from axcore.parallel import MeshShapeModifier
from axcore.plugins import host
from axcore.remat import Remat
from axcore.testing import DENSE_7B, BackendConformance, FitCase, apply_rule
from axcore.train import assemble
from axlearn_neuron import rules
from axlearn_neuron._machines import MACHINES

# Experiments that two other packages provide.
mixture = functools.partial(FitCase, requires=("axlearn_models", "axlearn_moe"))
SAVED = Remat("sites", save=("qkv_proj", "attn_out"))


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
    shape, got, microbatches = apply_rule(rule, DENSE_7B, name)
    assert (shape.fsdp, shape.model) == (-1, model)
    assert (got, microbatches) == (remat, steps)


def test_more_devices_than_rows_split_tensors_further():
    shape, _, _ = apply_rule(rules.trn2, DENSE_7B, "neuron-trn2.48xlarge-128")
    assert shape.model == 8
    assert shape.sizes(128 * 64)["fsdp"] == 1024


def test_tensors_are_split_as_their_dims_allow():
    odd = dataclasses.replace(DENSE_7B, tensor_parts=3)
    assert apply_rule(rules.trn2, odd, "neuron-trn2.48xlarge-1").mesh_shape.model == 1


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


class TestBackend(BackendConformance):
    distribution = "axlearn-neuron"
    absent = ("neuron-trn2.48xlarge-0", "neuron-trn2.48xlarge-99999999")
    fits = (
        mixture(
            "qwen3-30B-A3B",
            "neuron-trn2.48xlarge-16",
            "trn2.48xlarge-experts",
            {"expert": 1, "model": 1},
            "sites",
            sets=("seq_len=4096",),
        ),
        mixture(
            "deepseek-V3",
            "neuron-trn2.48xlarge-64",
            "trn2.48xlarge-experts",
            {"expert": 2, "model": 4},
            "full",
            15,
        ),
        mixture(
            "mixtral-8x7B",
            "neuron-trn2.48xlarge-4",
            "trn2.48xlarge-experts",
            {"expert": 1, "model": 1},
            "full",
        ),
    )
