"""Several real processes train as one: they agree on when to stop and go on together."""

import pytest

from axcore.testing import run_processes

PROGRAM = """
import json, os, signal
from axcore import experiments
from axcore.train import assemble, train
from axcore.train import run as module

out, what = args
cfg = experiments.get("tiny-lm")
cfg.model.model_dim = 16
cfg.model.decoder.num_layers = 1
cfg.set(max_step=6, batch_size=4, seq_len=16, sample_prompt=None)
cfg.evalers["heldout"].set(max_documents=1)
if process == 1 and what == "stop":
    log_step = module._Run._log_step
    def log(self, step, metrics):
        log_step(self, step, metrics)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
    module._Run._log_step = log
if process == 1 and what == "differ":
    cfg.seed = 1
a = assemble(cfg, instance="cpu-2")
result = train(a.cfg, out=out, instance=a.instance)
print(json.dumps([result.stopped_by, result.report["step"], result.report["loss"]]))
"""


def both(out, what):
    return run_processes(PROGRAM, str(out), what, num_processes=2, instance="cpu-2")


@pytest.mark.slow
@pytest.mark.timeout(700)
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
