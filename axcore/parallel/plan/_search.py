"""The search: every mesh and rematerialization, the fewest microbatches that fit, ranked by time.

For each mesh and way to rematerialize, more microbatches take less memory and never less time, so
the fewest that fit are the only ones worth a prediction. What does not fit, and what fits and is
slower, keeps its reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from axcore.config import Config, apply_modifier
from axcore.errors import ConfigError, ModuleError, ShardingError
from axcore.parallel.aot import compiler_for
from axcore.parallel.cost import MemoryEstimate, StepPrediction, memory_estimate, predict_step
from axcore.parallel.mesh import MeshShape
from axcore.parallel.plan._candidate import Candidate, RematOption
from axcore.parallel.plan._space import Dims, meshes, remat_options
from axcore.parallel.traits import compute_traits
from axcore.plugins import Instance, host

__all__ = ["Objective", "Plan", "Ranked", "Rejected", "budget_bytes", "search"]

Objective = Literal["tokens_per_second", "cost", "memory"]

# Of a device's memory, what is left to the runtime and to what the model of memory does not see.
_RESERVE = 0.08
# How many times as many microbatches as stages a pipeline may have: the bubble is then 1/9.
_PIPELINE_FACTORS = (1, 2, 4, 8)
_GIB = 2**30


@dataclass(frozen=True)
class Ranked:
    """A candidate that fits.

    Attributes:
        candidate: It.
        prediction: Its predicted step.
        reason: Why it is not the first; empty for the first.
    """

    candidate: Candidate
    prediction: StepPrediction
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        p = self.prediction
        return {
            **self.candidate.to_json(),
            "step_seconds": p.step_seconds,
            "tokens_per_second": p.tokens_per_second,
            "mfu_causal": p.mfu_causal,
            "mfu_noncausal": p.mfu_noncausal,
            "peak_flops": dict(p.peak_flops),
            "bound_by": p.bound_by,
            "seconds": dict(p.seconds),
            "memory_bytes": p.memory.total,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Rejected:
    """A candidate that does not fit or cannot be.

    Attributes:
        candidate: It, with the most microbatches that its rows allow.
        reason: Why.
    """

    candidate: Candidate
    reason: str

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        return {**self.candidate.to_json(), "reason": self.reason}


@dataclass(frozen=True)
class Plan:
    """What a search found.

    Attributes:
        instance: The machine's name.
        objective: What was ranked by.
        limit_bytes: Memory of a device that a candidate may take.
        ranked: What fits, best first, each with the reason why it lost.
        rejected: What does not.
        skipped: Candidates not looked at, since the same mesh with less recomputation already fits
            in one go.
        seconds: How long the search took.
    """

    instance: str
    objective: Objective
    limit_bytes: int
    ranked: tuple[Ranked, ...]
    rejected: tuple[Rejected, ...]
    skipped: int
    seconds: float


def budget_bytes(instance: Instance) -> int:
    """Returns what a program may take of a device by the model of memory: 92 % of what there is.

    The platform's compiler may allow less, of which a program must keep clear too.
    """
    budget = round(instance.hbm_bytes * (1 - _RESERVE))
    if instance.platform not in host().compilers:
        return budget
    return min(budget, compiler_for(instance).memory_limit_bytes(instance))


def search(
    cfg: Any,
    instance: Instance,
    *,
    objective: Objective = "tokens_per_second",
    quantizations: Sequence[tuple[str, Config]] = (),
    memory_limit_bytes: int | None = None,
    predict: Callable[..., StepPrediction] = predict_step,
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """Ranks ways to run an experiment on a machine. Nothing is compiled.

    Args:
        cfg: A trainer's config with the user's edits, no rule applied. What a file or a flag has
            set of mesh, remat and microbatches is kept.
        instance: The machine.
        objective: ``tokens_per_second`` and, on one machine equal to it, ``cost``: the shortest
            step; ``memory``: the least memory, ties by time.
        quantizations: Recipes to try beside none, as (name, modifier config).
        memory_limit_bytes: What a program may take of a device; None takes :func:`budget_bytes`.
        predict: Predicts a step; for tests.
        progress: Called with the number of candidates looked at so far.

    Returns:
        The plan; ``ranked`` is empty when nothing fits.

    Raises:
        ConfigError: The config cannot be built.
        ShardingError: The instance does not state the rates that a prediction needs.
    """
    start = time.perf_counter()
    traits = compute_traits(cfg)
    limit = memory_limit_bytes or budget_bytes(instance)
    looker = _Looker(cfg, instance, limit, predict)
    found: list[Ranked] = []
    rejected: list[Rejected] = []
    looked = skipped = 0
    recipes: list[tuple[str, Config] | None] = [None, *quantizations]
    dims = Dims.of(cfg, traits)
    options = _remat_choices(cfg, remat_options(traits, instance.platform))
    for mesh in _mesh_choices(cfg, dims, instance):
        for recipe in recipes:
            hopeless = looker.hopeless(_candidate(cfg, mesh, options[-1], recipe))
            if hopeless is not None:
                rejected.append(hopeless)
                continue
            enough = False
            for remat in options:
                if enough and objective != "memory":
                    skipped += 1  # recomputes or moves more, and the memory is not needed
                    continue
                looked += 1
                result = looker.best(_candidate(cfg, mesh, remat, recipe))
                if isinstance(result, Rejected):
                    rejected.append(result)
                else:
                    found.append(result)
                    # Fewer microbatches than one there are not.
                    enough = result.candidate.accumulation_steps == 1 and mesh.pipeline == 1
                if progress is not None:
                    progress(looked)
    found.sort(key=_key(objective))
    ranked = tuple(
        Ranked(r.candidate, r.prediction, _why_lost(r.prediction, found[0].prediction, objective))
        if i
        else r
        for i, r in enumerate(found)
    )
    seconds = time.perf_counter() - start
    return Plan(instance.name, objective, limit, ranked, tuple(rejected), skipped, seconds)


class _Looker:
    """Finds the fewest microbatches with which a candidate fits."""

    def __init__(
        self, cfg: Any, instance: Instance, limit: int, predict: Callable[..., StepPrediction]
    ):
        self.cfg, self.instance, self.limit, self.predict = cfg, instance, limit, predict

    def hopeless(self, base: Candidate) -> Rejected | None:
        """Returns why no remat and no number of microbatches helps a mesh; None if one may."""
        try:
            memory = self._memory(self._config(base))
        except (ConfigError, ModuleError, ShardingError) as error:
            return Rejected(base, error.message)
        fixed = memory.parameters + memory.optimizer
        return Rejected(base, _why_too_much(memory, self.limit)) if fixed >= self.limit else None

    def best(self, base: Candidate) -> Ranked | Rejected:
        """Returns the candidate with as few microbatches as fit, or why none does."""
        try:
            return self._best(base)
        except (ConfigError, ModuleError, ShardingError) as error:
            return Rejected(base, error.message)

    def _best(self, base: Candidate) -> Ranked | Rejected:
        rows = self.cfg.batch_size
        across = math.prod(dict(base.mesh.across_slices).values())
        shards = base.mesh.data * base.mesh.expert * base.mesh.fsdp * across
        local = rows // shards
        if base.mesh.pipeline > 1:
            return self._best_pipeline(base, local)
        tried, memory = base, None
        least = _fixed(self.cfg, "accumulation_steps")
        steps = [least] if least else [n for n in range(1, local + 1) if local % n == 0]
        n: int | None = steps[0]
        while n is not None:
            tried = _replace(base, accumulation_steps=n)
            cfg = self._config(tried)
            memory = self._memory(cfg)
            if memory.total <= self.limit:
                return Ranked(tried, self.predict(cfg, self.instance))
            n = _next_steps(steps, n, memory, self.limit)
        assert memory is not None
        return Rejected(tried, _why_too_much(memory, self.limit))

    def _best_pipeline(self, base: Candidate, local: int) -> Ranked | Rejected:
        """Microbatches of a pipeline trade its bubble for memory and small products."""
        fitting: list[Ranked] = []
        last: Rejected | None = None
        numbers = {base.mesh.pipeline * f for f in _PIPELINE_FACTORS}
        for n in sorted(n for n in numbers if local % n == 0) or [math.gcd(local, max(numbers))]:
            tried = _replace(base, pipeline_microbatches=n)
            cfg = self._config(tried)
            memory = self._memory(cfg)
            if memory.total <= self.limit:
                fitting.append(Ranked(tried, self.predict(cfg, self.instance)))
            else:
                last = Rejected(tried, _why_too_much(memory, self.limit))
        if fitting:
            return min(fitting, key=lambda r: r.prediction.step_seconds)
        assert last is not None
        return last

    def _config(self, candidate: Candidate) -> Any:
        cfg = self.cfg
        with _unlogged("axcore.config"):
            for modifier in candidate.modifiers():
                cfg = apply_modifier(cfg, modifier)
        return cfg

    def _memory(self, cfg: Any) -> MemoryEstimate:
        return memory_estimate(
            cfg, num_devices=self.instance.num_devices, num_slices=self.instance.num_slices
        )


@contextlib.contextmanager
def _unlogged(name: str) -> Iterator[None]:
    """Keeps a logger's reports of edits back: a search makes thousands that nobody will run."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _fixed(cfg: Any, field: str) -> Any:
    """Returns the value of a field that a file or a flag has set, else None."""
    return getattr(cfg, field) if cfg.set_by(field).kind in ("file", "flag") else None


