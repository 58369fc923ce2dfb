"""Several real processes train as one: they agree on when to stop and go on together."""

import json
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, signal, sys
import jax
from axcore.parallel import prepare_host, resolve_instance
process, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
instance = resolve_instance("cpu-2")
prepare_host(instance, num_processes=2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
from axcore import experiments
from axcore.train import assemble, train

cfg = experiments.get("tiny-lm")
cfg.model.model_dim = 16
cfg.model.decoder.num_layers = 1
cfg.set(max_step=6, batch_size=4, seq_len=16, sample_prompt=None)
cfg.evalers["heldout"].set(max_documents=1)
from axcore.train import run as module

if process == 1 and sys.argv[4] == "stop":
    log_step = module._Run._log_step
    def log(self, step, metrics):
        log_step(self, step, metrics)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
    module._Run._log_step = log
if process == 1 and sys.argv[4] == "differ":
    cfg.seed = 1
a = assemble(cfg, instance="cpu-2")
result = train(a.cfg, out=out, instance=a.instance)
print(json.dumps([result.stopped_by, result.report["step"], result.report["loss"]]))
jax.distributed.shutdown()
"""


def both(out, what):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), port, str(out), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [p.communicate(timeout=200) for p in started]
    finally:
        for p in started:
            p.kill()
    for p, (_, errors) in zip(started, outputs, strict=True):
        assert p.returncode == 0, errors
    return [json.loads(o.splitlines()[-1]) for o, _ in outputs]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_signal_to_one_process_stops_all_at_one_saved_step_and_both_go_on(tmp_path):
    first, second = both(tmp_path / "run", "stop")
    assert second[0] == "SIGTERM" and first[0] is not None
    assert first[1] == second[1] < 6
    assert (tmp_path / "run" / "checkpoints" / str(first[1])).is_dir()
    first, second = both(tmp_path / "run", "go on")
    assert first == second and first[:2] == [None, 6]
    whole = both(tmp_path / "whole", "go on")[0]
    assert whole[2] == first[2]


def test_processes_with_different_configs_refuse_to_start(tmp_path):
    with pytest.raises(AssertionError, match="have different config"):
        both(tmp_path / "run", "differ")
