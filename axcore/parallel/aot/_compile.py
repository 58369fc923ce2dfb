"""Compiling a lowered program for a machine that is not here, once: results are kept by content."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from axcore._files import atomic_write
from axcore._memory import peak_rss_bytes
from axcore.errors import AotError
from axcore.parallel.aot._buffers import Buffer, largest_buffers
from axcore.parallel.aot._collectives import Collective, find_collectives
from axcore.parallel.aot._compiler import Compiler, Option, OutOfMemory
from axcore.parallel.aot._hlo import read_program
from axcore.parallel.compiling import LoweredStep, MemoryUse
from axcore.plugins import Instance

__all__ = ["CompileResult", "compile_for"]

_log = logging.getLogger("axcore.aot")
# Part of the key: another form of the result, or another reading of the text, is another result.
_FORM = 8


@dataclass(frozen=True)
class CompileResult:
    """What a compiler made of a program, or that it does not fit.

    Attributes:
        memory: Bytes on one device; None when the program does not fit and the compiler stopped,
            or when it does not say.
        out_of_memory: What the compiler said, if it refused for lack of memory.
        collectives: What moves between devices.
        buffers: The largest arrays.
        compile_seconds: How long it took, when it was compiled.
        peak_rss_bytes: Most memory that the compiling process had held by then; None where the
            system does not say.
        cached: Whether the answer is from an earlier compilation.
    """

    memory: MemoryUse | None
    out_of_memory: OutOfMemory | None
    collectives: tuple[Collective, ...]
    buffers: tuple[Buffer, ...]
    compile_seconds: float
    peak_rss_bytes: int | None
    cached: bool = False

    def fits(self, limit_bytes: int, *, compiler_decides: bool) -> bool:
        """Tells whether the program fits on a device.

        Args:
            limit_bytes: What a program may use.
            compiler_decides: Whether the compiler would have refused; otherwise its sum is
                compared with the limit.
        """
        if self.out_of_memory is not None:
            return False
        return compiler_decides or self.memory is None or self.memory.peak <= limit_bytes

    def needed_bytes(self) -> int | None:
        """Returns what the program needs on one device; None if the compiler does not say."""
        if self.out_of_memory is not None:
            return self.out_of_memory.needed_bytes
        return None if self.memory is None else self.memory.peak


def compile_for(
    instance: Instance,
    compiler: Compiler,
    lowered: LoweredStep,
    mesh: Mapping[str, int],
    options: Mapping[str, Option],
    *,
    cache: Path | None = None,
) -> CompileResult:
    """Compiles a program for the instance's topology devices, or finds what that gave before.

    Args:
        instance: The machine.
        compiler: Its compiler.
        lowered: The program, lowered for the compiler's devices.
        mesh: Mesh axis -> size, in the mesh's order.
        options: Compiler options of the program.
        cache: Directory of earlier results; None compiles anew.

    Raises:
        AotError: AX484 when the compiler fails for another reason than memory.
    """
    options = {**compiler.compile_options(instance), **options}
    place = None
    if cache is not None:
        place = cache / f"{_key(instance, compiler, lowered, mesh, options)}.json"
        found = _read(place)
        if found is not None:
            return found
    result = _compile(instance, compiler, lowered, mesh, options)
    if place is not None:
        _write(place, result)
    return result


def _compile(
    instance: Instance,
    compiler: Compiler,
    lowered: LoweredStep,
    mesh: Mapping[str, int],
    options: Mapping[str, Option],
) -> CompileResult:
    start = time.perf_counter()
    try:
        with _programs_not_kept():
            step = lowered.compile(options)
    except Exception as error:
        refused = compiler.out_of_memory(error)
        if refused is None:
            first = str(error).strip().splitlines()
            raise AotError(
                f"{compiler.name} cannot compile the program: {type(error).__name__}: "
                f"{first[0] if first else ''}",
                code="AX484",
                where=instance.name,
                hint="--debug shows all of the compiler's message",
                exit_code=4,
            ) from error
        seconds = time.perf_counter() - start
        return CompileResult(None, refused, (), (), seconds, peak_rss_bytes())
    program = read_program(step.call.as_text())  # pyright: ignore[reportFunctionMemberAccess]
    return CompileResult(
        memory=step.memory,
        out_of_memory=None,
        collectives=find_collectives(program, mesh),
        buffers=largest_buffers(program),
        compile_seconds=step.compile_seconds,
        peak_rss_bytes=peak_rss_bytes(),
    )


@contextlib.contextmanager
def _programs_not_kept() -> Iterator[None]:
    """Leaves JAX's cache of compiled programs alone.

    It cannot read back what was compiled without a device, and would make the time a lie.
    """
    settings: Any = jax.config  # its attributes are made at run time
    former = settings.jax_enable_compilation_cache
    if not (former and settings.jax_compilation_cache_dir):
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX remembers whether it was on
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", former)
        compilation_cache.reset_cache()


def _key(
    instance: Instance,
    compiler: Compiler,
    lowered: LoweredStep,
    mesh: Mapping[str, int],
    options: Mapping[str, Option],
) -> str:
    parts = (
        f"form {_FORM}",
        f"{compiler.name} {compiler.version()}",
        repr(instance),
        repr(list(mesh.items())),
        repr(sorted(options.items())),
        # Without locations: where a file lies and what line it is on changes no program.
        lowered.lowered.as_text(),
    )
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:40]


def _read(place: Path) -> CompileResult | None:
    try:
        data: dict[str, Any] = json.loads(place.read_text())
        memory, refused = data["memory"], data["out_of_memory"]
        return CompileResult(
            memory=None if memory is None else MemoryUse(**memory),
            out_of_memory=None if refused is None else OutOfMemory(**refused),
            collectives=tuple(Collective(**c) for c in data["collectives"]),
            buffers=tuple(Buffer(**b) for b in data["buffers"]),
            compile_seconds=data["compile_seconds"],
            peak_rss_bytes=data["peak_rss_bytes"],
            cached=True,
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("an earlier result cannot be read and is made anew: %s: %s", place, error)
        return None


def _write(place: Path, result: CompileResult) -> None:
    data = dataclasses.asdict(result)
    del data["cached"]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(place, json.dumps(data, indent=1))
    except OSError as error:
        _log.warning("the result is not kept: %s: %s", place.parent, error.strerror or error)
