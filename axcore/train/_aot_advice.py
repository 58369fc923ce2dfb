"""What to turn when a step does not fit: chosen by the memory model, tried by compiling."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from axcore.config import author
from axcore.errors import AxcoreError
from axcore.parallel import resolve_instance
from axcore.parallel.cost import MemoryEstimate, memory_estimate
from axcore.plugins import Instance
from axcore.remat import Remat
from axcore.train._aot_report import Knob

if TYPE_CHECKING:
    from axcore.train.assemble import Assembled
    from axcore.train.trainer import Trainer

__all__ = ["Tried", "smallest_instance", "try_knobs"]

_MAX_TRIES = 3
_MAX_DEVICES = 2**17
_COUNT = re.compile(r"^(?P<family>.*\D)(?P<count>\d+)$")
Attempt = Callable[[Any], tuple[bool, int | None, float]]


@dataclasses.dataclass(frozen=True)
class Tried:
    """The step that does not fit.

    Attributes:
        estimate: The memory model's account of it; None if it has none.
        needed_bytes: What the compiler says; None if it does not.
        limit_bytes: What there is.
    """

    estimate: MemoryEstimate | None
    needed_bytes: int | None
    limit_bytes: int

    def scaled(self, estimate: MemoryEstimate) -> float:
        """Returns what another step needs: the model's figure, corrected by this step's."""
        if self.estimate is None or self.needed_bytes is None or not self.estimate.total:
            return estimate.total
        return estimate.total * self.needed_bytes / self.estimate.total


@dataclasses.dataclass(frozen=True)
class _Candidate:
    sets: tuple[str, ...]
    reason: str
    predicted: float


def try_knobs(
    cfg: Trainer.Config,
    instance: Instance,
    base: Tried,
    attempt: Attempt,
    *,
    seconds: float,
    progress: Callable[[str], None],
) -> tuple[Knob, ...]:
    """Compiles up to three changed steps, those first that the memory model believes in.

    It stops at the first that fits.

    Args:
        cfg: The config that does not fit.
        instance: The machine.
        base: What is known of the step.
        attempt: Compiles a config: (fits, needed bytes, seconds).
        seconds: How long all of it may take.
        progress: Told what is tried.
    """
    deadline = time.monotonic() + seconds
    tried: list[Knob] = []
    longest = 0.0
    for candidate in _chosen(cfg, instance, base):
        if time.monotonic() + longest > deadline:
            progress("no time is left to try more")
            break
        progress(f"trying {' '.join(candidate.sets)}: {candidate.reason}")
        start = time.monotonic()
        try:
            changed = _changed(cfg, candidate.sets)
            fits, needed, spent = attempt(changed)
            knob = Knob(candidate.sets, candidate.reason, fits, needed, spent)
        except AxcoreError as error:
            knob = Knob(candidate.sets, candidate.reason, None, None, 0.0, error.message)
        longest = max(longest, time.monotonic() - start)
        tried.append(knob)
        if knob.fits:
            break
    return tuple(tried)


def smallest_instance(
    assembled: Assembled,
    base: Tried,
    limit: Callable[[Instance], int],
    *,
    reassemble: Callable[[str], Assembled] | None,
) -> str | None:
    """Returns the smallest larger machine of the family that fits by the memory model, or None.

    Args:
        assembled: The experiment on the machine where it does not fit.
        base: What is known of the step there.
        limit: Returns what a program may use on one device of an instance.
        reassemble: Fits the experiment to another instance; None keeps the config.
    """
    match = _COUNT.match(assembled.instance.name)
    if match is None:
        return None
    count = int(match["count"])
    while count <= _MAX_DEVICES:
        count *= 2
        name = f"{match['family']}{count}"
        try:
            instance = resolve_instance(name)
            cfg = assembled.cfg if reassemble is None else reassemble(name).cfg
            estimate = _estimate(cfg, instance)
        except AxcoreError:
            continue  # no machine of this size, or the batch does not divide over it
        if base.scaled(estimate) <= limit(instance):
            return name
    return None


def _chosen(cfg: Trainer.Config, instance: Instance, base: Tried) -> list[_Candidate]:
    """Returns up to three candidates: those that should fit, then those that save most."""
    knobs = list(_knobs(cfg, instance, base))
    joint = [knobs[: n + 1] for n in range(1, len(knobs))]
    candidates: list[_Candidate] = []
    for group in [*([k] for k in knobs), *joint]:
        sets = tuple(s for knob_sets, _ in group for s in knob_sets)
        reason = ", ".join(reason for _, reason in group)
        try:
            predicted = base.scaled(_estimate(_changed(cfg, sets), instance))
        except AxcoreError:
            continue  # does not divide over this mesh
        candidates.append(_Candidate(sets, reason, predicted))
    fitting = [c for c in candidates if c.predicted <= base.limit_bytes]
    others = sorted((c for c in candidates if c not in fitting), key=lambda c: c.predicted)
    return [*fitting, *others][:_MAX_TRIES]


def _knobs(
    cfg: Trainer.Config, instance: Instance, base: Tried
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yields single changes, those first that cost least: (settings, what they trade)."""
    remat = _remat(cfg)
    if remat:
        yield remat, "recompute each layer in the backward pass"
    shape = cfg.mesh_shape
    if shape.data != 1:
        sets = ("mesh_shape.data=1",) if shape.fsdp == -1 else _fold_data(cfg, instance)
        if sets:
            yield sets, "shard parameters and optimizer state over the replicas too"
    steps = _accumulation(cfg, instance, base)
    if steps:
        yield (f"accumulation_steps={steps}",), f"{steps} microbatches a step"
    if getattr(cfg.learner, "state_dtype", "bfloat16") is None:
        yield (
            ("learner.state_dtype=bfloat16",),
            "optimizer state in 16 bits, which may cost quality",
        )
    if getattr(cfg.model, "param_dtype", None) in (None, "float32"):
        if "param_dtype" in cfg.model.fields():
            yield (
                ("model.param_dtype=bfloat16",),
                "parameters in 16 bits, which may cost quality",
            )


