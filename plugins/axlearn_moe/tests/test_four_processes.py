"""Four real processes with experts of their own train like one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from axcore import experiments
from axcore.layers import FeedForward
from axcore.parallel import MeshShapeModifier
from axcore.testing import run_processes
from axcore.train import JsonlWriter, assemble, read_metrics, train
from axlearn_moe import MoE

PROGRAM = f"""
import json
sys.path.insert(0, {str(Path(__file__).parent)!r})
from {Path(__file__).stem} import run
print(json.dumps(run(args[0], "cpu-4", {{"expert": 4}})))
"""
STEPS = 3


def run(out: Any, instance: str, mesh: dict[str, int]) -> dict[str, Any]:
    """Trains a tiny mixture; returns a few numbers of its report."""
    cfg = experiments.get("tiny-lm")
    cfg.model.model_dim = 16
    cfg.model.decoder.num_layers = 1
    cfg.model.decoder.layer.attention.num_heads = 2
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4, top_k=2))
    cfg.set(max_step=STEPS, batch_size=8, seq_len=16, sample_prompt=None, evalers={})
    cfg.writers = {"jsonl": JsonlWriter.Config()}
    cfg.mesh_rules = [(instance, [MeshShapeModifier.Config(mesh_shape=mesh)])]
    a = assemble(cfg, instance=instance)
    jax.config.update("jax_disable_most_optimizations", True)  # five compilations on few cores
    try:
        report = train(a.cfg, out=out, instance=a.instance).report
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    return {key: report[key] for key in ("step", "loss", "mesh", "tokens")}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_experts_on_four_processes_give_the_losses_of_one_device(tmp_path):
    four = str(tmp_path / "four")
    got, *_ = run_processes(PROGRAM, four, num_processes=4, instance="cpu-4", timeout_seconds=400)
    expected = run(tmp_path / "one", "cpu", {})
    assert got["mesh"]["expert"] == 4
    assert got["step"] == STEPS and got["tokens"] == expected["tokens"]

    def losses(name: str) -> list[float]:
        return [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")]

    assert len(losses("one")) == STEPS
    # Sums run in another order, in float32.
    np.testing.assert_allclose(losses("four"), losses("one"), rtol=1e-5)
