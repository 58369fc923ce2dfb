"""Compiling for GPUs that are not there: XLA's CUDA plugin with a description of the GPU.

The plugin generates real PTX and machine code without a driver; only what has to be *measured* on a
GPU (which algorithm of a library is fastest) is left out.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

from axcore.errors import AotError
from axcore.parallel.aot import OutOfMemory
from axcore.plugins import Instance
from axlearn_gpu._target import SILICON, target_config

__all__ = ["GpuCompiler", "topology"]

_PLUGINS = {
    "jax_plugins.xla_cuda13": "jax-cuda13-pjrt",
    "jax_plugins.xla_cuda12": "jax-cuda12-pjrt",
}
# Of a GPU's memory, what a program may use. The runtime takes XLA_PYTHON_CLIENT_MEM_FRACTION of
# what is free at its start as one pool (0.75 unless set, see "GPU memory allocation" of the JAX
# documentation). Outside the pool stay the CUDA context, code, NCCL's buffers and the libraries'
# workspaces: 3 to 6 GB of 80 on several hosts is an assumption, not a measurement.
_FRACTION = 0.92
_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


class GpuCompiler:
    """XLA's CUDA compiler without a device; implements :class:`axcore.parallel.aot.Compiler`."""

    name = "xla-cuda"
    compiles = True
    reports_out_of_memory = False
    blind_spots = (
        "algorithms of matrix products are not tuned: that needs the GPU; their workspace is not "
        "in the peak",
        "buffers of NCCL and the libraries, the CUDA context and fragmentation are a fixed part of "
        f"the memory that is left free ({1 - _FRACTION:.0%}), which assumes that the run sets "
        f"XLA_PYTHON_CLIENT_MEM_FRACTION={_FRACTION} (JAX's own default is 0.75)",
        "float8 products are compiled as float16 ones where Triton's are switched off: cuBLASLt's "
        "need the GPU",
        "options that depend on measured bandwidths use the compiler's tables of a GPU's kind",
    )
    stand_ins: Mapping[tuple[str, str], tuple[str, str]] = {
        ("attention", "cudnn"): (
            "pallas_triton",
            "cuDNN chooses its algorithm on the GPU; both are blockwise, with the same operands "
            "and residuals",
        ),
    }

    def version(self) -> str:
        """Returns the version of the CUDA plugin.

        Raises:
            AotError: It is not installed (AX480).
        """
        return importlib.metadata.version(_installed())

    def prepare(self) -> None:
        """Keeps JAX from looking for a GPU, and the plugin's log quiet.

        Arrays that tracing makes belong on the CPU here, whatever this machine has.
        """
        import jax

        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        settings: Any = jax.config  # its attributes are made at run time
        if not settings.jax_platforms:
            jax.config.update("jax_platforms", "cpu")

    def devices(self, instance: Instance) -> Sequence[Any]:
        """Returns the topology devices of all hosts.

        Raises:
            AotError: The CUDA plugin is not installed (AX480), or does not take the description
                of the GPU (AX481).
        """
        _installed()
        self.prepare()
        return _devices(_gpu(instance), topology(instance))

    def compile_options(self, instance: Instance) -> Mapping[str, bool | int | float | str]:
        """Returns options that take the place of what only a GPU can tell."""
        del instance
        return {
            # Nothing can be timed here: the libraries' first choice it is.
            "xla_gpu_autotune_level": 0,
        }

    def memory_limit_bytes(self, instance: Instance) -> int:
        """Returns the part of the GPU's memory that the runtime's pool takes, bytes.

        That is ``XLA_PYTHON_CLIENT_MEM_FRACTION`` of it where it is set, else 92 %.
        """
        stated = [os.environ[name] for name in _VARIABLES if os.environ.get(name)]
        fraction = _FRACTION
        if stated:
            try:
                fraction = float(stated[0])
            except ValueError as error:
                raise AotError(
                    f"XLA_PYTHON_CLIENT_MEM_FRACTION is {stated[0]!r}, expected a number",
                    code="AX481",
                    where=instance.name,
                    hint=f"for example {_FRACTION}",
                ) from error
        return int(instance.hbm_bytes * fraction)

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """Returns None: this compiler does not look at sizes."""
        del error
        return None


def topology(instance: Instance) -> str:
    """Returns ``slices x hosts x GPUs``, where a slice is one NVLink domain.

    A domain that the hosts do not fill evenly (72 GPUs of a rack, 64 hosts of 4) counts as the
    largest number of hosts below it that divides theirs.

    Example:
        >>> from axlearn_gpu.instances import resolve
        >>> topology(resolve("gpu-h100-256")), topology(resolve("gpu-gb200-256"))
        ('32x1x8', '4x16x4')
    """
    hosts, gpus = instance.num_hosts, instance.devices_per_host
    most = max(1, int(instance.attributes["nvlink_domain"]) // gpus)
    joined = max(n for n in range(1, min(most, hosts) + 1) if hosts % n == 0)
    return f"{hosts // joined}x{joined}x{gpus}"


def _gpu(instance: Instance) -> str:
    gpu = instance.attributes.get("gpu", "")
    if gpu not in SILICON:
        raise AotError(
            f"no description of the GPU {gpu!r}; known: {', '.join(SILICON)}",
            code="AX481",
            where=instance.name,
        )
    return gpu


def _installed() -> str:
    """Returns the distribution that carries the CUDA compiler."""
    for module, distribution in _PLUGINS.items():
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:  # no jax_plugins at all
            found = None
        if found is not None:
            return distribution
    raise AotError(
        "the CUDA plugin of JAX is not installed, which is the compiler for GPUs",
        code="AX480",
        where="axlearn-gpu",
        hint='pip install "axlearn-gpu[aot]" (about 180 MB, no driver, no GPU)',
    )


@functools.cache
def _devices(gpu: str, shape: str) -> tuple[Any, ...]:
    import jax
    from jax.experimental import topologies

    try:
        found = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(gpu), topology=shape
        )
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise AotError(
            f"XLA's CUDA plugin does not take the description of {gpu!r} ({shape}): {error}",
            code="AX481",
            where=f"gpu {gpu}",
            hint="a newer jax-cuda12-plugin and jax-cuda12-pjrt may know it",
        ) from error
    return tuple(found.devices)
