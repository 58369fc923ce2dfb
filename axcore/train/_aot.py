"""Compiling a training step ahead of time, for a machine that need not be here.

The step is the one that training runs (:class:`axcore.train._program.Program`), lowered from shapes
on the topology devices of the platform's compiler: no array is made, no data is read.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from axcore import ops
from axcore.errors import AotError, AxcoreError
from axcore.parallel import LoweredStep, bytes_per_device
from axcore.parallel.aot import Compiler, CompileResult, compile_for, compiler_for
from axcore.parallel.cost import (
    MemoryEstimate,
    ProgramCost,
    count_flops,
    memory_estimate,
    model_flops,
)
from axcore.plugins import Instance, host
from axcore.train._aot_advice import Tried, smallest_instance, try_knobs
from axcore.train._aot_report import AotReport, Knob, Substitution
from axcore.train._program import Program
from axcore.train._report import kernel_report

if TYPE_CHECKING:
    from axcore.train.assemble import Assembled
    from axcore.train.trainer import Trainer

__all__ = ["AotReport", "Knob", "Substitution", "aot"]

#: Attribute of an instance that names kernels (``OP.IMPLEMENTATION``, separated by spaces) whose
#: stand-ins are accepted without asking; ``*`` for all.
STAND_INS = "aot_stand_ins"
_ADVICE_SECONDS = 600.0


def aot(
    assembled: Assembled,
    *,
    experiment: str | None = None,
    stand_in: bool = False,
    advice: bool = True,
    advice_seconds: float = _ADVICE_SECONDS,
    cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
    reassemble: Callable[[str], Assembled] | None = None,
) -> AotReport:
    """Compiles an experiment's training step for the machine that it was assembled for.

    Args:
        assembled: The experiment on its machine; see :func:`axcore.train.assemble`.
        experiment: Its name, for the report.
        stand_in: Whether kernels that the compiler cannot build may be replaced by stand-ins.
        advice: Whether to try what might help when the step does not fit.
        advice_seconds: How long that may take in all.
        cache: Directory of earlier results, by the hash of program, compiler, options and machine;
            None compiles anew.
        progress: Told what is going on, a line at a time.
        reassemble: Fits the experiment to another instance by name, to look for one that is large
            enough; None keeps the config as it is.

    Returns:
        The report; ``report.fits`` says whether the step fits.

    Raises:
        AotError: There is no compiler, its package is missing, a kernel cannot be built and has no
            accepted stand-in, or the compiler fails.
        AxcoreError: The config does not fit the machine.

    Example:
        >>> from axcore import experiments
        >>> from axcore.train import assemble
        >>> small = assemble(experiments.get("tiny-lm"), instance="cpu")
        >>> aot(small).fits  # doctest: +SKIP
        True
    """
    cfg, instance = assembled.cfg, assembled.instance
    host().check_required(cfg.required_plugins)
    compiler = compiler_for(instance)
    compiler.prepare()
    say = progress or (lambda text: None)
    limit = compiler.memory_limit_bytes(instance)
    build = _Build(instance, compiler, stand_in, cache, say)
    step = build.step(cfg)
    fits, needed = step.verdict(limit)
    tried: tuple[Knob, ...] = ()
    larger: str | None = None
    if not fits and advice:
        say(f"does not fit: needs {needed} of {limit} bytes on each device; trying what may help")
        base = Tried(step.estimate, needed, limit)
        tried = try_knobs(cfg, instance, base, build.attempt, seconds=advice_seconds, progress=say)
        if not any(knob.fits for knob in tried):
            larger = smallest_instance(
                assembled, base, compiler.memory_limit_bytes, reassemble=reassemble
            )
    notes = [*step.notes]
    predicted, missing = _predicted(cfg, instance)
    notes += [missing] if missing else []
    result = step.result
    return AotReport(
        experiment=experiment,
        instance=instance.name,
        compiled=result is not None,
        cached=result is not None and result.cached,
        fits=fits,
        devices=instance.num_devices,
        mesh={str(name): int(size) for name, size in step.program.mesh.shape.items()},
        hbm_bytes=step.hbm_bytes(),
        hbm_limit_bytes=limit,
        host_bytes=step.host_bytes(),
        largest_buffers=() if result is None else result.buffers,
        flops=step.flops(),
        collectives=() if result is None else result.collectives,
        predicted=predicted,
        lower_seconds=step.lower_seconds,
        compile_seconds=None if result is None else result.compile_seconds,
        compile_peak_rss_bytes=None if result is None else result.peak_rss_bytes,
        compiler={"name": compiler.name, "version": compiler.version()},
        substituted=step.substituted,
        kernels=tuple(step.kernels),
        advice=tried,
        smallest_instance=larger,
        blind_spots=tuple(compiler.blind_spots),
        notes=tuple(notes),
        rules=assembled.rules.to_json(),
    )


@dataclasses.dataclass(frozen=True)
class _Build:
    """How steps become programs of one machine."""

    instance: Instance
    compiler: Compiler
    stand_in: bool
    cache: Path | None
    progress: Callable[[str], None]

    def step(self, cfg: Trainer.Config) -> _Step:
        """Lowers and compiles the training step of a config."""
        compiler, instance = self.compiler, self.instance
        trainer = cfg.instantiate(name="trainer")
        rows = trainer.cfg.input.instantiate().example()
        stand_ins = {f"{op}.{name}": to for (op, name), (to, _) in compiler.stand_ins.items()}
        devices = compiler.devices(instance) if compiler.compiles else None
        program = Program(trainer, instance, devices, stand_ins=stand_ins)
        lowered: LoweredStep | None = None
        start = time.perf_counter()
        with ops.record_choices() as choices:
            batch = program.wanted_batch(rows)
            if compiler.compiles:
                lowered = program.lower_train(program.wanted_state(), batch)
            jaxpr = lowered.jaxpr if lowered is not None else program.trace_train(batch)
        seconds = time.perf_counter() - start
        substituted = self._substituted(choices)
        result = None
        if lowered is not None:
            self.progress(
                f"compiling for {instance.num_devices} devices of {instance.name} with "
                f"{compiler.name} {compiler.version()}"
            )
            result = compile_for(
                instance,
                compiler,
                lowered,
                dict(program.mesh.shape),
                program.compiler_options,
                cache=self.cache,
            )
        estimate, note = _estimate(cfg, instance, choices)
        return _Step(
            cfg=cfg,
            program=program,
            compiler=compiler,
            result=result,
            estimate=estimate,
            cost=count_flops(jaxpr),
            kernels=kernel_report(choices),
            substituted=substituted,
            lower_seconds=seconds,
            estimate_note=note,
        )

    def attempt(self, cfg: Trainer.Config) -> tuple[bool, int | None, float]:
        """Returns (whether a config fits, bytes it needs, seconds of compiling)."""
        step = self.step(cfg)
        fits, needed = step.verdict(self.compiler.memory_limit_bytes(self.instance))
        result = step.result
        seconds = 0.0 if result is None or result.cached else result.compile_seconds
        return fits, needed, seconds

    def _substituted(self, choices: Any) -> tuple[Substitution, ...]:
        """Returns what stands in for kernels that cannot be built, if that is accepted."""
        found: dict[tuple[str, str, str], Substitution] = {}
        for choice in choices:
            if choice.stand_in is not None:
                _, reason = self.compiler.stand_ins[choice.op, choice.chosen]
                found[choice.site, choice.op, choice.chosen] = Substitution(
                    choice.site, choice.op, choice.chosen, choice.stand_in, reason
                )
        declared = self.instance.attributes.get(STAND_INS, "").split()
        refused = [
            s
            for s in found.values()
            if not (self.stand_in or "*" in declared or f"{s.op}.{s.chosen}" in declared)
        ]
        if refused:
            names = dict.fromkeys(f"{s.op}.{s.chosen} ({s.reason})" for s in refused)
            raise AotError(
                f"{self.compiler.name} cannot build {'; '.join(names)}",
                code="AX483",
                where=", ".join(dict.fromkeys(s.site for s in refused)) or self.instance.name,
                hint="--stand-in compiles "
                + ", ".join(dict.fromkeys(s.compiled for s in refused))
                + " in its place and says so in the report",
            )
        return tuple(found.values())


@dataclasses.dataclass(frozen=True)
class _Step:
    """A training step, compiled if there is a compiler."""

    cfg: Trainer.Config
    program: Program
    compiler: Compiler
    result: CompileResult | None
    estimate: MemoryEstimate | None
    cost: ProgramCost
    kernels: list[dict[str, Any]]
    substituted: tuple[Substitution, ...]
    lower_seconds: float
    estimate_note: str | None

    def verdict(self, limit: int) -> tuple[bool, int | None]:
        """Returns (whether it fits, bytes it needs on a device)."""
        if self.result is not None:
            decides = self.compiler.reports_out_of_memory
            return self.result.fits(limit, compiler_decides=decides), self.result.needed_bytes()
        needed = self.hbm_bytes()["total"]
        return needed <= limit, needed

    def hbm_bytes(self) -> dict[str, int]:
        """Returns kind -> bytes on one device."""
        held = {
            "parameters": _device_bytes(self.program.abstract.model, self.program.shardings.model),
            "optimizer": _device_bytes(
                self.program.abstract.learner, self.program.shardings.learner
            ),
        }
        memory = None if self.result is None else self.result.memory
        modelled = 0 if self.estimate is None else self.estimate.activations
        if memory is not None:
            activations = min(memory.temporaries, modelled)
            return held | {
                "other_arguments": max(0, memory.arguments - sum(held.values())),
                "outputs": memory.outputs - memory.aliased,
                "activations": activations,
                "temporaries": memory.temporaries - activations,
                "code": memory.code,
                "total": memory.peak,
            }
        rest = {"activations": modelled, "temporaries": 0, "code": 0}
        if self.estimate is not None:
            rest["temporaries"] = self.estimate.gradients + self.estimate.workspace
        total = sum(held.values()) + sum(rest.values())
        refused = None if self.result is None else self.result.out_of_memory
        if refused is not None and refused.needed_bytes is not None:
            total = refused.needed_bytes
        return held | rest | {"total": total}

    def host_bytes(self) -> int:
        """Returns bytes in host memory for one device."""
        if self.result is not None and self.result.memory is not None:
            return self.result.memory.host
        return 0 if self.estimate is None else self.estimate.host

    def flops(self) -> dict[str, float]:
        """Returns FLOPs of a step on all devices."""
        cfg = self.program.trainer.cfg
        model = model_flops(self.cfg)
        tokens = cfg.batch_size * cfg.seq_len
        return {
            "model_causal": model.train.causal * tokens,
            "model_noncausal": model.train.full * tokens,
            "hardware": self.cost.flops,
            "hardware_matmul": self.cost.matmul_flops,
            "recompute": self.cost.recompute_flops,
            "tokens": tokens,
        }

    @property
    def notes(self) -> list[str]:
        """What was assumed or left out."""
        notes = [self.estimate_note] if self.estimate_note else []
        if self.result is None:
            notes.append(
                f"{self.compiler.name}: no compiler to be had; memory is the memory model's, "
                "FLOPs are those of the traced step"
            )
        elif self.result.out_of_memory is not None:
            notes.append("the compiler stopped: bytes by kind are the memory model's")
        elif self.estimate is not None:
            notes.append(
                "the compiler gives one sum for all that is temporary: activations are the memory "
                "model's part of it"
            )
        if self.substituted:
            notes.append("memory and time of substituted kernels are those of their stand-ins")
        if self.cost.uncounted:
            notes.append(f"FLOPs are not known of: {', '.join(self.cost.uncounted)}")
        if self.cost.unknown_loops:
            paths = ", ".join(loop.path for loop in self.cost.unknown_loops)
            notes.append(f"loops without a trip count, counted once: {paths}")
        return notes


def _device_bytes(shapes: Any, shardings: Any) -> int:
    """Bytes on one device of the arrays that live in its own memory."""
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(shardings), strict=True)
    own = [(s, d) for s, d in pairs if getattr(d, "memory_kind", None) in (None, "device")]
    return bytes_per_device([s for s, _ in own], [d for _, d in own]).per_device


def _estimate(
    cfg: Trainer.Config, instance: Instance, choices: Any
) -> tuple[MemoryEstimate | None, str | None]:
    """Returns the memory model's account; None and why where it has none."""
    traced = {c.stand_in or c.chosen for c in choices if c.op == "attention"}
    try:
        estimate = memory_estimate(
            cfg,
            num_devices=instance.num_devices,
            num_slices=instance.num_slices,
            attention="reference" if ops.REFERENCE in traced else "kernel",
        )
    except AxcoreError as error:
        return None, f"the memory model does not know this step: {error.message}"
    return estimate, None


def _predicted(
    cfg: Trainer.Config, instance: Instance
) -> tuple[Mapping[str, Any] | None, str | None]:
    """Returns the cost model's prediction; None and why where it has none."""
    from axcore.parallel.cost import predict_step

    try:
        prediction = predict_step(cfg, instance)
    except AxcoreError as error:
        return None, f"no step time is predicted: {error.message}"
    return {k: v for k, v in prediction.to_json().items() if k != "memory"}, None
