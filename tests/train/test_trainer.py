"""Runs of a few steps: what they log, save and evaluate, and what must not stop them."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import ClassVar

import jax
import numpy as np
import pytest

from axcore import experiments
from axcore.checkpoint import BaseCheckpointer
from axcore.collection import merge
from axcore.config import config_for
from axcore.errors import TrainError
from axcore.parallel import resolve_instance
from axcore.train import (
    BaseCallback,
    BaseWriter,
    Evaler,
    JsonlWriter,
    Trainer,
    optimizers,
    read_metrics,
    train,
)

STEPS = 5
EMA = 0.5
EVENTS = ("start", "step", "eval", "save", "end")


class Memory(BaseCheckpointer):
    """Keeps every saved step in this process: another checkpointer by configuration alone."""

    saved: ClassVar[dict] = {}

    def open(self, directory):
        self.key = str(directory)

    def save(self, step, arrays, extra=None):
        self.saved.setdefault(self.key, {})[step] = (jax.device_get(arrays), extra)

    def steps(self):
        return sorted(self.saved.get(self.key, {}))

    def latest_good(self):
        return max(self.steps(), default=None)

    def restore(self, step, abstract, *, allow_unexpected=False):
        return self.saved[self.key][step]

    def check(self):
        pass

    def wait(self):
        pass

    def close(self):
        pass


class Fails(BaseCallback):
    """Raises at one event and counts what comes after."""

    class Config(BaseCallback.Config):
        event: str = "step"

    later = 0

    def on_start(self, **kwargs):
        self._event("start")

    def on_step(self, **kwargs):
        self._event("step")

    def on_eval(self, **kwargs):
        self._event("eval")

    def on_save(self, **kwargs):
        self._event("save")

    def on_end(self, **kwargs):
        self._event("end")

    def _event(self, name):
        if self.cfg.event == "":
            Fails.later += 1
        if name == self.cfg.event:
            self.cfg = SimpleNamespace(event="")  # whatever comes now is counted
            raise RuntimeError(f"no {name} today")


class Keeps(BaseCallback):
    """Keeps all events; it must see what the failing ones miss."""

    seen: ClassVar[list] = []

    def on_start(self, **kwargs):
        self.seen.append(("start", kwargs["step"]))

    def on_step(self, **kwargs):
        self.seen.append(("step", kwargs["step"]))

    def on_eval(self, **kwargs):
        self.seen.append((f"eval {kwargs['name']}", kwargs["step"]))

    def on_save(self, **kwargs):
        self.seen.append(("save", kwargs["step"]))

    def on_end(self, **kwargs):
        self.seen.append(("end", kwargs["report"]["step"]))


class FullDisk(BaseWriter):
    """A sink that fails from its second write on."""

    written = 0

    def write(self, step, metrics):
        FullDisk.written += 1
        if FullDisk.written > 1:
            raise OSError(28, "No space left on device")


def micro() -> Trainer.Config:
    """tiny-lm, as small as it gets; no randomness, so that microbatches can be compared."""
    cfg = experiments.get("tiny-lm")
    cfg.model.model_dim = 16
    cfg.model.decoder.num_layers = 1
    cfg.model.decoder.layer.attention.num_heads = 2
    cfg.set(max_step=STEPS, batch_size=4, seq_len=16, sample_prompt=None)
    cfg.evalers["heldout"].max_documents = 1
    cfg.checkpointer = Memory.Config(save_every_n_steps=1)
    cfg.writers = {"jsonl": JsonlWriter.Config()}
    cfg.learner.ema_decay = EMA
    return cfg


def run(cfg, out):
    """Runs on this machine's CPU."""
    result = train(cfg, out=out, instance=resolve_instance("cpu"))
    rows = {r["step"]: r for r in read_metrics(out / "metrics.jsonl")}
    saved = Memory.saved.get(str(out / "checkpoints"), {})
    return SimpleNamespace(report=result.report, rows=rows, saved=saved, out=out, cfg=cfg)


