"""A process that trains ends by itself when training ends, finished or failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Training takes a few seconds; a process that waits for a thread waits for ever.
PATIENCE_SECONDS = 240

PROGRAM = """
import json, sys, threading
import jax
jax.config.update("jax_disable_most_optimizations", True)  # compiles in a third of the time
from axcore import experiments
from axcore.config import config_for
from axcore.errors import AxcoreError
from axcore.train import assemble, optimizers, train

out, fail = sys.argv[1], sys.argv[2] == "fail"
cfg = experiments.get("tiny-lm")
cfg.model.model_dim = 8
cfg.model.decoder.num_layers = 1
cfg.set(max_step=3, batch_size=4, seq_len=16, sample_prompt="The ")
cfg.evalers["heldout"].max_documents = 1
if fail:
    cfg.set(max_step=9, max_skipped_in_a_row=1, evalers={})
    cfg.learner.optimizer = config_for(optimizers.sgd, learning_rate=1e38)
    cfg.learner.clip_global_norm = None
a = assemble(cfg, instance="cpu")
code = 0
try:
    train(a.cfg, out=out, instance=a.instance)
except AxcoreError as error:
    code = error.exit_code
alive = [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
print(json.dumps({"alive": alive, "code": code}))
"""


def start(out, how):
    """Runs the program; a process that does not end is a failure that names what it waits for."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", PROGRAM, str(out), how],
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("how", "code"), [("finish", 0), ("fail", 4)])
def test_a_process_that_trains_exits_by_itself(tmp_path, how, code):
    seen = start(tmp_path / "run", how)
    assert seen == {"alive": [], "code": code}
    assert (tmp_path / "run" / "report.json").exists() == (how == "finish")
