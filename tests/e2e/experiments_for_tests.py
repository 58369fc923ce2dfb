"""Experiments that the end-to-end tests run in processes of their own."""

from __future__ import annotations

import os
import signal
import threading
import time

from axcore import experiments
from axcore.train import BaseCallback


class Saboteur(BaseCallback):
    """Does what the environment asks: AXTEST_SIGNAL, AXTEST_AT_STEP, AXTEST_IN_SAVE_OF."""

    def on_step(self, *, step, metrics):
        """Sends the signal when the step comes."""
        if os.environ.get("AXTEST_AT_STEP") == str(step):
            # To this thread: its handler has run when the call returns.
            signal.raise_signal(int(os.environ["AXTEST_SIGNAL"]))
            if os.environ.get("AXTEST_TWICE"):
                signal.raise_signal(int(os.environ["AXTEST_SIGNAL"]))

    def on_save(self, *, step):
        """Kills the process from a thread while the checkpoint is being written."""
        if os.environ.get("AXTEST_IN_SAVE_OF") == str(step):
            delay = float(os.environ["AXTEST_DELAY"])

            def kill():
                time.sleep(delay)
                os.kill(os.getpid(), signal.SIGKILL)

            threading.Thread(target=kill, daemon=True).start()


def micro():
    """tiny-lm, as small as it gets, with dropout so that keys matter."""
    cfg = experiments.get("tiny-lm")
    cfg.model.model_dim = 16
    cfg.model.decoder.num_layers = 2
    cfg.model.dropout.rate = 0.1
    cfg.model.decoder.layer.dropout.rate = 0.1
    cfg.learner.ema_decay = 0.9
    cfg.set(max_step=12, batch_size=8, seq_len=16, sample_prompt=None)
    cfg.checkpointer.set(save_every_n_steps=3, keep_last_n=2)
    cfg.evalers["heldout"].set(max_documents=1, every_n_steps=6)
    cfg.callbacks = {"saboteur": Saboteur.Config()}
    return cfg
