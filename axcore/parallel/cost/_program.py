"""Counting a traced program: FLOPs and bytes from its jaxpr, with trip counts.

``cost_analysis()`` of a compiled program is empty on GPU and counts the body of a loop once on TPU;
this needs no compiler and no device. What the program does not use is left out first, as any
compiler does. Nothing is guessed about a loop without a trip count (it is reported), and of
the branches of a ``cond`` the most expensive one counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.interpreters import partial_eval

from axcore.config import FrozenMapping
from axcore.errors import ShardingError
from axcore.parallel.cost._primitives import (
    FUSIBLE,
    Work,
    equation_work,
    num_bytes,
    operand_dtype,
)
from axcore.parallel.cost._records import CostEntry, Kind, ProgramCost, UnknownLoop, add_up
from axcore.parallel.cost._scopes import scope_text, split_scope

__all__ = ["count_flops", "count_function"]

# One inner program that runs once, on the same values.
_CALLS = frozenset(
    "jit pjit closed_call core_call call remat remat2 checkpoint custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr custom_lin xla_call".split()
)


def count_flops(jaxpr: Any) -> ProgramCost:
    """Counts a program.

    Loops count as often as they run, ``shard_map`` bodies once for each device; a kernel that
    states a cost (``pallas_call(cost_estimate=...)``) has that cost, another one its body's for
    each point of its grid.

    Args:
        jaxpr: ``jax.make_jaxpr(fn)(*args)``, or its ``.jaxpr``.

    Returns:
        The cost over all devices.

    Raises:
        ShardingError: It is no jaxpr.

    Example:
        >>> double = jax.make_jaxpr(lambda x: x @ x)(jax.numpy.ones((8, 8)))
        >>> count_flops(double).flops
        1024
    """
    inner = _open(jaxpr)
    if inner is None:
        raise ShardingError(
            f"expected a jaxpr, got {type(jaxpr).__name__}",
            code="AX466",
            where="count_flops",
            hint="pass jax.make_jaxpr(fn)(*args)",
        )
    inner, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars))
    count = _Count()
    entries = count.program(inner, "")
    return ProgramCost(
        entries=add_up(entries),
        unknown_loops=tuple(count.unknown),
        uncounted=FrozenMapping(dict(sorted(count.uncounted.items()))),
        argument_bytes=sum(num_bytes(v.aval) for v in inner.invars),
        output_bytes=sum(num_bytes(v.aval) for v in inner.outvars),
    )


def count_function(fn: Callable[..., Any], *args: Any) -> ProgramCost:
    """Traces ``fn`` for arrays or ``jax.ShapeDtypeStruct`` arguments and counts it."""
    return count_flops(jax.make_jaxpr(fn)(*args))


def _open(value: Any) -> Any:
    """Returns the jaxpr that a value is or holds, or None."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") and hasattr(value, "outvars") else None


@dataclass(frozen=True)
class _Flat:
    """An equation with calls inlined; values are known by number, literals by None."""

    name: str
    params: Any
    scope: str
    ins: tuple[int | None, ...]
    outs: tuple[int, ...]
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]


@dataclass
class _Body:
    """A program with calls inlined, and where its values begin and end."""

    equations: list[_Flat] = field(default_factory=list)
    numbers: dict[Any, int] = field(default_factory=dict)
    next_number: int = 0

    def new(self) -> int:
        self.next_number += 1
        return self.next_number


@dataclass
class _Count:
    """One counting: what it found besides costs."""

    unknown: list[UnknownLoop] = field(default_factory=list)
    uncounted: dict[str, int] = field(default_factory=dict)

    def program(self, jaxpr: Any, scope: str) -> list[CostEntry]:
        """Returns the cost of a program run once."""
        body = _Body()
        env: dict[Any, int] = {v: body.new() for v in (*jaxpr.invars, *jaxpr.constvars)}
        arguments = set(env.values())
        results = set(filter(None, _flatten(jaxpr, env, scope, body)))
        traffic = _fused_traffic(body.equations, arguments, results)
        entries: list[CostEntry] = []
        for equation, fused in zip(body.equations, traffic, strict=True):
            entries += self._equation(equation, fused)
        return entries

    def _equation(self, e: _Flat, fused: int) -> list[CostEntry]:
        if e.name == "scan":
            inner = self.program(_open(e.params["jaxpr"]), e.scope)
            return [entry.times(e.params["length"]) for entry in inner]
        if e.name == "while":
            return self._while(e)
        if e.name == "cond":
            branches = [self.program(_open(b), e.scope) for b in e.params["branches"]]
            return max(branches, key=lambda b: (_flops(b), sum(x.bytes_fused for x in b)))
        if e.name == "shard_map":
            axes = e.params.get("newly_manual_axes", e.params.get("manual_axes"))
            sizes = dict(e.params["mesh"].shape)
            devices = math.prod(sizes[a] for a in (sizes if axes is None else axes))
            return [x.times(devices) for x in self.program(_open(e.params["jaxpr"]), e.scope)]
        if e.name == "pallas_call":
            return self._kernel(e)
        work = equation_work(e.name, e.params, e.in_avals, e.out_avals)
        if not work.is_known:
            self.uncounted[e.name] = self.uncounted.get(e.name, 0) + 1
        return [_entry(e, work, fused)]

    def _while(self, e: _Flat) -> list[CostEntry]:
        entries = [
            *self.program(_open(e.params["cond_jaxpr"]), e.scope),
            *self.program(_open(e.params["body_jaxpr"]), e.scope),
        ]
        if flops := _flops(entries):
            self.unknown.append(UnknownLoop(split_scope(e.scope)[0], flops))
        return entries

    def _kernel(self, e: _Flat) -> list[CostEntry]:
        traffic = _own_traffic(e)
        stated = e.params.get("cost_estimate")
        if stated is not None:
            moved = stated.bytes_accessed or traffic
            work = Work("kernel", int(stated.flops), int(stated.transcendentals), int(moved))
            return [_entry(e, work, int(moved))]
        grid = getattr(e.params.get("grid_mapping"), "grid", ())
        inner = _open(e.params["jaxpr"])
        if inner is None or not all(isinstance(n, int) for n in grid):
            self.uncounted[e.name] = self.uncounted.get(e.name, 0) + 1
            return [_entry(e, Work("kernel", num_bytes=traffic), traffic)]
        # Memory inside a kernel is not the device's; what it reads and writes outside counts.
        body = _Count().program(inner, e.scope)
        points = math.prod(grid)
        flops = points * _flops(body)
        special = points * sum(x.transcendentals for x in body)
        return [_entry(e, Work("kernel", flops, special, traffic), traffic)]


