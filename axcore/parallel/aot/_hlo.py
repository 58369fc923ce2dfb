"""Reading a compiled program's text: its instructions, and how often each of them runs.

The text is the one thing that every compiler hands out. What is read is the form, not the meaning:
results and their bytes, operands, called computations, trip counts and the scope in the metadata.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from axcore.parallel.cost._scopes import split_scope

__all__ = ["Instruction", "Program", "array_bytes", "module_path", "read_program"]

_HEADER = re.compile(r"^(?P<entry>ENTRY\s+)?%?(?P<name>[\w.\-]+)\s*(?:\([^=]*)?.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?(?P<name>[\w.\-]+) = (?P<rest>.*)$")
_END = re.compile(r"^\}(?:\s*$|, execution_thread=)")
_OPCODE = re.compile(r"\s*(?P<opcode>[\w\-]+)\(")
_ARRAY = re.compile(r"\b(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[\d,<=]*)\](?:\{(?P<layout>[^{}]*)\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|body|to_apply|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LISTS = re.compile(r"\b(?:branch_computations|called_computations|calls)=\{([^{}]*)\}")
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)"?')
_BITS = re.compile(r"[a-z]+(\d+)")
_INNER_JIT = re.compile(r"(?:jit|pjit|closed_call|custom_vjp_call|custom_jvp_call)(?:\([^()]*\))?/")
# Results that the compiler made one: (reduce_sum:SCOPE/dot_general); 0:2:1 is a part of a scope.
_COMBINED = re.compile(r"(?:^|(?<=/))\((.*)\)$")
_PARTS = re.compile(r"(?<!\d):|:(?!\d)")
_BRACKET = re.compile(r"\[['\"]?([^\]'\"]+)['\"]?\]")
# Space 5 is the host's memory in XLA's layouts.
_HOST_SPACE = "S(5)"


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: Its name, unique in its computation.
        opcode: What it does, such as ``all-gather`` or ``fusion``.
        result: Its type as text: an array's, or a tuple of them.
        operands: Names of the instructions whose results it takes.
        attributes: What follows the operands.
        literal: What stands in place of operands: the value of a constant, the number of a
            parameter.
    """

    name: str
    opcode: str
    result: str
    operands: tuple[str, ...]
    attributes: str
    literal: str = ""

    @property
    def arrays(self) -> tuple[tuple[str, int], ...]:
        """``dtype[dims]`` and bytes of each array of the result that is in device memory."""
        return tuple(
            (f"{m['dtype']}[{m['dims']}]", array_bytes(m["dtype"], m["dims"]))
            for m in _ARRAY.finditer(self.result)
            if _HOST_SPACE not in (m["layout"] or "")
        )

    @property
    def result_bytes(self) -> int:
        """Bytes of all arrays of the result."""
        return sum(size for _, size in self.arrays)

    @property
    def op_name(self) -> str:
        """The scope and primitive it came from; empty if it is the compiler's own."""
        found = _OP_NAME.search(self.attributes)
        return _ESCAPED.sub(r"\1", found.group(1)) if found else ""

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it runs; what reduces two scalars is among them."""
        names = _CALLED.findall(self.attributes)
        for group in _CALLED_LISTS.findall(self.attributes):
            names += [n.strip().lstrip("%") for n in group.split(",")]
        return tuple(dict.fromkeys(names))

    @property
    def trips(self) -> int | None:
        """How often a loop runs; None for other instructions and when the text does not say."""
        found = _TRIPS.search(self.attributes) if self.opcode == "while" else None
        return int(found.group(1)) if found else None


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        computations: Name -> its instructions by name, in the order of the text.
        entry: Name of the one that runs.
    """

    computations: Mapping[str, Mapping[str, Instruction]]
    entry: str
    _runs: dict[str, int] = field(default_factory=dict, repr=False)

    def walk(self, *, fused: bool) -> Iterator[tuple[str, int, Instruction]]:
        """Yields (computation, how often it runs, instruction), loops by their trip counts.

        Where the text states no count, that which the condition compares with counts: loops of JAX
        start at zero and add one. A loop without either counts once, and a branch as if it ran
        every time.

        Args:
            fused: Whether to go into fusions, whose inner results need no memory.
        """
        for name, times in self._times(fused).items():
            for instruction in self.computations[name].values():
                yield name, times, instruction

    def _times(self, fused: bool) -> dict[str, int]:
        times: dict[str, int] = {}

        def visit(name: str, n: int) -> None:
            if name not in self.computations:
                return
            times[name] = times.get(name, 0) + n
            for instruction in self.computations[name].values():
                if instruction.opcode.endswith(("-done", "-update")):
                    continue  # the start has said what runs
                if instruction.opcode == "fusion" and not fused:
                    continue
                trips = (
                    instruction.trips or self._bound(instruction)
                    if instruction.opcode == "while"
                    else 1
                )
                for called in instruction.called:
                    visit(called, n * trips)

        visit(self.entry, 1)
        return times

    def _bound(self, loop: Instruction) -> int:
        """Returns the constant that a loop's counter stays below; 1 if there is none.

        The comparison may stand in a fusion.
        """
        named = _CONDITION.search(loop.attributes)
        names = [named.group(1)] if named else []
        names += [n for i in self.computations.get("".join(names), {}).values() for n in i.called]
        for inside in (self.computations.get(name, {}) for name in names):
            for instruction in inside.values():
                if instruction.opcode == "compare" and "direction=LT" in instruction.attributes:
                    bound = inside.get(instruction.operands[-1])
                    if bound is not None and bound.opcode == "constant" and bound.literal.isdigit():
                        return int(bound.literal)
        return 1


