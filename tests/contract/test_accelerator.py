"""A third party's accelerator: one small plugin, no edit anywhere else, and training runs on it.

The plugin is ``accelerator/fake_accelerator``; its devices are this process's simulated CPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from axcore import experiments, ops
from axcore.errors import PluginError
from axcore.layers import LayerNorm, RMSNorm
from axcore.parallel import MeshShape, detect, resolve_instance
from axcore.remat import Remat
from axcore.testing import (
    BackendConformance,
    KernelConformance,
    only_distribution,
    write_distribution,
)
from axcore.train import assemble, read_metrics, train

FOLDER = Path(__file__).parent / "accelerator"


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """Core and the accelerator's plugin, nothing else."""
    path = tmp_path_factory.mktemp("site")
    write_distribution(
        path,
        "fake-accelerator",
        None,
        entry_points={"fake-accelerator": "fake_accelerator.plugin"},
        module="fake_accelerator/__init__",
    )
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in a third of the time
    with only_distribution(path, "fake-accelerator", FOLDER):
        yield
    jax.config.update("jax_disable_most_optimizations", False)
    for name in [n for n in sys.modules if n.startswith("fake_accelerator")]:
        del sys.modules[name]


def micro():
    """tiny-lm with RMSNorm, as small as it gets."""
    cfg = experiments.get("tiny-lm")
    cfg.replace(LayerNorm.Config, RMSNorm.Config())
    cfg.model.model_dim = 16
    cfg.model.decoder.num_layers = 1
    cfg.set(max_step=3, batch_size=8, seq_len=16, sample_prompt=None, evalers={}, writers={
        "jsonl": cfg.writers["jsonl"]})  # fmt: skip
    return cfg


def test_the_whole_plugin_is_less_than_120_lines():
    lines = [line for path in FOLDER.rglob("*.py") for line in path.read_text().splitlines()]
    assert len(lines) < 120


class TestBackend(BackendConformance):
    distribution = "fake-accelerator"
    instances = ("fake-x1-2", "fake-x1-8")
    absent = ("fake-x1-3", "fake-x1-16")


class TestKernel(KernelConformance):
    op = "rms_norm"
    implementation = "fake_root"
    batchable = True

    def cases(self):
        return super().cases()[:1]


def test_its_rule_options_and_kernel_act_on_its_machine_only():
    here = assemble(micro(), instance="fake-x1-8")
    assert here.cfg.mesh_shape == MeshShape(fsdp=-1, model=2, across_slices={"data": -1})
    assert here.cfg.model.decoder.stack.remat == Remat("full")
    assert here.cfg.ops["rms_norm"].implementations == ("fake_root",)
    assert dict(here.cfg.compiler_options) == {"xla_cpu_enable_fast_math": False}
    (rule,), (option,) = here.rules.rules, here.rules.options
    assert (rule.name, rule.plugin) == ("fake-accelerator:x1", "fake-accelerator")
    assert (option.name, option.reason) == (
        "fake-accelerator:exact",
        "its units round as IEEE says",
    )
    elsewhere = assemble(micro(), instance="cpu-8")
    assert elsewhere.cfg.mesh_shape == MeshShape(fsdp=-1)
    assert not elsewhere.cfg.compiler_options
    assert elsewhere.cfg.ops["rms_norm"].implementations == ()


def test_it_is_detected_and_refuses_sizes_that_do_not_exist(monkeypatch):
    assert detect() == "cpu"
    monkeypatch.setenv("FAKE_X1", "fake-x1-4")
    assert detect() == "fake-x1-4"
    with pytest.raises(PluginError, match="no fake-x1 has 3 devices"):
        resolve_instance("fake-x1-3")


def _run(name, out):
    """Trains on a machine; returns the losses and which kernels normalized."""
    a = assemble(micro(), instance=name)
    with ops.record_choices() as choices:
        train(a.cfg, out=out, instance=a.instance)
    losses = [row["loss"] for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
    return losses, {c.chosen for c in choices if c.op == "rms_norm"}


@pytest.fixture(scope="module")
def trained(installed, tmp_path_factory):
    """One run on the accelerator, read by all."""
    return _run("fake-x1-4", tmp_path_factory.mktemp("run"))


def test_a_training_run_uses_its_kernel(trained):
    losses, chosen = trained
    assert chosen == {"fake_root"}
    # An untrained model spreads its bets over 264 tokens.
    assert len(losses) == 3 and losses[0] == pytest.approx(np.log(264), abs=0.5)
    assert losses[2] < losses[0]


@pytest.mark.slow
def test_a_training_run_gives_the_numbers_of_the_cpu(trained, tmp_path):
    losses, chosen = _run("cpu", tmp_path)
    assert chosen == {"xla"}
    np.testing.assert_allclose(trained[0], losses, rtol=1e-5)
