"""Compiling for TPUs that are not there: libtpu, which needs no chip for it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from axcore.errors import AotError
from axcore.parallel.aot import OutOfMemory
from axcore.plugins import Instance

__all__ = ["TpuCompiler"]

_GIB = 2**30
# What libtpu 0.0.42.1 lets a program use on one device, as its refusals say ("available HBM"); the
# rest is its own. Rounded down to its two decimals.
_AVAILABLE_BYTES = {
    "tpu-v4": int(30.75 * _GIB),
    "tpu-v5e": int(15.75 * _GIB),
    "tpu-v5p": int(95.74 * _GIB),
    "tpu-v6e": int(31.25 * _GIB),
    "tpu-7x": int(94.75 * _GIB),
}
# Each unless the user has set it.
_ENVIRONMENT = {
    # A machine without TPUs has no metadata server that could be asked, and waits for it.
    "TPU_SKIP_MDS_QUERY": "1",
    # Compiling takes no chip, so processes need not keep each other out (a lock file does).
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # What libtpu misses on a machine without TPUs is no news: neither on stderr nor in /tmp.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_STDERR_LOG_LEVEL": "4",
    "TPU_MIN_LOG_LEVEL": "4",
    "TPU_LOG_DIR": "disabled",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class TpuCompiler:
    """libtpu without a chip; implements :class:`axcore.parallel.aot.Compiler`."""

    name = "libtpu"
    compiles = True
    # It refuses by an estimate made early on, and hands out programs whose sum is beyond the limit
    # that it states itself: the sum has to be compared as well.
    reports_out_of_memory = False
    blind_spots = (
        "a refusal for lack of memory names one sum, and no buffers",
        "what libtpu does not refuse is compared by its sum of arguments, outputs, temporaries and "
        "code, which no chip has confirmed",
        "host memory that offloaded activations take is not compared with the host's",
        "memory of a second program (evaluation, restoring) beside the training step's",
    )
    stand_ins: Mapping[tuple[str, str], tuple[str, str]] = {}

    def version(self) -> str:
        """Returns libtpu's version.

        Raises:
            AotError: It is not installed (AX480).
        """
        _check_installed()
        return importlib.metadata.version("libtpu")

    def prepare(self) -> None:
        """Sets libtpu's environment, and keeps JAX from looking for chips.

        Arrays that tracing makes belong on the CPU here, whatever this machine has.
        """
        import jax

        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        settings: Any = jax.config  # its attributes are made at run time
        if not settings.jax_platforms:
            jax.config.update("jax_platforms", "cpu")

    def devices(self, instance: Instance) -> Sequence[Any]:
        """Returns the topology devices of all slices.

        Raises:
            AotError: libtpu is not installed (AX480), or knows no such slice (AX481).
        """
        _check_installed()
        self.prepare()
        attributes = instance.attributes
        return _devices(
            instance.name,
            attributes["libtpu_topology"],
            attributes["chips_per_host_bounds"],
            attributes.get("chip_config_name"),
            instance.num_slices,
        )

    def compile_options(self, instance: Instance) -> Mapping[str, bool | int | float | str]:
        """Returns none: this is the compiler that runs on the chip's host."""
        del instance
        return {}

    def memory_limit_bytes(self, instance: Instance) -> int:
        """Returns what libtpu lets a program use on one device, bytes."""
        return _AVAILABLE_BYTES.get(instance.family, instance.hbm_bytes)

    def out_of_memory(self, error: BaseException) -> OutOfMemory | None:
        """Returns what libtpu says of device memory; None for anything else.

        A kernel that does not fit into vector or scalar memory is an error of the kernel: another
        machine of the kind or another mesh would not help.
        """
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "Ran out of memory" not in text:
            return None
        for form in _FORMS:
            match = form.search(text)
            if match is not None:
                found = match.groupdict()
                return OutOfMemory(_bytes(found["needed"]), _bytes(found.get("available")))
        return OutOfMemory(None) if _IN_HBM.search(text) else None


_SIZE = r"\(?[0-9.]+[KMGTP]?i?B?\)?"
_FORMS = (
    # "Ran out of memory on HBM, the total memory required for HLO temporaries (16.09G) exceeds
    # available HBM (15.75G)."
    re.compile(
        rf"[Rr]an out of memory on HBM.*?(?P<needed>{_SIZE}) exceeds available HBM "
        rf"(?P<available>{_SIZE})",
        re.DOTALL,
    ),
    # "Ran out of memory in memory space hbm. Used 25.93G of 15.48G hbm. Exceeded hbm capacity by
    # 10.45G."
    re.compile(
        rf"[Rr]an out of memory in memory space hbm.*?Used (?P<needed>{_SIZE}) of "
        rf"(?P<available>{_SIZE}) hbm",
        re.DOTALL,
    ),
    # "Program hbm requirement 25.9G: ..." without a capacity.
    re.compile(rf"Program hbm requirement (?P<needed>{_SIZE})"),
)
_IN_HBM = re.compile(r"\bHBM\b|memory space hbm|\bhbm capacity\b")
_NUMBER = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?)(?P<unit>[KMGTP]?)")


def _bytes(text: str | None) -> int | None:
    """Reads ``16.09G``, whose units count in 1024s."""
    match = _NUMBER.search(text or "")
    if match is None:
        return None
    return round(float(match["number"]) * 1024 ** " KMGTP".index(match["unit"] or " "))


def _check_installed() -> None:
    if importlib.util.find_spec("libtpu") is None:
        raise AotError(
            "libtpu is not installed, which is the compiler for TPUs",
            code="AX480",
            where="axlearn-tpu",
            hint='pip install "axlearn-tpu[aot]" (about 210 MB, no TPU)',
        )


@functools.cache
def _devices(
    name: str, topology: str, bounds: str, config: str | None, num_slices: int
) -> tuple[Any, ...]:
    import jax
    from jax.experimental import topologies

    kwargs: dict[str, Any] = {"chips_per_host_bounds": [int(n) for n in bounds.split(",")]}
    if config is not None:
        kwargs["chip_config_name"] = config
    if num_slices > 1:
        kwargs["num_slices"] = num_slices
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **kwargs
        ).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        raise AotError(
            f"libtpu knows no {topology} in {num_slices} slice(s): {error}",
            code="AX481",
            where=name,
            hint="a newer libtpu may; it belongs to the installed jax: jax[tpu]",
        ) from error
    return tuple(found)
