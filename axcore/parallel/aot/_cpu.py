"""Core's own compiler: XLA for this machine's CPU, on simulated devices."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from axcore.parallel.aot._compiler import Option, OutOfMemory
from axcore.parallel.instances import prepare_host, select_devices
from axcore.plugins import Instance

__all__ = ["CpuCompiler"]


class CpuCompiler:
    """Compiles for the CPU that it runs on; implements :class:`Compiler`."""

    name = "xla-cpu"
    compiles = True
    reports_out_of_memory = False
    blind_spots = (
        "simulated devices share one memory and one set of cores: each limit is an equal part",
    )
    stand_ins: Mapping[tuple[str, str], tuple[str, str]] = {}

    def version(self) -> str:
        """Returns jaxlib's version, which carries the compiler."""
        return importlib.metadata.version("jaxlib")

    def prepare(self) -> None:
        """Does nothing: the number of devices follows from the instance."""

    def devices(self, instance: Instance) -> Sequence[Any]:
        """Returns simulated devices.

        Raises:
            ShardingError: JAX has already started with fewer.
        """
        if not jax.distributed.is_initialized():
            prepare_host(instance)
        return select_devices(instance)

    def compile_options(self, instance: Instance) -> Mapping[str, Option]:
        """Returns none: this is the compiler that training uses."""
        del instance
        return {}

    def memory_limit_bytes(self, instance: Instance) -> int:
        """Returns the device's share of this machine's memory."""
        return instance.hbm_bytes

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """Returns None: this compiler does not look at sizes."""
        del error
        return None
