"""What a compiler that needs no device has to offer, and which one serves an instance.

A distribution provides one for its platform through the ``axcore_compilers`` hook; the target is a
class that is made without arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from axcore.errors import AotError
from axcore.plugins import Instance, host, load_target

__all__ = ["Compiler", "OutOfMemory", "compiler_for"]

Option = bool | int | float | str


@dataclass(frozen=True)
class OutOfMemory:
    """A program that does not fit, as a compiler says it.

    Attributes:
        needed_bytes: What the program needs on one device; None if the compiler does not say.
        available_bytes: What a program may use there; None if the compiler does not say.
    """

    needed_bytes: int | None
    available_bytes: int | None = None


class Compiler(Protocol):
    """The compiler of one platform, for compiling without a device.

    Attributes:
        name: What it is called in reports.
        compiles: False when there is no compiler to be had: the answer is then the memory model
            and the FLOP count, and is marked as such. ``devices`` is never called.
        reports_out_of_memory: Whether a program that does not fit is an error of the compiler; if
            not, its peak is compared with :meth:`memory_limit_bytes`.
        blind_spots: What its answer cannot see, one line each; they stand in every report.
        stand_ins: ``(op, implementation)`` -> ``(stand-in implementation, reason)``, for kernels
            that the compiler as installed cannot build but whose program is near enough to that
            of the stand-in. Every other kernel is taken to compile.
    """

    name: str
    compiles: bool
    reports_out_of_memory: bool
    blind_spots: tuple[str, ...]
    stand_ins: Mapping[tuple[str, str], tuple[str, str]]

    def version(self) -> str:
        """Returns the compiler's version; part of the key of cached results.

        Raises:
            AotError: AX480 when its package is missing, naming the extra to install.
        """
        ...

    def prepare(self) -> None:
        """Sets what must be set before JAX touches the platform; harmless when called again."""
        ...

    def devices(self, instance: Instance) -> Sequence[Any]:
        """Returns the topology devices of an instance, of all its slices.

        Raises:
            AotError: AX480 when the package is missing, naming the extra to install; AX481 when
                the compiler knows no such machine.
        """
        ...

    def compile_options(self, instance: Instance) -> Mapping[str, Option]:
        """Returns options that only a compilation without a device needs."""
        ...

    def memory_limit_bytes(self, instance: Instance) -> int:
        """Returns what a program may use on one device, bytes."""
        ...

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """Returns what an error of the compiler says of memory; None for any other error."""
        ...


def compiler_for(instance: Instance) -> Compiler:
    """Returns the compiler of the distribution that owns the instance's platform.

    Raises:
        AotError: No active plugin provides one.
        PluginError: Its target cannot be imported.
    """
    compilers = host().compilers
    if instance.platform not in compilers:
        raise AotError(
            f"no compiler for platform {instance.platform!r}; "
            f"known: {', '.join(compilers.names()) or 'none'}",
            code="AX482",
            where=instance.name,
            hint="install a plugin whose axcore_compilers hook provides it",
        )
    spec = compilers.get(instance.platform)
    target: Any = load_target(spec.target, where=f"compiler of {instance.platform!r}")
    return target() if isinstance(target, type) else target
