"""Running a trainer on the host: data, compiled steps, evaluation, saving, logging, stopping.

The loop never waits for the device between logged steps: metrics of a step are fetched after the
next step has been dispatched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from axcore import ops
from axcore.checkpoint import BaseCheckpointer
from axcore.data import BaseInput, BatchIterator
from axcore.errors import TrainError
from axcore.parallel import prepare_host, select_devices
from axcore.plugins import Instance, host
from axcore.train._compile_cache import CompileCacheUse
from axcore.train._flat_metrics import flat_metrics
from axcore.train._init_from import InitialWeights, check_is_run
from axcore.train._processes import check_same, gather_json
from axcore.train._program import EvalProgram, Program
from axcore.train._report import (
    finite,
    kernel_report,
    reference,
    sample,
    to_json,
)
from axcore.train._signals import GracefulStop
from axcore.train._timing import Timing
from axcore.train._utilization import utilization
from axcore.train.callbacks import CallbackGroup
from axcore.train.loss_plot import plot_loss
from axcore.train.rundir import Change, RunDir
from axcore.train.trainer import Trainer, TrainState
from axcore.train.writers import WriterGroup

__all__ = ["TrainResult", "train"]

_log = logging.getLogger("axcore.train")


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        report: What ``report.json`` holds.
        stopped_by: Name of the signal that ended the run early, or None.
    """

    report: Mapping[str, Any]
    stopped_by: str | None


def train(
    cfg: Trainer.Config,
    *,
    out: str | Path,
    instance: Instance,
    extend: bool = False,
    notes: Mapping[str, Any] | None = None,
    init_from: str | Path | None = None,
) -> TrainResult:
    """Runs an experiment to its end, from its newest good checkpoint if there is one.

    Args:
        cfg: The assembled config; see :func:`axcore.train.assemble`.
        out: Directory of the run.
        instance: The machine.
        extend: Whether to go on to a higher ``max_step`` than the directory's run had.
        notes: What else belongs in the report, such as what the rules did.
        init_from: A model directory whose parameters a new run starts with; one that goes on from
            a checkpoint of its own does not look at it.

    Returns:
        The report and whether a signal ended the run early.

    Raises:
        AxcoreError: Bad input, before anything is written; or a run that failed (exit code 4).
    """
    with CompileCacheUse() as cache_use:
        return _train(cfg, Path(out), instance, extend, dict(notes or {}), init_from, cache_use)


def _train(
    cfg: Trainer.Config,
    out: Path,
    instance: Instance,
    extend: bool,
    notes: dict[str, Any],
    init_from: str | Path | None,
    cache_use: CompileCacheUse,
) -> TrainResult:
    start = time.perf_counter()
    host().check_required(cfg.required_plugins)
    run = RunDir(out)
    text = cfg.to_text()
    run.check(text, extend=extend)
    trainer: Trainer = cfg.instantiate(name="trainer")
    # Everything that user input can break is looked at before the directory is touched.
    data = trainer.cfg.input.instantiate()
    data.prepare()
    _check_sizes(trainer, data)
    _check_prompt(trainer, data)
    # Whoever started several processes has prepared each of them, before it did.
    if not jax.distributed.is_initialized():
        prepare_host(instance)
    devices = select_devices(instance)
    program = Program(trainer, instance, devices)
    ready = _Run(cfg, run, trainer, program, data, start, notes, cache_use)
    check_is_run(ready.checkpointer, ready.run)
    if init_from is not None:
        ready.start_from(init_from)
    for evaler in ready.evalers.values():
        evaler.check(data)
    check_same(text)
    sizes = trainer.cfg  # of which none is derived any more
    is_primary = jax.process_index() == 0
    with run.alone() if is_primary else contextlib.nullcontext():
        changes: tuple[Change, ...] = ()
        if is_primary:
            if run.is_replaced_by(text):
                _log.info("another start, which made no step, left %s: it is replaced", run.config)
            changes = run.prepare(
                text, provenance=_provenance(cfg), tokenizer=data.tokenizer, extend=extend
            )
        for change in changes:
            _log.warning("resuming with a changed config: %s", change)
        _log.info(
            "%s parameters, %s tokens (%d steps of %d x %d) on %s, mesh %s",
            f"{program.num_parameters:,}",
            f"{sizes.max_step * sizes.batch_size * sizes.seq_len:,}",
            sizes.max_step,
            sizes.batch_size,
            sizes.seq_len,
            instance.name,
            ", ".join(f"{axis}={n}" for axis, n in program.mesh.shape.items() if n > 1) or "of one",
        )
        return ready.finish()


