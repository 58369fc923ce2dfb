"""Compute capabilities of the GPUs that instances name; no JAX at import."""

from __future__ import annotations

import functools

from axcore.errors import PluginError
from axlearn_gpu._target import SILICON
from axlearn_gpu.instances import resolve

__all__ = ["capability_of", "current_capability"]


@functools.cache
def capability_of(instance: str) -> tuple[int, int] | None:
    """Returns the compute capability of an instance's GPUs, or None if it is not ours.

    Example:
        >>> capability_of("gpu-h100-8"), capability_of("local")
        ((9, 0), None)
    """
    if not instance.startswith("gpu-"):
        return None
    try:
        gpu = resolve(instance).attributes["gpu"]
    except PluginError:
        return None
    return SILICON[gpu].capability


def current_capability() -> int:
    """Returns what the running trace compiles for, as Triton writes it: 90 for 9.0.

    The target's; without one that of this machine's GPU.

    Raises:
        PluginError: Neither is known (AX285).
    """
    import jax

    from axcore.ops import ambient_target

    target = ambient_target()
    found = None if target is None else capability_of(target.instance)
    if found is not None:
        return 10 * found[0] + found[1]
    try:
        device = jax.local_devices(backend="gpu")[0]
    except RuntimeError as error:
        raise PluginError(
            "a Triton kernel is compiled for one kind of GPU; the target names none and this "
            "machine has none",
            code="AX285",
            hint="choose an instance such as --instance gpu-h100-8",
        ) from error
    major, minor = str(device.compute_capability).split(".")
    return 10 * int(major) + int(minor)
