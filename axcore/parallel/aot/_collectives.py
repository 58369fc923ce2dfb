"""Which data a compiled program moves between devices, and along which mesh axes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from axcore.parallel.aot._hlo import Instruction, Program

__all__ = ["Collective", "find_collectives"]

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_EXPLICIT = re.compile(r"replica_groups=\{(\{[\d,]*\}(?:,\{[\d,]*\})*)?\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"\{(\d+,\d+)\}")
# How the TPU compiler names a sum of which each device keeps a part, fused into one.
_SCATTERED = "all-reduce-scatter"
_UNKNOWN = "unknown"
# A device with itself.
_NONE = "none"


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind along the same mesh axes, loops by their trip counts.

    Attributes:
        kind: Such as ``all-gather``.
        mesh_axes: Mesh axes whose devices take part, joined by ``+``; ``unknown`` where the groups
            are no product of axes.
        count: How many run in a step.
        bytes: Bytes of a step on one device: of what goes in or comes out, whichever is more; of
            a ragged exchange whichever is less, for one of both is room for the worst case.
        received_bytes: Of these, what a device gets from others, as the cost model counts
            (:attr:`axcore.parallel.cost.StepPrediction.collective_bytes`): a reduction twice.
    """

    kind: str
    mesh_axes: str
    count: int
    bytes: int
    received_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        return dataclasses.asdict(self)


def find_collectives(program: Program, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Returns what moves between devices, the most bytes first.

    Args:
        program: The compiled program.
        mesh: Mesh axis -> size, in the mesh's order; the program's partitions are its devices in
            that order.
    """
    sums: dict[tuple[str, str], list[int]] = {}
    for computation, times, instruction in program.walk(fused=True):
        kind = instruction.opcode.removesuffix("-start")
        if kind not in _KINDS:
            continue
        if kind == "all-reduce" and computation.startswith(_SCATTERED):
            kind = "reduce-scatter"
        pairs = _PAIRS.search(instruction.attributes)
        if pairs is not None:
            group, axes = None, _axes_of_pairs(pairs[1], mesh)
        else:
            group = _group(instruction, mesh)
            axes = _axes(group, mesh)
        num = 1 if group is None else len(group)
        size = _payload(program, computation, instruction, kind, num)
        total = sums.setdefault((kind, axes), [0, 0, 0])
        total[0] += times
        total[1] += times * size
        total[2] += times * (size if pairs is not None else _received(kind, size, num))
    found = [Collective(*key, *total) for key, total in sums.items()]
    return tuple(sorted(found, key=lambda c: (-c.bytes, c.kind, c.mesh_axes)))


def _payload(
    program: Program, computation: str, instruction: Instruction, kind: str, group_size: int
) -> int:
    """Bytes of the operands, of all that is gathered for an all-gather."""
    inside = program.computations[computation]
    operands = [inside[name].result_bytes for name in instruction.operands if name in inside]
    if not operands:
        return instruction.result_bytes
    if kind == "ragged-all-to-all":  # what is sent, what it is put into, and where its parts go
        return min(operands[:2])
    return sum(operands) * (group_size if kind == "all-gather" else 1)


def _received(kind: str, size: int, num: int) -> int:
    """Bytes that one of ``num`` devices gets from the others."""
    return (2 if kind == "all-reduce" else 1) * size * (num - 1) // num


def _group(instruction: Instruction, mesh: Mapping[str, int]) -> list[int] | None:
    """Returns the partitions of one group; all of them where none are named."""
    num = int(np.prod(list(mesh.values()))) if mesh else 1
    text = instruction.attributes
    iota = _IOTA.search(text)
    if iota is not None:
        dims, shape, order = (_ints(part) for part in iota.groups())
        ids = np.arange(int(np.prod(shape))).reshape(shape)
        ids = ids.transpose(order) if order else ids
        return ids.reshape(dims)[0].tolist()
    named = _MESH.search(text)
    if named is not None:
        return _named_group(*named.groups())
    explicit = _EXPLICIT.search(text)
    if explicit is None:
        return None
    first = (explicit.group(1) or "").partition("}")[0].lstrip("{")
    return _ints(first) if first else list(range(num))


def _named_group(sizes: str, shape: str | None, order: str | None, axes: str) -> list[int] | None:
    """The first group of ``mesh['a'=4,'b'=2] {'b'}``; None for parts of axes.

    With ``device_ids=([2,4]T(1,0))`` the mesh has its devices in another order than by number.
    """
    parsed = [part.rpartition("=") for part in sizes.split(",")]
    names = [name.strip().strip("'\"") for name, _, _ in parsed]
    wanted = [name.strip().strip("'\"") for name in axes.split(",") if name.strip()]
    if any(name not in names for name in wanted):
        return None
    dims = [int(n) for _, _, n in parsed]
    grid = np.arange(int(np.prod(dims)))
    if shape is not None:
        grid = grid.reshape(_ints(shape))
        grid = grid.transpose(_ints(order)) if order else grid
    grid = grid.reshape(dims)
    index = tuple(slice(None) if name in wanted else 0 for name in names)
    return np.ravel(grid[index]).tolist()


def _axes(group: list[int] | None, mesh: Mapping[str, int]) -> str:
    """Names the mesh axes along which the members of a group differ."""
    if not group or not mesh:
        return _UNKNOWN
    shape = tuple(mesh.values())
    if max(group) >= int(np.prod(shape)):
        return _UNKNOWN
    coordinates = np.unravel_index(np.array(group), shape)
    varies = [name for name, c in zip(mesh, coordinates, strict=True) if len(set(c.tolist())) > 1]
    return "+".join(varies) or _NONE


def _axes_of_pairs(pairs: str, mesh: Mapping[str, int]) -> str:
    """Names the mesh axes along which a sender and a receiver differ."""
    ends = np.array([_ints(pair) for pair in _PAIR.findall(pairs)]).reshape(-1, 2)
    shape = tuple(mesh.values())
    if not len(ends) or not mesh or ends.max() >= int(np.prod(shape)):
        return _UNKNOWN
    senders, receivers = (np.unravel_index(ends[:, side], shape) for side in (0, 1))
    differ = zip(mesh, senders, receivers, strict=True)
    return "+".join(name for name, a, b in differ if (a != b).any()) or _NONE


def _ints(text: str | None) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()] if text else []