def array_bytes(dtype: str, dims: str) -> int:
    """Returns the bytes of an array without padding.

    Args:
        dtype: XLA's name, such as ``bf16``; one without a size (a token) has no bytes.
        dims: Sizes separated by commas.
    """
    if dtype == "pred":
        bits = 8
    else:
        found = _BITS.match(dtype)
        bits = int(found.group(1)) if found else 0
    count = math.prod(int(d.lstrip("<=")) for d in dims.split(",") if d)
    return -(-count * bits // 8)


def module_path(op_name: str) -> tuple[str, str]:
    """Returns (module path, phase) of an instruction's ``op_name``.

    The last component, the primitive, is left out. The arguments of the program have the path of
    the array in the state.

    Example:
        >>> module_path("jit(step)/jvp(decoder)/while/body/layer/attention/dot_general")
        ('decoder/layer/attention', 'forward')
        >>> module_path("state.model['decoder']['layer']")
        ('state/model/decoder/layer', 'other')
    """
    if "/" not in op_name:
        path = _BRACKET.sub(r"/\1", op_name) if op_name else ""
        return path.replace(".", "/") if "[" in op_name else path, "other"
    path, phase = split_scope(_INNER_JIT.sub("", _COMBINED.sub(_first_scope, op_name)))
    return path.rpartition("/")[0], phase


def _first_scope(combined: re.Match[str]) -> str:
    parts = _PARTS.split(combined[1])
    return next((part for part in parts if "/" in part), parts[0])


def read_program(text: str) -> Program:
    """Reads the text of a compiled program, as ``compiled.as_text()`` gives it."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    current: dict[str, Instruction] | None = None
    for line in _joined(text.splitlines()):
        if line.startswith("}"):
            current = None
        elif current is None:
            header = _HEADER.match(line) if line.endswith("{") and "->" in line else None
            if header is not None:
                current = computations.setdefault(header["name"], {})
                entry = header["name"] if header["entry"] else entry
        else:
            found = _INSTRUCTION.match(line)
            instruction = _instruction(found["name"], found["rest"]) if found else None
            if instruction is not None:
                current[instruction.name] = instruction
    return Program(computations, entry)


def _joined(lines: Iterable[str]) -> Iterator[str]:
    """Yields lines, with those that go on with an instruction put behind its own.

    Kernels for TPUs state facts of theirs on several lines, which may start with a brace.
    """
    begun = ""
    for line in lines:
        if begun and not (_INSTRUCTION.match(line) or _END.match(line)):
            begun += line
            continue
        if begun:
            yield begun
        begun = line if _INSTRUCTION.match(line) else ""
        if not begun:
            yield line
    if begun:
        yield begun


def _instruction(name: str, rest: str) -> Instruction | None:
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, max(end, 0))
    if opcode is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    operands = tuple(_NAME.findall(rest[opcode.end() : close]))
    return Instruction(
        name=name,
        opcode=opcode["opcode"],
        result=rest[:end],
        operands=operands,
        attributes=rest[close + 1 :],
        literal="" if operands else rest[opcode.end() : close],
    )


def _closing(text: str, start: int) -> int:
    """Returns the place of the parenthesis that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] == "(":
            depth += 1
        elif text[i] == ")":
            depth -= 1
            if depth == 0:
                return i
    return len(text)
