"""Four real processes with two devices each train like one process with eight."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from axcore import experiments
from axcore.parallel import MeshShapeModifier
from axcore.train import JsonlWriter, assemble, read_metrics, train

# Starts all processes and prints what the first one reports.
DRIVER = """
import socket, subprocess, sys
count, worker, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
args = lambda i: [sys.executable, worker, str(i), str(count), port, out]
started = [subprocess.Popen(args(i), stdout=subprocess.PIPE, text=True) for i in range(count)]
try:
    outputs = [p.communicate(timeout=400)[0] for p in started]
finally:
    for p in started:
        p.kill()
assert not any(p.returncode for p in started), [p.returncode for p in started]
print(outputs[0].splitlines()[-1])
"""
WORKER = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import jax
from axcore.parallel import prepare_host, resolve_instance
process, count = int(sys.argv[1]), int(sys.argv[2])
prepare_host(resolve_instance("cpu-8"), num_processes=count)
jax.distributed.initialize("127.0.0.1:" + sys.argv[3], count, process)
from {Path(__file__).stem} import run
print(json.dumps(run(sys.argv[4])))
jax.distributed.shutdown()
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


def several(count, out):
    """Runs in processes of their own, in a network of their own where that is possible.

    The loopback's packets of 64 KiB wait for acknowledgements; with smaller ones a collective takes
    milliseconds instead of seconds.
    """
    worker = out.with_suffix(".py")
    worker.write_text(WORKER)
    command = [sys.executable, "-c", DRIVER, str(count), str(worker), str(out)]
    alone = ["unshare", "-n", "--"]
    if shutil.which("ip") and subprocess.run([*alone, "true"], capture_output=True).returncode == 0:
        network = 'ip link set lo up && ip link set lo mtu 1500 && exec "$0" "$@"'
        command = [*alone, "sh", "-c", network, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_processes_give_the_numbers_of_one(tmp_path):
    got, expected = several(4, tmp_path / "four"), run(tmp_path / "one")
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
