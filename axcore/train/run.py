"""Running a trainer on the host: data, compiled steps, evaluation, saving, logging, stopping.

The loop never waits for the device between logged steps: metrics of a step are fetched after the
next step has been dispatched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from axcore import ops
from axcore.checkpoint import BaseCheckpointer
from axcore.collection import OutputCollection, expand_path
from axcore.data import BaseInput, BatchIterator, reference_bits_per_byte
from axcore.errors import TrainError
from axcore.module import flatten_specs
from axcore.parallel import (
    CompiledStep,
    ProgramTarget,
    batch_sharding,
    build_mesh,
    compile_step,
    make_global_array,
    prepare_host,
    process_rows,
    select_devices,
)
from axcore.plugins import Instance, host
from axcore.train._signals import GracefulStop
from axcore.train.callbacks import CallbackGroup
from axcore.train.loss_plot import plot_loss
from axcore.train.rundir import RunDir
from axcore.train.trainer import Trainer, TrainState
from axcore.train.writers import WriterGroup

__all__ = ["TrainResult", "train"]

_log = logging.getLogger("axcore.train")
# xz looks back over the whole text; past this size the yardstick costs more than it tells.
_REFERENCE_BYTES = 8 << 20


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
) -> TrainResult:
    """Runs an experiment to its end, from its newest good checkpoint if there is one.

    Args:
        cfg: The assembled config; see :func:`axcore.train.assemble`.
        out: Directory of the run.
        instance: The machine.
        extend: Whether to go on to a higher ``max_step`` than the directory's run had.
        notes: What else belongs in the report, such as what the rules did.

    Returns:
        The report and whether a signal ended the run early.

    Raises:
        AxcoreError: Bad input, before anything is written; or a run that failed (exit code 4).
    """
    start = time.perf_counter()
    host().check_required(cfg.required_plugins)
    run = RunDir(out)
    text = cfg.to_text()
    run.check(text, extend=extend)
    trainer: Trainer = cfg.instantiate(name="trainer")
    # Everything that user input can break is looked at before the directory is touched.
    data = trainer.cfg.input.instantiate()
    data.prepare()
    _check_vocabulary(trainer, data)
    prepare_host(instance, num_processes=1)
    devices = select_devices(instance)
    program = _Program(trainer, instance, devices)
    changes = run.prepare(text, provenance=_provenance(cfg), extend=extend)
    for change in changes:
        _log.warning("resuming with a changed config: %s", change)
    _log.info(
        "%s parameters, %s tokens (%d steps of %d x %d) on %s, mesh %s",
        f"{program.num_parameters:,}",
        f"{cfg.max_step * cfg.batch_size * cfg.seq_len:,}",
        cfg.max_step,
        cfg.batch_size,
        cfg.seq_len,
        instance.name,
        ", ".join(f"{axis}={n}" for axis, n in program.mesh.shape.items() if n > 1) or "of one",
    )
    if jax.process_index() == 0:
        data.tokenizer.save(run.tokenizer)
    return _Run(cfg, run, trainer, program, data, start, dict(notes or {})).finish()


def _check_vocabulary(trainer: Trainer, data: BaseInput) -> None:
    size = getattr(trainer.cfg.model, "vocab_size", None)
    if isinstance(size, int) and size < data.tokenizer.vocab_size:
        raise TrainError(
            f"the tokenizer makes ids up to {data.tokenizer.vocab_size - 1}, the model's "
            f"vocab_size is {size}",
            code="AX702",
            where="model.vocab_size",
            hint=f"set model.vocab_size={data.tokenizer.vocab_size}, or another input.tokenizer",
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


class _Program:
    """A trainer's programs on the devices of an instance."""

    def __init__(self, trainer: Trainer, instance: Instance, devices: list[Any]):
        cfg = trainer.cfg
        self.trainer = trainer
        self.mesh = build_mesh(cfg.mesh_shape, devices)
        self.target = ProgramTarget.for_instance(
            instance,
            self.mesh,
            cfg.sharding_rules,
            kernels={op: r.implementations for op, r in cfg.ops.items() if r.implementations},
            fallbacks=[op for op, rule in cfg.ops.items() if rule.fallback == "allow"],
        )
        self.abstract = trainer.abstract_state()
        self.shardings = trainer.state_shardings(self.mesh, cfg.sharding_rules)
        self.batch_sharding = batch_sharding(self.mesh, cfg.sharding_rules)
        self.rows = process_rows(self.batch_sharding, cfg.batch_size)
        self._whole = self.mesh.size == 1
        specs = trainer.model.parameter_specs()
        self.num_parameters = sum(
            math.prod(s.shape) for s in flatten_specs(specs).values() if s.kind == "parameter"
        )
        # Scalars (counters) are whole everywhere by nature; the rest is worth knowing.
        self.replicated = [
            {"path": leaf.path, "shape": list(leaf.shape), "reason": leaf.reason}
            for leaf in trainer.learner.state_axes(specs).replicated
            if leaf.shape
        ]
        self._eval: CompiledStep | None = None
        self.compile_seconds = 0.0

    def initial_state(self) -> TrainState:
        """Returns the state before the first step, sharded from the start."""
        return jax.jit(self.trainer.init_state, out_shardings=self.shardings)()

    def wanted_state(self) -> TrainState:
        """Returns shapes, dtypes and shardings of the state, to restore into."""
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            self.abstract,
            self.shardings,
        )

    def put(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns the global arrays of the rows that this process feeds."""
        if self._whole:
            return dict(batch)  # the compiled call moves host arrays faster than device_put
        size = self.trainer.cfg.batch_size
        return {
            name: make_global_array(
                rows, self.batch_sharding, (size, *rows.shape[1:]), rows=self.rows
            )
            for name, rows in batch.items()
        }

    def compile_train(self, state: TrainState, batch: Any) -> CompiledStep:
        """Compiles the training step; the state is donated."""

        def step(state: TrainState, batch: Any) -> Any:
            return self.trainer.train_step(state, batch, target=self.target)

        compiled = compile_step(
            step,
            state,
            batch,
            in_shardings=(self.shardings, self._batch_shardings(batch)),
            out_shardings=(self.shardings, None),
            donate=(0,),
            compiler_options=self.trainer.cfg.compiler_options,
        )
        self.compile_seconds += compiled.lower_seconds + compiled.compile_seconds
        return compiled

    def evaluate(self, params: Any, batch: Mapping[str, np.ndarray]) -> OutputCollection:
        """Runs the evaluation of one batch, compiled at the first call."""
        arrays = self.put(batch)
        if self._eval is None:

            def step(params: Any, batch: Any) -> Any:
                return self.trainer.eval_step(params, batch, target=self.target)

            self._eval = compile_step(
                step,
                params,
                arrays,
                in_shardings=(self.shardings.model, self._batch_shardings(arrays)),
            )
            self.compile_seconds += self._eval.lower_seconds + self._eval.compile_seconds
        return self._eval.call(params, arrays)

    def _batch_shardings(self, batch: Any) -> Any:
        return jax.tree.map(lambda _: self.batch_sharding, batch)


class _EvalProgram:
    """What an evaler sees of a program; see :class:`axcore.train.evaler.EvalProgram`."""

    def __init__(self, program: _Program, params: Any):
        self.rows, self._program, self._params = program.rows, program, params

    def __call__(self, batch: Any) -> OutputCollection:
        return self._program.evaluate(self._params, batch)


class _Run:
    """One run from its first or restored step to its end."""

    def __init__(
        self,
        source: Trainer.Config,
        run: RunDir,
        trainer: Trainer,
        program: _Program,
        data: BaseInput,
        start: float,
        notes: dict[str, Any],
    ):
        cfg = trainer.cfg
        # What follows from other values is resolved in `cfg`; what is recorded is what was stated.
        self.source = source
        self.run, self.trainer, self.program, self.data = run, trainer, program, data
        self.cfg, self.start, self.notes = cfg, start, notes
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
        self.timing = _Timing(start)

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
            return self.program.initial_state(), 0
        state, extra = self.checkpointer.restore(found, self.program.wanted_state())
        iterator.restore(extra["data"])
        self.last = dict(extra["last"])
        self.best = dict(extra["best"])
        self.evals = {k: dict(v) for k, v in extra["evals"].items()}
        _log.info("resuming from step %d of %s", found, self.run.root)
        return state, found

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
        self.kernels = _kernel_report(choices)
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
            stopped = stop.agreed()
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
        if skipped > self.cfg.max_skipped_in_a_row:
            raise TrainError(
                f"{skipped} steps in a row had gradients that are not finite",
                code="AX710",
                where=f"step {step}",
                hint="lower the learning rate or set learner.clip_global_norm; the parameters are "
                "those before the first of these steps",
                exit_code=4,
            )
        seconds = self.timing.step_seconds(step)
        per_step = self.cfg.batch_size * self.cfg.seq_len
        self.last = {
            **_flatten(values),
            "tokens": step * per_step,
            "step_seconds": seconds,
            "tokens_per_second": per_step / seconds if seconds else 0.0,
        }
        self._if_primary(self.writers.write, step, self.last)
        self.callbacks.emit("step", step=step, metrics=self.last)

    def _evaluate(self, names: list[str], state: TrainState, step: int) -> None:
        for name in names:
            evaler = self.evalers[name]
            params = state.model
            if evaler.cfg.use_ema:
                specs = self.trainer.model.parameter_specs()
                params = self.trainer.learner.ema_params(state.learner, params, specs)
            metrics = evaler.evaluate(_EvalProgram(self.program, params), self.data)
            self.evals[name] = metrics
            if "loss" in metrics:
                self.best[name] = min(metrics["loss"], self.best.get(name, math.inf))
            row = {f"{name}/{key}": value for key, value in metrics.items()}
            self._if_primary(self.writers.write, step, row)
            self.callbacks.emit("eval", step=step, name=name, metrics=metrics)

    def _save(self, state: TrainState, step: int, position: Mapping[str, Any]) -> None:
        extra = {
            "data": self.data.merge_states(_gather_json(position)),
            "last": _finite(self.last),
            "best": _finite(self.best),
            "evals": {name: _finite(metrics) for name, metrics in self.evals.items()},
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
        report: dict[str, Any] = {
            "step": step,
            "max_step": cfg.max_step,
            "loss": self.last.get("loss"),
            "eval": main,
            "evals": self.evals,
            "best": self.best,
            "tokens": step * cfg.batch_size * cfg.seq_len,
            "tokens_per_second": self.last.get("tokens_per_second"),
            "step_seconds": self.timing.mean_step_seconds,
            "compile_seconds": program.compile_seconds,
            "first_step_seconds": self.timing.first_step_seconds,
            "out": str(self.run.root),
            "stopped_by": stopped,
            "num_parameters": program.num_parameters,
            "fingerprint": self.source.fingerprint(),
            "instance": program.target.instance,
            "mesh": {str(name): int(size) for name, size in program.mesh.shape.items()},
            "kernels": self.kernels,
            "replicated_optimizer_state": program.replicated,
            "data": self.data.describe(),
            "plugins": {r.distribution: r.version for r in host().active_records()},
            "failed_writers": self.writers.failures,
            "failed_callbacks": self.callbacks.failures,
            "damaged_checkpoints": self.damaged,
            **self.notes,
        }
        if stopped is None:
            report["reference"] = self._reference(main)
            report["sample"] = self._sample(state)
        if self.is_primary:
            report["plot"] = plot_loss(self.run.metrics, self.run.loss_plot) or str(
                self.run.loss_plot
            )
            self.run.write_json(self.run.report, _json(report))
        before = len(self.callbacks.failures)
        self.callbacks.emit("end", report=report)
        if self.is_primary and len(self.callbacks.failures) > before:
            self.run.write_json(self.run.report, _json(report))
        return report

    def _reference(self, main: Mapping[str, float]) -> dict[str, float] | None:
        """Bits per byte of a general compressor on all of the text, beside the model's."""
        if "bits_per_byte" not in main:
            return None
        xz = reference_bits_per_byte(self.data.texts(), max_bytes=_REFERENCE_BYTES)
        return {"xz_bits_per_byte": xz, "uniform_bits_per_byte": 8.0}

    def _sample(self, state: TrainState) -> dict[str, str] | None:
        prompt = self.cfg.sample_prompt
        if prompt is None or jax.process_count() > 1:
            return None
        from axcore.inference import Generator, Sampling

        tokenizer = self.data.tokenizer
        generator = Generator(
            self.trainer.model,
            state.model,
            max_seq_len=getattr(self.cfg.model, "max_seq_len", None),
            eos_id=tokenizer.eos_id,
        )
        ids = tokenizer.encode(prompt).tolist()
        made = generator.generate([ids], 200, Sampling(temperature=0.7), slide=True)
        return {"prompt": prompt, "text": tokenizer.decode(made.tokens[0])}


class _Timing:
    """Time spent in training steps, without compilation, evaluation and saves."""

    def __init__(self, start: float):
        self._start = start
        self._mark = (start, 0)
        self._seconds, self._steps = 0.0, 0
        self.first_step_seconds: float | None = None

    def first_step(self, step: int) -> None:
        """The first step, which includes compiling, has finished."""
        now = time.perf_counter()
        self.first_step_seconds = now - self._start
        self._mark = (now, step)

    def step_seconds(self, step: int) -> float:
        """Returns seconds per step since the last call; 0 for the first step."""
        now, (then, before) = time.perf_counter(), self._mark
        self._mark = (now, step)
        if step <= before:
            return 0.0
        self._seconds += now - then
        self._steps += step - before
        return (now - then) / (step - before)

    @contextlib.contextmanager
    def paused(self, device_value: Any):
        """Leaves out what runs inside; waits for the device first."""
        jax.block_until_ready(device_value)
        begin = time.perf_counter()
        try:
            yield
        finally:
            then, step = self._mark
            self._mark = (then + time.perf_counter() - begin, step)

    @property
    def mean_step_seconds(self) -> float | None:
        """Mean over all logged steps but the first."""
        return self._seconds / self._steps if self._steps else None


def _flatten(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns host scalars by name; stacked layers are written one by one, arrays left out."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if not isinstance(value, Mapping):
            flat[name] = float(value)
            continue
        for path, array in value.items():
            for layer_path, index in expand_path(path):
                item = np.asarray(array)[index] if index else np.asarray(array)
                if item.ndim == 0:
                    flat[layer_path] = float(item)
    return flat


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _json(value: Any) -> Any:
    """Returns a value with everything that JSON lacks written as null or text."""
    if isinstance(value, Mapping):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)


def _kernel_report(choices: Any) -> list[dict[str, Any]]:
    """One row per distinct choice, with the sites it was made at."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for choice in choices:
        row = rows.setdefault(
            (choice.op, choice.chosen),
            {"op": choice.op, "chosen": choice.chosen, "sites": [], "refused": []},
        )
        if choice.site not in row["sites"]:
            row["sites"].append(choice.site)
        for refusal in choice.refused:
            entry = {"implementation": refusal.implementation, "reason": refusal.reason}
            if entry not in row["refused"]:
                row["refused"].append(entry)
    return list(rows.values())


def _gather_json(value: Mapping[str, Any]) -> list[Any]:
    """Returns the values of all processes; a collective call."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(len(data), np.int32)).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(data)] = data
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[:n])) for row, n in zip(rows, sizes.tolist(), strict=True)]