def _flatten(jaxpr: Any, env: dict[Any, int], scope: str, body: _Body) -> list[int | None]:
    """Adds the equations of a jaxpr to a body; returns the numbers of its results."""

    def number(var: Any) -> int | None:
        return None if hasattr(var, "val") else env[var]

    for equation in jaxpr.eqns:
        text = scope_text(equation)
        inner_scope = f"{scope}/{text}" if scope and text else scope or text
        ins = [number(v) for v in equation.invars]
        inner = next(_inner(equation), None) if equation.primitive.name in _CALLS else None
        if inner is not None and len(inner.invars) == len(ins):
            # A literal argument is a value without a place in memory: number 0.
            inner_env = {v: n or 0 for v, n in zip(inner.invars, ins, strict=True)}
            inner_env |= {v: body.new() for v in inner.constvars}
            outs = _flatten(inner, inner_env, inner_scope, body)
            env.update((v, n or 0) for v, n in zip(equation.outvars, outs, strict=True))
            continue
        outs = [body.new() for _ in equation.outvars]
        env.update(zip(equation.outvars, outs, strict=True))
        body.equations.append(
            _Flat(
                equation.primitive.name,
                equation.params,
                inner_scope,
                tuple(n or None for n in ins),
                tuple(outs),
                tuple(v.aval for v in equation.invars),
                tuple(v.aval for v in equation.outvars),
            )
        )
    return [number(v) for v in jaxpr.outvars]


def _inner(equation: Any) -> Iterator[Any]:
    for name in ("call_jaxpr", "jaxpr", "fun_jaxpr"):
        if (found := _open(equation.params.get(name))) is not None:
            yield found


def _fused_traffic(equations: list[_Flat], arguments: set[int], results: set[int]) -> list[int]:
    """Returns the bytes each equation moves when elementwise neighbours run as one.

    A value goes through memory when something that is not fused makes it or reads it, or when the
    program takes or returns it. It is written once, read by each such reader, and read once by all
    fused readers together.
    """
    in_memory = arguments | results
    for e in equations:
        if e.name not in FUSIBLE:
            in_memory.update(n for n in (*e.ins, *e.outs) if n)
    traffic: list[int] = []
    read_fused: set[int] = set()
    for e in equations:
        if e.name in FUSIBLE:
            moved = sum(
                num_bytes(a) for n, a in zip(e.outs, e.out_avals, strict=True) if n in in_memory
            )
            for n, aval in zip(e.ins, e.in_avals, strict=True):
                if n in in_memory and n not in read_fused:
                    read_fused.add(n)
                    moved += num_bytes(aval)
            # A view of what is in memory is no copy.
            traffic.append(0 if e.name in _VIEWS else moved)
        else:
            work = equation_work(e.name, e.params, e.in_avals, e.out_avals)
            traffic.append(_own_traffic(e) if work.num_bytes is None else work.num_bytes)
    return traffic


_VIEWS = frozenset(
    "reshape squeeze expand_dims name sharding_constraint stop_gradient bitcast_convert_type "
    "slice optimization_barrier random_wrap random_unwrap pvary pcast".split()
)


def _own_traffic(e: _Flat) -> int:
    return sum(num_bytes(a) for a in (*e.in_avals, *e.out_avals))


def _flops(entries: list[CostEntry]) -> int:
    return sum(entry.flops for entry in entries)


def _entry(e: _Flat, work: Work, fused: int) -> CostEntry:
    path, phase = split_scope(e.scope)
    kind: Kind = work.kind
    moved = _own_traffic(e) if work.num_bytes is None else work.num_bytes
    return CostEntry(
        path,
        phase,
        kind,
        e.name,
        operand_dtype(e.in_avals),
        flops=work.flops,
        transcendentals=work.transcendentals,
        bytes_unfused=0 if e.name in _VIEWS else moved,
        bytes_fused=fused,
    )
