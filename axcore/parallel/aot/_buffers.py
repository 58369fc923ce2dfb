"""The largest buffers of a compiled program, with the module each comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from axcore.parallel.aot._hlo import Instruction, Program, module_path

__all__ = ["Buffer", "largest_buffers"]

# They hand on what exists already, or end what another has started.
_NO_BUFFER = frozenset(
    "parameter get-tuple-element tuple bitcast while conditional call optimization-barrier "
    "after-all add-dependency opt-barrier domain".split()
)


@dataclass(frozen=True)
class Buffer:
    """Results of one shape from one place, as the program's text has them.

    Sizes are without the padding of the device's layout, and two results that are never alive
    together may share memory: an approximation of where memory goes, not an account.

    Attributes:
        path: Module path, or the path of an argument in the state; empty where the compiler says
            nothing.
        shape: Such as ``f32[8,64]``, on one device.
        bytes: Of one of them.
        count: How many results there are.
        kind: Whether it comes in from outside.
        phase: Of the step: ``forward``, ``backward``, ``recompute`` or ``other``.
        op: What makes it.
    """

    path: str
    shape: str
    bytes: int
    count: int
    kind: Literal["argument", "temporary"]
    phase: str
    op: str

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        return dataclasses.asdict(self)


def largest_buffers(program: Program, limit: int = 10) -> tuple[Buffer, ...]:
    """Returns the largest arrays that the program keeps in device memory, the largest first.

    Args:
        program: The compiled program.
        limit: How many.
    """
    found: dict[tuple[str, str, str, str], Buffer] = {}
    for computation, _, instruction in program.walk(fused=False):
        is_entry = computation == program.entry
        if instruction.opcode == "parameter" and is_entry:
            kind, origin = "argument", instruction
        elif instruction.opcode in _NO_BUFFER or instruction.opcode.endswith(("-done", "-update")):
            continue
        else:
            kind, origin = "temporary", _written(program, computation, instruction)
        name = origin.op_name or instruction.op_name
        if kind == "temporary" and "/" not in name:
            name = ""  # not a scope: what the compiler calls a value of its own
        path, phase = module_path(name)
        # The brackets of transforms may close, or open, around the last part.
        op = name.rstrip(")").rpartition("/")[2].rpartition("(")[2]
        op = instruction.opcode if kind == "argument" else op or instruction.opcode
        for shape, size in _made(program.computations[computation], instruction):
            key = (kind, path, shape, phase)
            known = found.get(key)
            count = 1 if known is None else known.count + 1
            found[key] = Buffer(
                path, shape, size, count, kind, phase, known.op if known is not None else op
            )
    named = {(b.kind, b.shape) for b in found.values() if b.path}
    # What a loop fills is first made empty, by nobody in particular: the same memory once more.
    kept = [b for b in found.values() if b.path or (b.kind, b.shape) not in named]
    return tuple(sorted(kept, key=lambda b: (-b.bytes, b.path, b.shape, b.kind, b.phase))[:limit])


def _made(inside: Mapping[str, Instruction], instruction: Instruction) -> list[tuple[str, int]]:
    """Returns the arrays that an instruction brings into being."""
    arrays = list(instruction.arrays)
    if instruction.opcode.endswith("-start"):
        if _is_update(instruction):
            return []
        return sorted(arrays, key=lambda a: a[1])[-1:]  # what goes in is among them
    if not _is_update(instruction):
        return arrays
    # In place, of what an update before it has returned: no memory of its own.
    updated = {
        shape
        for name in instruction.operands
        if name in inside and _is_update(inside[name])
        for shape, _ in inside[name].arrays
    }
    return [array for array in arrays if array[0] not in updated]


def _is_update(instruction: Instruction) -> bool:
    return "dynamic-update-slice" in f"{instruction.opcode} {instruction.name}".replace("_", "-")


def _written(program: Program, computation: str, instruction: Instruction) -> Instruction:
    """Returns what an update in place writes: it tells more than the update's own name.

    What a loop keeps of each trip is one part of a larger array.
    """
    arrays = instruction.arrays
    if not _is_update(instruction) or len(arrays) != 1:
        return instruction
    whole = arrays[0][1]
    inside = program.computations[computation]
    parts = [inside[name] for name in instruction.operands if name in inside]
    fitting = [
        part
        for part in parts
        if part.op_name and 0 < part.result_bytes < whole and whole % part.result_bytes == 0
    ]
    return max(fitting, key=lambda part: part.result_bytes, default=instruction)
