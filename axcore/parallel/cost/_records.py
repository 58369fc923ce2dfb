"""What a traced program costs, as records that can be grouped, scaled and added."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from axcore.config import FrozenMapping

__all__ = ["CostEntry", "Kind", "Phase", "ProgramCost", "UnknownLoop", "add_up"]

Kind = Literal["matmul", "vector", "memory", "collective", "kernel"]
"""``matmul``: products, grouped products and convolutions; ``vector``: elementwise work and
reductions; ``memory``: what only moves data; ``collective``: those written in the program (a
compiler adds its own); ``kernel``: what states its own cost."""

Phase = Literal["forward", "backward", "recompute", "other"]
"""``recompute`` is what remat repeats in the backward pass; ``other`` is outside of derivatives:
the optimizer, or a program that has none."""


@dataclass(frozen=True)
class CostEntry:
    """One kind of work in one place, over all its repetitions and all devices.

    Attributes:
        path: Module path such as ``decoder/layer/0:32:1/attention``; layers of a scan together.
        phase: Which pass it belongs to.
        kind: What it is.
        op: Name of the primitive.
        dtype: Dtype of the operands; of the wider one where they differ.
        flops: Multiplications and additions; other arithmetic counts 1 an element.
        transcendentals: Elements of exponentials, roots and the like, not in ``flops``.
        bytes_unfused: Operands and results of every operation, as if each went through memory.
        bytes_fused: The same when chains of elementwise work and reductions run as one.
    """

    path: str
    phase: Phase
    kind: Kind
    op: str
    dtype: str
    flops: int = 0
    transcendentals: int = 0
    bytes_unfused: int = 0
    bytes_fused: int = 0

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What it is about; equal keys add up."""
        return (self.path, self.phase, self.kind, self.op, self.dtype)

    def times(self, n: int) -> CostEntry:
        """Returns ``n`` repetitions."""
        if n == 1:
            return self
        return CostEntry(
            *(self.path, self.phase, self.kind, self.op, self.dtype),
            flops=self.flops * n,
            transcendentals=self.transcendentals * n,
            bytes_unfused=self.bytes_unfused * n,
            bytes_fused=self.bytes_fused * n,
        )


@dataclass(frozen=True)
class UnknownLoop:
    """A loop whose number of trips is not in the program; its body is counted once.

    Attributes:
        path: Module path.
        flops: FLOPs of one trip.
    """

    path: str
    flops: int


@dataclass(frozen=True)
class ProgramCost:
    """What a program costs over all devices, trip counts included.

    Attributes:
        entries: The work, one entry per path, phase, kind, op and dtype.
        unknown_loops: Loops counted once, since nobody knows how often they run.
        uncounted: Primitive -> how often, of those whose FLOPs are not known; their bytes are.
        argument_bytes: Inputs of the program.
        output_bytes: Outputs of the program.
    """

    entries: tuple[CostEntry, ...]
    unknown_loops: tuple[UnknownLoop, ...] = ()
    uncounted: Mapping[str, int] = field(default_factory=FrozenMapping[int])
    argument_bytes: int = 0
    output_bytes: int = 0

    @property
    def flops(self) -> int:
        """FLOPs of everything, what remat recomputes included: hardware FLOPs."""
        return sum(e.flops for e in self.entries)

    @property
    def matmul_flops(self) -> int:
        """FLOPs of products and convolutions, and of kernels that state theirs."""
        return sum(e.flops for e in self.entries if e.kind in ("matmul", "kernel"))

    @property
    def recompute_flops(self) -> int:
        """FLOPs that remat repeats; part of ``flops``."""
        return sum(e.flops for e in self.entries if e.phase == "recompute")

    @property
    def transcendentals(self) -> int:
        """Elements of exponentials, roots and the like."""
        return sum(e.transcendentals for e in self.entries)

    @property
    def bytes_unfused(self) -> int:
        """Memory traffic if nothing were fused: an upper estimate."""
        return sum(e.bytes_unfused for e in self.entries)

    @property
    def bytes_fused(self) -> int:
        """Memory traffic if all elementwise chains were fused: what a good compiler comes near."""
        return sum(e.bytes_fused for e in self.entries)

    @property
    def matmul_flops_by_dtype(self) -> dict[str, int]:
        """Dtype of the operands -> FLOPs of products, most first."""
        return _grouped((e.dtype, e) for e in self.entries if e.kind in ("matmul", "kernel"))

    @property
    def flops_by_phase(self) -> dict[str, int]:
        """Phase -> FLOPs, most first."""
        return _grouped((e.phase, e) for e in self.entries)

    @property
    def collective_bytes(self) -> dict[str, int]:
        """Primitive -> bytes that all devices hand in, of collectives written in the program."""
        found: dict[str, int] = {}
        for e in self.entries:
            if e.kind == "collective":
                found[e.op] = found.get(e.op, 0) + e.bytes_unfused // 2
        return found

    def flops_by_path(self, depth: int | None = None) -> dict[str, int]:
        """Returns module path -> FLOPs, most first.

        Args:
            depth: Path components to keep; None keeps all.
        """
        return _grouped(("/".join(e.path.split("/")[:depth]), e) for e in self.entries)


def _grouped(named: Iterable[tuple[str, CostEntry]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, entry in named:
        if entry.flops:
            sums[name] = sums.get(name, 0) + entry.flops
    return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def add_up(entries: Iterable[CostEntry]) -> tuple[CostEntry, ...]:
    """Returns one entry per key, in the order of first appearance."""
    sums: dict[tuple[str, ...], list[int]] = {}
    for e in entries:
        total = sums.setdefault(e.key, [0, 0, 0, 0])
        amounts = (e.flops, e.transcendentals, e.bytes_unfused, e.bytes_fused)
        for i, amount in enumerate(amounts):
            total[i] += amount
    return tuple(CostEntry(*key, *amounts) for key, amounts in sums.items())  # type: ignore[arg-type]
