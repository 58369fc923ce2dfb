"""Experts, tensors, shards and stages at once, on sixteen devices, train like one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axcore import experiments
from axcore.layers import FeedForward, PipelinedTransformer
from axcore.parallel import MeshShapeModifier
from axcore.testing import run_processes
from axcore.train import JsonlWriter, assemble, read_metrics, train
from axlearn_moe import MoE

MESH = {"pipeline": 2, "expert": 2, "fsdp": 2, "model": 2}
PROGRAM = f"""
import json
sys.path.insert(0, {str(Path(__file__).parent)!r})
from {Path(__file__).stem} import run
print(json.dumps(run(args[0], "cpu-16", {MESH})))
"""
STEPS = 3


def run(out: Any, instance: str, mesh: dict[str, int]) -> dict[str, Any]:
    """Trains a tiny mixture; returns its mesh.

    Without losses of its own: that of balance is of each microbatch, and one device has one.
    """
    cfg = experiments.get("tiny-lm")
    cfg.model.model_dim = 16
    cfg.model.decoder.num_layers = 2
    cfg.model.decoder.layer.attention.num_heads = 2
    cfg.model.decoder.stack = PipelinedTransformer.Config(num_microbatches=2)
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4, top_k=2, losses=()))
    cfg.set(max_step=STEPS, batch_size=8, seq_len=16, sample_prompt=None, evalers={})
    cfg.mesh_rules = [(instance, [MeshShapeModifier.Config(mesh_shape=mesh)])]
    cfg.writers = {"jsonl": JsonlWriter.Config()}
    a = assemble(cfg, instance=instance)
    jax.config.update("jax_disable_most_optimizations", True)  # two compilations on few cores
    try:
        report = train(a.cfg, out=out, instance=a.instance).report
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    return report["mesh"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_four_axes_give_the_losses_of_one_device(tmp_path):
    four = str(tmp_path / "four")
    (mesh,) = run_processes(PROGRAM, four, num_processes=1, instance="cpu-16", timeout_seconds=400)
    assert {axis: mesh[axis] for axis in MESH} == MESH
    run(tmp_path / "one", "cpu", {})

    def losses(name: str) -> list[float]:
        return [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")]

    assert len(losses("one")) == STEPS
    # Sums run in another order, in float32.
    np.testing.assert_allclose(losses("four"), losses("one"), rtol=1e-5)