def _remat(cfg: Trainer.Config) -> tuple[str, ...]:
    sets: list[str] = []
    for path, node in cfg.walk():
        remat = getattr(node, "remat", None) if "remat" in node.fields() else None
        if isinstance(remat, Remat) and remat.policy != "full":
            sets += [f"{path}.remat.{n}=()" for n in ("save", "offload") if getattr(remat, n)]
            sets.append(f"{path}.remat.policy=full")
    return tuple(sets)


def _fold_data(cfg: Trainer.Config, instance: Instance) -> tuple[str, ...]:
    inside, _ = cfg.mesh_shape.split(instance.num_devices, instance.num_slices)
    if inside["data"] == 1:
        return ()
    return ("mesh_shape.data=1", f"mesh_shape.fsdp={inside['fsdp'] * inside['data']}")


def _accumulation(cfg: Trainer.Config, instance: Instance, base: Tried) -> int | None:
    """Returns how many microbatches should fit, doubling; else as many as there can be."""
    batch, now = cfg.batch_size, cfg.accumulation_steps
    best: int | None = None
    steps = now
    while batch % (steps * 2) == 0:
        steps *= 2
        try:
            estimate = _estimate(_changed(cfg, (f"accumulation_steps={steps}",)), instance)
        except AxcoreError:
            break  # rows no longer divide over the devices
        best = steps
        if base.scaled(estimate) <= base.limit_bytes:
            break
    return best


def _changed(cfg: Trainer.Config, sets: tuple[str, ...]) -> Trainer.Config:
    changed = cfg.copy()
    for text in sets:
        path, _, value = text.partition("=")
        with author("flag", f"--set {path}"):
            changed.set_path_text(path, value)
    return changed


def _estimate(cfg: Trainer.Config, instance: Instance) -> MemoryEstimate:
    return memory_estimate(cfg, num_devices=instance.num_devices, num_slices=instance.num_slices)