def losses(finished):
    return [row["loss"] for row in finished.rows.values()]


@pytest.fixture(scope="module", autouse=True)
def _hurried_compiles():
    """XLA compiles in a third of the time; what is compared is compiled alike."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, _hurried_compiles):
    """A run with everything that may go wrong beside it, and what was alive before and after."""
    cfg = micro()
    cfg.evalers = {
        "heldout": Evaler.Config(max_documents=1),
        "average": Evaler.Config(max_documents=1, use_ema=True, every_n_steps=STEPS),
    }
    cfg.callbacks = {
        **{event: Fails.Config(event=event) for event in EVENTS},
        "keeps": Keeps.Config(),
    }
    cfg.writers = {"full": FullDisk.Config(), "jsonl": JsonlWriter.Config()}
    before = set(threading.enumerate())
    done = run(cfg, tmp_path_factory.mktemp("trainer") / "run")
    done.left_over = [t for t in threading.enumerate() if t not in before and not t.daemon]
    return done


# -- what a run does -------------------------------------------------------------------------


def test_every_step_is_logged_and_the_loss_falls(finished):
    assert list(finished.rows) == list(range(1, STEPS + 1))
    values = losses(finished)
    assert values[-1] < values[0]
    np.testing.assert_allclose(values[0], np.log(264), rtol=0.02)  # it knows nothing yet
    assert finished.rows[STEPS]["tokens"] == STEPS * 4 * 16


def test_the_report_on_disk_is_the_one_returned(finished):
    stored = json.loads((finished.out / "report.json").read_text())
    for name in ("step", "loss", "fingerprint", "instance", "num_parameters"):
        assert stored[name] == finished.report[name]
    assert stored["step"] == STEPS and stored["instance"] == "cpu"


def test_the_number_of_parameters_is_that_of_the_saved_arrays(finished):
    state, _ = finished.saved[STEPS]
    assert finished.report["num_parameters"] == sum(x.size for x in jax.tree.leaves(state.model))


def test_each_checkpoint_states_what_it_belongs_to(finished):
    _, extra = finished.saved[3]
    assert extra["config"] == finished.cfg.to_text() == (finished.out / "config.txt").read_text()
    assert finished.report["fingerprint"] == finished.cfg.fingerprint()
    assert extra["last"]["loss"] == finished.rows[3]["loss"]
    assert extra["plugins"]["axcore"] == finished.report["plugins"]["axcore"]
    assert extra["mesh"]["data"] == 1
    json.dumps(extra)


def test_no_thread_keeps_the_process_alive(finished):
    assert finished.left_over == []


# -- what must not stop it -------------------------------------------------------------------


def test_a_failing_callback_stands_in_the_report_and_gets_no_further_events(finished):
    expected = {e: f"RuntimeError: no {e} today (in on_{e})" for e in EVENTS}
    assert finished.report["failed_callbacks"] == expected
    assert json.loads((finished.out / "report.json").read_text())["failed_callbacks"] == expected
    assert Fails.later == 0


def test_the_other_callbacks_see_all_events(finished):
    seen = Keeps.seen
    assert seen[0] == ("start", 0) and seen[-1] == ("end", STEPS)
    everyone = range(1, STEPS + 1)
    assert [s for e, s in seen if e == "step"] == list(everyone)
    assert [s for e, s in seen if e == "save"] == list(everyone)
    assert [s for e, s in seen if e == "eval heldout"] == list(everyone)  # a quarter of 5 is 1
    assert [s for e, s in seen if e == "eval average"] == [STEPS]


def test_a_failing_writer_stands_in_the_report_and_the_others_go_on(finished):
    assert "No space left" in finished.report["failed_writers"]["full"]
    assert FullDisk.written == 2
    assert STEPS in finished.rows


# -- the moving average ----------------------------------------------------------------------


def test_the_average_is_evaluated_and_is_that_of_the_saved_parameters(finished):
    trainer = finished.cfg.instantiate(name="trainer")
    initial = jax.device_get(jax.jit(trainer.init_state)().model)
    average = jax.tree.map(lambda x: x.astype(np.float64), initial)
    for step in range(1, STEPS + 1):
        params = finished.saved[step][0].model
        average = jax.tree.map(lambda a, p: EMA * a + (1 - EMA) * p, average, params)
    kept = finished.saved[STEPS][0].learner.ema
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), kept, average)

    data = trainer.cfg.input.instantiate()
    data.prepare()
    batches = list(data.heldout(tuple(range(4)), max_documents=1))
    evaluate = jax.jit(trainer.eval_step)
    for name, params in (
        ("heldout", finished.saved[STEPS][0].model),
        ("average", jax.tree.map(np.float32, average)),
    ):
        total = None
        for batch in batches:
            one = evaluate(params, batch)
            total = one if total is None else merge(total, one)
        expected = float(total.losses["cross_entropy"].result())
        np.testing.assert_allclose(finished.report["evals"][name]["loss"], expected, rtol=1e-5)
    assert finished.report["evals"]["average"]["loss"] > finished.report["eval"]["loss"]


# -- microbatches ----------------------------------------------------------------------------


def test_microbatches_train_like_the_whole_batch(finished, tmp_path):
    cfg = micro().set(accumulation_steps=2)
    halves = run(cfg, tmp_path / "run")
    # float32 sums in another order, through five updates of AdamW, whose first ones are of the
    # gradients' signs: the smallest gradients count as much as the largest.
    np.testing.assert_allclose(losses(halves), losses(finished), rtol=5e-5)
    np.testing.assert_allclose(
        halves.report["eval"]["loss"], finished.report["eval"]["loss"], rtol=5e-5
    )


# -- steps that are not finite ---------------------------------------------------------------


def test_steps_that_are_not_finite_are_skipped_and_then_stop_the_run(tmp_path):
    cfg = micro().set(max_step=20, max_skipped_in_a_row=2)
    # The first update sends the parameters where the loss overflows.
    cfg.learner.optimizer = config_for(optimizers.sgd, learning_rate=1e38)
    cfg.learner.clip_global_norm = None
    cfg.evalers = {}
    with pytest.raises(TrainError, match="3 steps in a row had a loss or gradients that") as e:
        run(cfg, tmp_path / "run")
    assert e.value.exit_code == 4 and e.value.code == "AX717"
    rows = {r["step"]: r for r in read_metrics(tmp_path / "run" / "metrics.jsonl")}
    assert [r["skipped_steps"] for r in rows.values()] == [0.0, 1.0, 2.0]
    saved = Memory.saved[str(tmp_path / "run" / "checkpoints")]
    first, third = (saved[step][0].model for step in (1, 3))
    jax.tree.map(np.testing.assert_array_equal, first, third)


def test_one_bad_batch_changes_nothing_but_the_counters(finished):
    trainer = finished.cfg.instantiate(name="trainer")
    step = jax.jit(trainer.train_step)
    tokens = np.random.default_rng(0).integers(0, 256, (2, 4, 17), dtype=np.int32)
    good, other = ({"input_ids": t[:, :-1], "target_ids": t[:, 1:]} for t in tokens)
    bad = {**good, "input_ids": np.full((4, 16), 1000, np.int32)}  # ids outside give NaN

    def states(*batches):
        state = jax.jit(trainer.init_state)()
        for batch in batches:
            state, metrics = step(state, batch)
        return jax.device_get((state, metrics))

    (skipped, metrics), (plain, _) = states(good, bad, other), states(good, other)
    assert metrics["skipped_steps"] == 1 and metrics["skipped_in_a_row"] == 0
    assert np.isfinite(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, skipped.model, plain.model)
    jax.tree.map(np.testing.assert_array_equal, skipped.learner.ema, plain.learner.ema)
    jax.tree.map(np.testing.assert_array_equal, skipped.learner.optimizer, plain.learner.optimizer)
    assert (skipped.step, skipped.learner.updates) == (3, 2)
