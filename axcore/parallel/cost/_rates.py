"""What one device does in a second: products by dtype, memory; and what share of it is reached.

The shares of memory and links are the same for all hardware and are not fitted: large copies and
collectives reach about 80 % of the stated rates on all of them. The share of products is the one
number that is fitted for each kind of hardware; it comes with the instance.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import numpy as np

from axcore.errors import ShardingError
from axcore.parallel.instances import peak_flops
from axcore.plugins import Instance

__all__ = ["LINK_EFFICIENCY", "MEMORY_EFFICIENCY", "UNFITTED_EFFICIENCY", "Rates", "rates_of"]

MEMORY_EFFICIENCY = 0.8
LINK_EFFICIENCY = 0.8
UNFITTED_EFFICIENCY = 0.6
"""For an instance that states none: between the lowest and the highest that were fitted."""

# Where no rate is stated, the product runs in the next of these that has one: hardware without
# float32 products makes them of bfloat16 ones, and narrow numbers are widened first.
_INSTEAD = {
    "float32": ("tensorfloat32", "bfloat16"),
    "float16": ("bfloat16",),
    "float8_e4m3fn": ("bfloat16",),
    "float8_e5m2": ("float8_e4m3fn", "bfloat16"),
    "int8": ("bfloat16",),
    "int4": ("int8", "bfloat16"),
}


@dataclass(frozen=True)
class Rates:
    """Rates of one device.

    Attributes:
        instance: The machine.
        memory_bytes: Memory bandwidth that is reached, bytes/s.
        efficiency: Share of the peak that products reach.
        notes: What had to be assumed.
    """

    instance: Instance
    memory_bytes: float
    efficiency: float
    notes: tuple[str, ...] = ()

    def peak(self, dtype: str) -> float:
        """Returns the dense peak of a dtype, or of what stands in for it, FLOP/s.

        Raises:
            ShardingError: Neither has a rate.
        """
        return self.named_peak(dtype)[1]

    def named_peak(self, dtype: str) -> tuple[str, float]:
        """Returns (the dtype whose peak measures products of ``dtype``, that peak in FLOP/s).

        Raises:
            ShardingError: See :meth:`peak`.
        """
        for name in (dtype, *_INSTEAD.get(dtype, ())):
            found = peak_flops(self.instance, name)
            if found:
                return name, found
        known = ", ".join(self.instance.peak_flops) or "none"
        raise ShardingError(
            f"no peak rate for products of {dtype}; stated: {known}",
            code="AX490",
            where=self.instance.name,
            hint="the instance type states peak_flops={dtype: FLOP/s}",
        )


def rates_of(instance: Instance, efficiency: float | None = None) -> Rates:
    """Returns the rates of an instance; those of a CPU are measured, once per process.

    Args:
        instance: The machine.
        efficiency: Share of the peak that products reach; None takes the instance's.

    Raises:
        ShardingError: The instance states no memory bandwidth, or an impossible efficiency.
    """
    bandwidth = instance.hbm_bandwidth_bytes
    if bandwidth is None and instance.platform == "cpu":
        bandwidth = measured_memory_bytes() / instance.num_devices
    if not bandwidth:
        raise ShardingError(
            f"hbm_bandwidth_bytes is {bandwidth}, expected bytes/s",
            code="AX491",
            where=instance.name,
            hint="the instance type states hbm_bandwidth_bytes",
        )
    notes: tuple[str, ...] = ()
    found = instance.matmul_efficiency if efficiency is None else efficiency
    if found is None:
        found = UNFITTED_EFFICIENCY
        notes = (
            f"{instance.family} states no matmul_efficiency: {found} is assumed, so that times "
            "are good to compare, not to trust",
        )
    elif efficiency is None:
        notes = (f"matmul_efficiency {found}: {instance.matmul_efficiency_source}",)
    if not 0 < found <= 1:
        raise ShardingError(
            f"matmul_efficiency is {found}, expected a share above 0 and at most 1",
            code="AX493",
            where=instance.name,
        )
    return Rates(instance, bandwidth * MEMORY_EFFICIENCY, found, notes)


@functools.cache
def measured_memory_bytes(num_bytes: int = 1 << 26, repeats: int = 3) -> float:
    """Returns this machine's memory bandwidth over reading and writing, bytes/s."""
    source = np.ones(num_bytes // 8)
    target = np.empty_like(source)
    best = float("inf")
    for _ in range(repeats + 1):  # the first touches the pages
        start = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best