def _mesh_choices(cfg: Any, dims: Dims, instance: Instance) -> Iterator[MeshShape]:
    fixed = _fixed(cfg, "mesh_shape")
    if fixed is None:
        yield from meshes(dims, instance)
        return
    inside, across = MeshShape.of(fixed).split(instance.num_devices, instance.num_slices)
    slices = {a: n for a, n in across.items() if n > 1}
    yield MeshShape(**inside, across_slices=slices)


def _remat_choices(
    cfg: Any, options: tuple[RematOption | None, ...]
) -> tuple[RematOption | None, ...]:
    """Returns the ways to rematerialize, or none to choose from when somebody has chosen."""
    nodes = [node for _, node in cfg.walk() if "remat" in node.fields()]
    if any(node.set_by("remat").kind in ("file", "flag") for node in nodes):
        return (None,)
    return options


def _candidate(
    cfg: Any,
    mesh: MeshShape,
    remat: RematOption | None,
    recipe: tuple[str, Config] | None,
) -> Candidate:
    """Returns a mesh with what goes with it.

    Where tensors are split, what lies between branches is split too if the rows allow it: that
    takes less memory and moves the same bytes. Where rows are split, attention is a ring.
    """
    attention: tuple[str, ...] = ()
    if mesh.seq > 1:
        rule = cfg.ops.get("attention") if "ops" in cfg.fields() else None
        stated = tuple(rule.implementations) if rule is not None else ()
        attention = ("ring", *(name for name in stated if name != "ring"))
    split = mesh.model > 1 and cfg.seq_len % (mesh.seq * mesh.model) == 0
    microbatches = mesh.pipeline if mesh.pipeline > 1 else 1
    return Candidate(
        mesh,
        remat,
        pipeline_microbatches=microbatches,
        sequence_parallel=split,
        attention=attention,
        quantization=recipe,
    )