def _check_prompt(trainer: Trainer, data: BaseInput) -> None:
    """The prompt is used after the last step, and must not cost the report of a whole run."""
    prompt = trainer.cfg.sample_prompt
    if prompt is not None and data.tokenizer is None:
        raise TrainError(
            f"{type(data).__name__} has no tokenizer for the prompt {prompt!r}",
            code="AX706",
            where="sample_prompt",
            hint="None trains without a sample",
        )
    if prompt is not None and data.tokenizer is not None and not len(data.tokenizer.encode(prompt)):
        raise TrainError(
            f"the prompt {prompt!r} has no tokens",
            code="AX706",
            where="sample_prompt",
            hint="None trains without a sample",
        )


def _check_sizes(trainer: Trainer, data: BaseInput) -> None:
    limit, seq_len = getattr(trainer.cfg.model, "max_seq_len", None), trainer.cfg.seq_len
    if isinstance(limit, int) and seq_len > limit:
        raise TrainError(
            f"rows have {seq_len} tokens, the model takes at most {limit}",
            code="AX703",
            where="seq_len",
            hint=f"set model.max_seq_len={seq_len}, or seq_len={limit}",
        )
    size = getattr(trainer.cfg.model, "vocab_size", None)
    needed = 0 if data.tokenizer is None else data.tokenizer.vocab_size
    if isinstance(size, int) and size < needed:
        raise TrainError(
            f"the tokenizer makes ids up to {needed - 1}, the model's vocab_size is {size}",
            code="AX702",
            where="model.vocab_size",
            hint=f"set model.vocab_size={needed}, or another input.tokenizer",
        )


def _provenance(cfg: Trainer.Config) -> dict[str, Any]:
    """Returns the history of each field that anyone but a default has set."""
    fields: dict[str, Any] = {}
    for path, node in cfg.walk():
        for name in node.fields():
            full = f"{path}.{name}" if path else name
            history = cfg.history(full)
            if any(event.kind != "default" for event in history):
                fields[full] = [event.to_json() for event in history]
    return fields


