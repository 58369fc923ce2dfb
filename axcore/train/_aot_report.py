"""What ``axcore aot`` answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from axcore.config import FrozenMapping
from axcore.parallel.aot import Buffer, Collective

__all__ = ["AotReport", "Knob", "Substitution"]


@dataclass(frozen=True)
class Substitution:
    """A kernel that the compiler cannot build, and what was compiled in its place.

    Attributes:
        site: Module path.
        op: The op's name.
        chosen: The implementation that runs on the machine.
        compiled: The one that was compiled.
        reason: Why, in the compiler's words.
    """

    site: str
    op: str
    chosen: str
    compiled: str
    reason: str


@dataclass(frozen=True)
class Knob:
    """A change that was tried by compiling, since the step as it is does not fit.

    Attributes:
        sets: ``path=value`` settings, as for ``--set``.
        reason: What it trades for memory.
        fits: Whether it fits then; None if it could not be compiled.
        needed_bytes: What it needs on one device; None if the compiler does not say.
        compile_seconds: How long that took; 0 for an answer that was known.
        error: Why it could not be compiled.
    """

    sets: tuple[str, ...]
    reason: str
    fits: bool | None
    needed_bytes: int | None
    compile_seconds: float
    error: str | None = None


@dataclass(frozen=True)
class AotReport:
    """A training step compiled for a machine that need not be here.

    Attributes:
        experiment: The experiment's name, if it was given.
        instance: The machine.
        compiled: Whether a compiler made these numbers; otherwise the memory model did.
        cached: Whether the compiler's part is from an earlier compilation.
        fits: Whether the step fits in device memory; with ``substituted`` kernels as those in
            their place do.
        devices: Devices in all.
        mesh: Mesh axis -> size.
        hbm_bytes: Kind -> bytes on one device: ``parameters`` and ``optimizer`` from shardings,
            ``activations`` (what the backward pass finds) from the memory model where the
            compiler gives one sum for all that is temporary, ``total`` of the compiler.
        hbm_limit_bytes: What a program may use on one device.
        host_bytes: Bytes in host memory for one device.
        largest_buffers: The largest arrays with their module; approximate.
        flops: Of a step on all devices: model FLOPs with attention counted causally and in full,
            hardware FLOPs (recomputation included) as traced, with trip counts.
        collectives: What moves between devices.
        predicted: Step time, rate and MFU by the cost model; None where it lacks a figure.
        lower_seconds: Tracing and lowering.
        compile_seconds: Compiling; of the earlier compilation where ``cached``.
        compile_peak_rss_bytes: Most memory that the compiling process held.
        compiler: Its name and version.
        substituted: Kernels that the compiler cannot build.
        kernels: Implementations chosen, with the sites.
        advice: What was tried when it does not fit.
        smallest_instance: The smallest machine of the family that fits by the memory model, when
            nothing tried does.
        blind_spots: What these numbers cannot see.
        notes: What was assumed or left out.
    """

    experiment: str | None
    instance: str
    compiled: bool
    cached: bool
    fits: bool
    devices: int
    mesh: Mapping[str, int]
    hbm_bytes: Mapping[str, int]
    hbm_limit_bytes: int
    host_bytes: int
    largest_buffers: tuple[Buffer, ...]
    flops: Mapping[str, float]
    collectives: tuple[Collective, ...]
    predicted: Mapping[str, Any] | None
    lower_seconds: float
    compile_seconds: float | None
    compile_peak_rss_bytes: int | None
    compiler: Mapping[str, str]
    substituted: tuple[Substitution, ...] = ()
    kernels: tuple[Mapping[str, Any], ...] = ()
    advice: tuple[Knob, ...] = ()
    smallest_instance: str | None = None
    blind_spots: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rules: Mapping[str, Any] = field(default_factory=FrozenMapping[Any])

    @property
    def needed_bytes(self) -> int:
        """What the step needs on one device."""
        return self.hbm_bytes["total"]

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object of ``axcore aot --json``."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {
            "mesh": dict(self.mesh),
            "hbm_bytes": dict(self.hbm_bytes),
            "with_stand_ins": bool(self.substituted),
            "largest_buffers": [b.to_json() for b in self.largest_buffers],
            "flops": dict(self.flops),
            "collectives": [c.to_json() for c in self.collectives],
            "predicted": None if self.predicted is None else dict(self.predicted),
            "compiler": dict(self.compiler),
            "substituted": [dataclasses.asdict(s) for s in self.substituted],
            "kernels": [dict(k) for k in self.kernels],
            "advice": [{**dataclasses.asdict(k), "sets": list(k.sets)} for k in self.advice],
            "blind_spots": list(self.blind_spots),
            "notes": list(self.notes),
            "rules": dict(self.rules),
        }
