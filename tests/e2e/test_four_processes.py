"""Four real processes with two devices each train like one process with eight."""

from pathlib import Path

import jax
import numpy as np
import pytest

from axcore import experiments
from axcore.parallel import MeshShapeModifier
from axcore.testing import run_processes
from axcore.train import JsonlWriter, assemble, read_metrics, train

PROGRAM = f"""
import json
sys.path.insert(0, {str(Path(__file__).parent)!r})
from {Path(__file__).stem} import run
print(json.dumps(run(args[0])))
"""
MESH = {"data": 2, "fsdp": 2, "model": 2}
STEPS = 4


def run(out):
    """Trains a tiny model over three mesh axes; returns a few numbers of its report."""
    cfg = experiments.get("tiny-lm")
    cfg.model.model_dim = 16
    cfg.model.decoder.num_layers = 1
    cfg.model.decoder.layer.attention.num_heads = 2
    cfg.set(max_step=STEPS, batch_size=8, seq_len=16, sample_prompt=None)
    cfg.evalers["heldout"].set(max_documents=1, every_n_steps=STEPS)
    cfg.writers = {"jsonl": JsonlWriter.Config()}
    cfg.mesh_rules = [("cpu-8", [MeshShapeModifier.Config(mesh_shape=MESH)])]
    a = assemble(cfg, instance="cpu-8")
    jax.config.update("jax_disable_most_optimizations", True)  # five compilations on few cores
    try:
        report = train(a.cfg, out=out, instance=a.instance).report
    finally:
        jax.config.update("jax_disable_most_optimizations", False)
    return {key: report[key] for key in ("step", "loss", "evals", "mesh", "tokens")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_processes_give_the_numbers_of_one(tmp_path):
    four = str(tmp_path / "four")
    got, *_ = run_processes(PROGRAM, four, num_processes=4, instance="cpu-8", timeout_seconds=400)
    expected = run(tmp_path / "one")
    assert got["mesh"] == expected["mesh"] == {**expected["mesh"], **MESH}
    assert got["step"] == STEPS and got["tokens"] == expected["tokens"]

    def losses(name):
        return [r["loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")]

    assert len(losses("one")) == STEPS
    # The same program; between processes sums run in another order.
    np.testing.assert_allclose(losses("four"), losses("one"), rtol=1e-5)
    np.testing.assert_allclose(
        got["evals"]["heldout"]["loss"], expected["evals"]["heldout"]["loss"], rtol=1e-5
    )