class _Run:
    """One run from its first or restored step to its end."""

    def __init__(
        self,
        source: Trainer.Config,
        run: RunDir,
        trainer: Trainer,
        program: Program,
        data: BaseInput,
        start: float,
        notes: dict[str, Any],
        cache_use: CompileCacheUse,
    ):
        cfg = trainer.cfg
        # What follows from other values is resolved in `cfg`; what is recorded is what was stated.
        self.source = source
        self.run, self.trainer, self.program, self.data = run, trainer, program, data
        self.cfg, self.start, self.notes, self.cache_use = cfg, start, notes, cache_use
        self.checkpointer: BaseCheckpointer = cfg.checkpointer.instantiate()
        self.checkpointer.open(run.checkpoints)
        self.evalers = {name: e.instantiate() for name, e in cfg.evalers.items()}
        self.writers = WriterGroup({name: w.instantiate() for name, w in cfg.writers.items()})
        self.callbacks = CallbackGroup({n: c.instantiate() for n, c in cfg.callbacks.items()})
        self.is_primary = jax.process_index() == 0
        self.best: dict[str, float] = {}
        self.evals: dict[str, dict[str, float]] = {}
        self.last: dict[str, float] = {}
        self.kernels: list[dict[str, Any]] = []
        self.damaged: dict[str, str] = {}
        self.timing = Timing(start)
        self.init_from: str | Path | None = None
        self.weights: InitialWeights | None = None

    def finish(self) -> TrainResult:
        """Runs to the end and returns the result."""
        stopped: str | None = None
        iterator = self.data.iterator(self.program.rows)
        try:
            with GracefulStop() as stop:
                state, step = self._restore_or_init(iterator)
                self._open(step)
                try:
                    state, step, stopped = self._loop(state, step, iterator, stop)
                finally:
                    self._if_primary(self.writers.close)
                # The last save is waited for under the handlers: a first signal must not break it.
                self.checkpointer.close()
        except BaseException:
            with contextlib.suppress(Exception):  # the error under way is the one to show
                self.checkpointer.close()
            raise
        finally:
            iterator.close()
        report = self._report(state, step, stopped)
        return TrainResult(report, stopped)

    # -- start ---------------------------------------------------------------------------

    def _restore_or_init(self, iterator: BatchIterator) -> tuple[TrainState, int]:
        found = self.checkpointer.latest_good()
        # Kept here: a step saved anew is no longer damaged, but the report tells of it.
        skipped = getattr(self.checkpointer, "skipped", {})
        self.damaged = {str(step): reason for step, reason in skipped.items()}
        if found is None:
            return self._first_state(), 0
        state, extra = self.checkpointer.restore(found, self.program.wanted_state())
        iterator.restore(extra["data"])
        self.last = dict(extra["last"])
        self.best = dict(extra["best"])
        self.evals = {k: dict(v) for k, v in extra["evals"].items()}
        _log.info("resuming from step %d of %s", found, self.run.root)
        return state, found

    def start_from(self, directory: str | Path) -> None:
        """Lets a new run begin with the parameters of a model directory, checked now."""
        self.init_from = directory
        if self.checkpointer.steps():
            _log.info("the run goes on from its own checkpoint; %s is not looked at", directory)
        else:
            self.weights = self._weights()

    def _weights(self) -> InitialWeights | None:
        if self.init_from is None or self.weights is not None:
            return self.weights
        weights = InitialWeights(self.init_from, self.cfg.checkpointer.instantiate())
        try:
            weights.check(self.program.abstract.model, self.program.optional)
        except BaseException:
            weights.close()
            raise
        tokenizer = self.data.tokenizer
        if tokenizer is not None and weights.tokenizer_differs(tokenizer):
            _log.warning(
                "the tokenizer in %s makes other ids than the experiment's: set input.tokenizer",
                weights.run.tokenizer,
            )
        return weights

    def _first_state(self) -> TrainState:
        weights = self._weights()
        if weights is None:
            return self.program.initial_state()
        try:
            params = weights.read(
                self.program.wanted_state().model, self.program.initial_parameters
            )
        finally:
            weights.close()
        self.notes["init_from"] = {
            "directory": str(weights.run.root),
            "step": weights.step,
            "initialized": list(weights.fresh),
            "dropped": list(weights.dropped),
        }
        _log.info("starting with the parameters of %s", weights.run.root)
        if weights.fresh:
            _log.info("not there, and so initialized: %s", ", ".join(weights.fresh))
        if weights.dropped:
            _log.info("state of its recipe, and so dropped: %s", ", ".join(weights.dropped))
        return self.program.initial_state(params)

    def _open(self, step: int) -> None:
        max_step = self.cfg.max_step
        self._if_primary(self.writers.open, self.run.root, step=step, max_step=max_step)
        self.callbacks.emit("start", out=self.run.root, step=step, max_step=max_step)

    def _if_primary(self, call: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if self.is_primary:
            call(*args, **kwargs)

    # -- the loop ------------------------------------------------------------------------

    def _loop(
        self, state: TrainState, step: int, iterator: BatchIterator, stop: GracefulStop
    ) -> tuple[TrainState, int, str | None]:
        """Steps until the end or a stop; returns the state, finished steps and who stopped it."""
        max_step = self.cfg.max_step
        if step >= max_step:
            return state, step, None
        batch: dict[str, Any] | None = self.program.put(next(iterator))
        with ops.record_choices() as choices:
            call = self.program.compile_train(state, batch).call
        self.kernels = kernel_report(choices)
        for row in self.kernels:
            if row["fallback"]:
                _log.warning("op %s falls back to %s", row["op"], row["chosen"])
        pending: tuple[int, Any] | None = None
        stopped: str | None = None
        while step < max_step and stopped is None:
            batch = self.program.put(next(iterator)) if batch is None else batch
            state, metrics = call(state, batch)
            batch = None
            step += 1
            if self.timing.first_step_seconds is None:
                jax.block_until_ready(metrics["loss"])
                self.timing.first_step(step)
            # The step before has finished by now or soon will; this one is under way.
            if pending is not None:
                self._log_step(*pending)
            is_logged = step % self.cfg.log_every_n_steps == 0 or step == max_step
            pending = (step, metrics) if is_logged else None
            evalers = [n for n, e in self.evalers.items() if e.should_run(step, max_step)]
            saves = self.checkpointer.should_save(step, max_step)
            if jax.process_count() == 1 or is_logged or evalers or saves:
                stopped = stop.agreed()  # of several processes a collective call: not every step
            if evalers or saves or stopped is not None:
                if pending is not None:
                    self._log_step(*pending)
                    pending = None
                with self.timing.paused(state.step):
                    self._evaluate(evalers, state, step)
                    if saves or stopped is not None:
                        self._save(state, step, iterator.state())
        if pending is not None:
            self._log_step(*pending)
        return state, step, stopped if step < max_step else None

    def _log_step(self, step: int, metrics: Any) -> None:
        values = jax.device_get(metrics)
        skipped = int(values.pop("skipped_in_a_row"))
        never_learned = step == self.cfg.max_step and skipped == step
        if skipped > self.cfg.max_skipped_in_a_row or never_learned:
            raise TrainError(
                f"{skipped} steps in a row had a loss or gradients that are not finite",
                code="AX717",
                where=f"step {step}",
                hint="look at the losses of these steps, lower the learning rate or set "
                "learner.clip_global_norm; the parameters are those before the first of them",
                exit_code=4,
            )
        seconds = self.timing.step_seconds(step)
        per_step = self.cfg.batch_size * self.cfg.seq_len
        scalars, vectors = flat_metrics(values)
        self.last = {
            **scalars,
            "tokens": step * per_step,
            "step_seconds": seconds,
            "tokens_per_second": per_step / seconds if seconds else 0.0,
        }
        self._if_primary(self.writers.write, step, {**self.last, **vectors})
        self.callbacks.emit("step", step=step, metrics=self.last)

    def _evaluate(self, names: list[str], state: TrainState, step: int) -> None:
        for name in names:
            evaler = self.evalers[name]
            params = state.model
            if evaler.cfg.use_ema:
                specs = self.trainer.model.parameter_specs()
                params = self.trainer.learner.ema_params(state.learner, params, specs)
            metrics = evaler.evaluate(EvalProgram(self.program, params), self.data)
            self.evals[name] = metrics
            if "loss" in metrics:
                self.best[name] = min(metrics["loss"], self.best.get(name, math.inf))
            row = {f"{name}/{key}": value for key, value in metrics.items()}
            self._if_primary(self.writers.write, step, row)
            self.callbacks.emit("eval", step=step, name=name, metrics=metrics)

    def _save(self, state: TrainState, step: int, position: Mapping[str, Any]) -> None:
        extra = {
            "data": self.data.merge_states(gather_json(position)),
            "last": finite(self.last),
            "best": finite(self.best),
            "evals": {name: finite(metrics) for name, metrics in self.evals.items()},
            "config": self.source.to_text(),
            "plugins": {r.distribution: r.version for r in host().active_records()},
            "mesh": {str(name): int(size) for name, size in self.program.mesh.shape.items()},
        }
        self.checkpointer.save(step, state, extra)
        self.callbacks.emit("save", step=step)

    # -- the end -------------------------------------------------------------------------

    def _report(self, state: TrainState, step: int, stopped: str | None) -> dict[str, Any]:
        cfg, program = self.cfg, self.program
        main = next(iter(self.evals.values()), {})
        tokens = cfg.batch_size * cfg.seq_len
        # Both figures are of the same steps. A run that was found finished has those of its last.
        seconds = self.timing.mean_step_seconds or self.last.get("step_seconds") or None
        rate = None if seconds is None else tokens / seconds
        report: dict[str, Any] = {
            "step": step,
            "max_step": cfg.max_step,
            "loss": self.last.get("loss"),
            "eval": main,
            "evals": self.evals,
            "best": self.best,
            "tokens": step * tokens,
            "tokens_per_second": rate,
            "step_seconds": seconds,
            **utilization(self.source, program.instance, rate),
            "compile_seconds": program.compile_seconds,
            "memory": None if program.memory is None else program.memory.to_json(),
            "compile_cache": self.cache_use.to_json(),
            "first_step_seconds": self.timing.first_step_seconds,
            "out": str(self.run.root),
            "stopped_by": stopped,
            "num_parameters": program.num_parameters,
            "fingerprint": self.source.fingerprint(),
            "instance": program.target.instance,
            "mesh": {str(name): int(size) for name, size in program.mesh.shape.items()},
            "kernels": self.kernels,
            "compiler_options": program.compiler_options,
            "replicated_optimizer_state": program.replicated,
            "data": self.data.describe(),
            "plugins": {r.distribution: r.version for r in host().active_records()},
            "failed_writers": self.writers.failures,
            "failed_callbacks": self.callbacks.failures,
            "damaged_checkpoints": self.damaged,
            **self.notes,
        }
        if stopped is None:
            if "bits_per_byte" in main:
                report["reference"] = reference(self.data)
            if cfg.sample_prompt is not None and jax.process_count() == 1:
                report["sample"] = sample(program, state.model, self.data, cfg.sample_prompt)
        if self.is_primary:
            report["plot"] = plot_loss(self.run.metrics, self.run.loss_plot) or str(
                self.run.loss_plot
            )
            self.run.write_json(self.run.report, to_json(report))
        before = len(self.callbacks.failures)
        self.callbacks.emit("end", report=report)
        if self.is_primary and len(self.callbacks.failures) > before:
            self.run.write_json(self.run.report, to_json(report))
        return report