def _replace(candidate: Candidate, **values: Any) -> Candidate:
    return dataclasses.replace(candidate, **values)


def _next_steps(steps: list[int], n: int, memory: MemoryEstimate, limit: int) -> int | None:
    """Returns the next number of microbatches worth a look; activations shrink in proportion."""
    fixed = memory.parameters + memory.optimizer + memory.gradients
    if fixed >= limit:
        return None
    moving = memory.activations + memory.workspace
    wanted = n * moving / (limit - fixed)
    larger = [s for s in steps if s > n]
    # Of the workspace a part stays, so the first guess may be too low, never too high by much.
    return next((s for s in larger if s >= wanted), larger[-1] if larger else None)


def _key(objective: Objective) -> Callable[[Ranked], tuple[float, ...]]:
    if objective == "memory":
        return lambda r: (r.prediction.memory.total, r.prediction.step_seconds)
    return lambda r: (r.prediction.step_seconds, r.prediction.memory.total)


def _why_too_much(memory: MemoryEstimate, limit: int) -> str:
    parts = {
        "parameters": memory.parameters,
        "optimizer": memory.optimizer,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "workspace": memory.workspace,
    }
    name = max(parts, key=lambda k: parts[k])
    return (
        f"needs {memory.total / _GIB:.1f} of {limit / _GIB:.1f} GiB, "
        f"{parts[name] / _GIB:.1f} of them for {name}"
    )


def _why_lost(mine: StepPrediction, best: StepPrediction, objective: Objective) -> str:
    if objective == "memory" and mine.memory.total > best.memory.total:
        more = (mine.memory.total - best.memory.total) / _GIB
        return f"{more:.2f} GiB more"
    ratio = mine.step_seconds / best.step_seconds
    names = {*mine.seconds, *best.seconds}
    more = {n: mine.seconds.get(n, 0.0) - best.seconds.get(n, 0.0) for n in names}
    name = max(sorted(more), key=lambda n: more[n])
    if more[name] <= 0:
        return f"{ratio:.2f}x the time: as fast, with more memory"
    return f"{ratio:.2f}x the time: {more[name]:.3g} s more for {name}"
