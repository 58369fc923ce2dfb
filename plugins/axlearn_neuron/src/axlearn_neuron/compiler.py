"""What stands where Trainium's compiler would be: the memory a program may use, and why no more.

The vendor's compiler (neuronx-cc) comes from the vendor's own package index and takes what the
vendor's JAX bridge hands it; neither can be had on a machine without that index. So the answer for
Trainium is the memory model's and the FLOP count's, and is marked as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from axcore.errors import AotError
from axcore.parallel.aot import OutOfMemory
from axcore.plugins import Instance
from axlearn_neuron._presence import NEEDS
from axlearn_neuron.kernels import NKI

__all__ = ["NeuronCompiler"]

# Left to the runtime on each device: rings of descriptors, collectives' buffers, profiling. The
# vendor publishes no figure: assumed, not measured.
_RUNTIME_BYTES = 2**30


class NeuronCompiler:
    """No compiler; implements :class:`axcore.parallel.aot.Compiler`."""

    name = "axlearn-neuron memory model"
    compiles = False
    reports_out_of_memory = False
    blind_spots = (
        f"nothing was compiled: compiling for Trainium {NEEDS}",
        "the memory model knows parameters, optimizer state, gradients and saved activations; not "
        "the compiler's spills, DMA buffers and the code itself",
        "1 GiB a device for the runtime is an assumption",
    )
    stand_ins: Mapping[tuple[str, str], tuple[str, str]] = {
        kernel: ("xla", f"tracing a NKI kernel {NEEDS}; its FLOPs are counted from the reference")
        for kernel in NKI
    }

    def version(self) -> str:
        """Returns the version of this package: the memory model is its compiler."""
        import axlearn_neuron

        return axlearn_neuron.__version__

    def prepare(self) -> None:
        """Keeps JAX from looking for devices: tracing happens on the CPU."""
        import jax

        settings: Any = jax.config  # its attributes are made at run time
        if not settings.jax_platforms:
            jax.config.update("jax_platforms", "cpu")

    def devices(self, instance: Instance) -> Sequence[Any]:
        """Raises: there are none without the compiler.

        Raises:
            AotError: Always (AX480).
        """
        raise AotError(
            "there is no compiler for Trainium here, and so no devices to compile for",
            code="AX480",
            where=instance.name,
            hint=f"compiling {NEEDS}",
        )

    def compile_options(self, instance: Instance) -> Mapping[str, bool | int | float | str]:
        """Returns none."""
        del instance
        return {}

    def memory_limit_bytes(self, instance: Instance) -> int:
        """Returns a device's memory less what the runtime is taken to keep, bytes."""
        return instance.hbm_bytes - _RUNTIME_BYTES

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """Returns None: nothing is compiled."""
        del error
        return None
