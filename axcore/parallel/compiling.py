"""Compiling a step: the callable, how long it took and what the compiler says of it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from axcore.parallel.xla_options import explain_refusal

__all__ = ["CompiledStep", "LoweredStep", "MemoryUse", "compile_step", "lower_step"]

Options = Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class MemoryUse:
    """What a program needs on one device, bytes, by the compiler's account.

    Attributes:
        arguments: Its inputs.
        outputs: Its outputs.
        aliased: Outputs that take the place of donated inputs.
        temporaries: The largest sum of what is alive in between.
        code: The program itself.
        host: Everything that lives in host memory (offloaded).
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    host: int

    @property
    def peak(self) -> int:
        """Upper bound of device memory in use at one time."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code

    def to_json(self) -> dict[str, int]:
        """Returns a plain dictionary, with the peak."""
        return {**dataclasses.asdict(self), "peak": self.peak}


@dataclass(frozen=True)
class CompiledStep:
    """A compiled program.

    Attributes:
        call: The compiled function; checks shapes and shardings, never compiles again.
        lowered: The lowered program, for its text.
        lower_seconds: Tracing and lowering.
        compile_seconds: Compiling; less when a persistent cache had it.
        memory: Memory on one device, or None if the platform does not say.
        flops: FLOPs on one device by the compiler's count, which counts the body of a loop once;
            None if the platform does not say.
        bytes_accessed: Bytes of memory traffic by the same count.
        options: The compiler options it was compiled with.
    """

    call: Callable[..., Any]
    lowered: Any = field(repr=False)
    lower_seconds: float
    compile_seconds: float
    memory: MemoryUse | None
    flops: float | None
    bytes_accessed: float | None
    options: Options

    def __call__(self, *args: Any) -> Any:
        """Runs the program; a training loop saves a call frame with ``step.call``."""
        return self.call(*args)


@dataclass(frozen=True)
class LoweredStep:
    """A program that is traced and lowered for its devices, and not compiled yet.

    Attributes:
        jaxpr: The traced program, for counting.
        lowered: The lowered program, for its text.
        lower_seconds: Tracing and lowering.
    """

    jaxpr: Any = field(repr=False)
    lowered: Any = field(repr=False)
    lower_seconds: float

    def compile(self, compiler_options: Options | None = None) -> CompiledStep:
        """Compiles it.

        Args:
            compiler_options: XLA options of the program.

        Raises:
            ConfigError: The compiler knows no such option, or does not take its value.
        """
        options: dict[str, Any] = dict(compiler_options or {})
        start = time.perf_counter()
        try:
            compiled = self.lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            if (refusal := explain_refusal(error, options)) is not None:
                raise refusal from error
            raise
        seconds = time.perf_counter() - start
        cost = compiled.cost_analysis() or {}
        return CompiledStep(
            call=compiled,
            lowered=self.lowered,
            lower_seconds=self.lower_seconds,
            compile_seconds=seconds,
            memory=_memory(compiled),
            flops=cost.get("flops"),
            bytes_accessed=cost.get("bytes accessed"),
            options=options,
        )


def lower_step(
    fn: Callable[..., Any],
    *args: Any,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate: Sequence[int] = (),
) -> LoweredStep:
    """Traces and lowers ``fn`` for arguments of the given shapes.

    The function is jitted afresh, so that nothing is taken from a trace for another target.

    Args:
        fn: The pure function, of positional arguments.
        *args: Pytrees of arrays or ``jax.ShapeDtypeStruct``; no data is needed.
        in_shardings: Shardings of the arguments, a tuple with an entry per argument; None takes
            those that the arguments have.
        out_shardings: Shardings of the outputs; None leaves them to the compiler.
        donate: Numbers of the arguments whose buffers the outputs may take.
    """

    @functools.wraps(fn)  # arguments keep their names in the program's text
    def fresh(*a: Any) -> Any:
        return fn(*a)

    kwargs: dict[str, Any] = {"donate_argnums": tuple(donate)}
    # To jit None is a sharding: left to the compiler.
    if in_shardings is not None:
        kwargs["in_shardings"] = in_shardings
    if out_shardings is not None:
        kwargs["out_shardings"] = out_shardings
    fresh.__name__ = getattr(fn, "__name__", "step")
    start = time.perf_counter()
    traced = jax.jit(fresh, **kwargs).trace(*args)
    lowered = traced.lower()
    return LoweredStep(traced.jaxpr, lowered, time.perf_counter() - start)


def compile_step(
    fn: Callable[..., Any],
    *args: Any,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donate: Sequence[int] = (),
    compiler_options: Options | None = None,
) -> CompiledStep:
    """Compiles ``fn`` for arguments of the given shapes; see :func:`lower_step`.

    Args:
        fn: The pure function, of positional arguments.
        *args: Pytrees of arrays or ``jax.ShapeDtypeStruct``; no data is needed.
        in_shardings: Shardings of the arguments.
        out_shardings: Shardings of the outputs.
        donate: Numbers of the arguments whose buffers the outputs may take.
        compiler_options: XLA options of the program.
    """
    lowered = lower_step(
        fn, *args, in_shardings=in_shardings, out_shardings=out_shardings, donate=donate
    )
    return lowered.compile(compiler_options)


def _memory(compiled: Any) -> MemoryUse | None:
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return MemoryUse(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
        host=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
    )
