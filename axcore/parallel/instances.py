"""Machines: from ``--instance NAME`` to a description, and from that to devices.

Vendors' machines come from plugins; core knows the CPU of this machine: ``cpu`` is one device,
``cpu-8`` eight simulated ones.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from axcore.errors import PluginLookupError, ShardingError, did_you_mean
from axcore.plugins import Instance, host, load_target

__all__ = [
    "detect",
    "peak_flops",
    "prepare_host",
    "resolve_cpu",
    "resolve_instance",
    "select_devices",
]

_CPU_NAME = re.compile(r"cpu(?:-([1-9][0-9]*))?")
_MAX_SIMULATED = 1024
_COUNT = re.compile(r"-?(\d+)$")


def resolve_instance(name: str) -> Instance:
    """Returns the machine called ``name``.

    Args:
        name: Such as ``"cpu"``, ``"cpu-8"`` or ``"tpu-v5p-512"``.

    Raises:
        PluginLookupError: No plugin covers the name; near misses are in the hint.
        PluginError: Two distributions cover it, or its size does not exist.
    """
    try:
        spec = host().instance_type(name)
    except PluginLookupError as error:
        known = host().instance_types.names()
        near = _near_instances(name, known)
        plugins = "vendors' machines come with hardware plugins, which are distributions of their "
        others = (error.hint or "").removeprefix(did_you_mean(name, known)).removeprefix("; ")
        hints = [near or f"{plugins}own (keyword axcore)", others]
        raise PluginLookupError(
            f"unknown instance {name!r}; known: {', '.join(known)}",
            hint="; ".join(h for h in hints if h),
        ) from error.__cause__
    return load_target(spec.target, where=f"instance type {spec.name!r}")(name)


def _near_instances(name: str, patterns: Sequence[str]) -> str:
    """Compares names with patterns by their form: the count at the end is the user's."""
    count = _COUNT.search(name)
    number = count.group(1) if count else "1"
    form = _COUNT.sub("", name) + ("-*" if count else "")
    found = did_you_mean(form, patterns) or did_you_mean(name, patterns)
    return found.replace("*", number)


def resolve_cpu(name: str) -> Instance:
    """Returns this machine as ``cpu`` (one device) or ``cpu-N`` (N simulated devices).

    Args:
        name: ``"cpu"`` or ``"cpu-N"`` with N from 1 to 1024.

    Raises:
        PluginLookupError: The name is neither.
    """
    match = _CPU_NAME.fullmatch(name)
    count = int(match.group(1) or 1) if match else 0
    if not 1 <= count <= _MAX_SIMULATED:
        raise PluginLookupError(
            f"unknown instance {name!r}: expected 'cpu', or 'cpu-N' with N simulated devices, "
            f"1 <= N <= {_MAX_SIMULATED}",
            hint="did you mean 'cpu-8'?",
        )
    return Instance(
        name=name,
        family="cpu",
        platform="cpu",
        num_hosts=1,
        devices_per_host=count,
        hbm_bytes=_memory_bytes() // count,
        simulated_devices=count if name != "cpu" else None,
        device_kind="cpu",
    )


def _memory_bytes() -> int:
    """Returns the memory this process may use, bytes: the machine's, or its control group's."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue  # not Linux, or the other version of control groups
        if text.isdigit():
            limits.append(int(text))
    return min(limits)


def detect() -> str:
    """Returns the name of the machine that this process runs on; ``cpu`` when no plugin knows it.

    Raises:
        ShardingError: Several plugins recognize the machine, each as another one.
    """
    found: dict[str, str] = {}
    for name, spec, owner in host().instance_types.items():
        if spec.detect is None:
            continue
        instance = load_target(spec.detect, where=f"instance type {name!r}")()
        if instance is not None:
            found[instance] = owner
    if len(found) > 1:
        claims = ", ".join(f"{name!r} by {owner}" for name, owner in sorted(found.items()))
        raise ShardingError(
            f"this machine is recognized as {claims}",
            code="AX460",
            hint="say which with --instance",
        )
    return next(iter(found), "cpu")


def prepare_host(instance: Instance, *, num_processes: int = 1) -> None:
    """Makes this process ready for an instance; call it before anything touches a device.

    Sets the number of simulated devices, and keeps JAX from starting accelerators for a CPU
    instance. For other platforms nothing needs to be set.

    Args:
        instance: The instance.
        num_processes: Processes of the run, which share simulated devices equally.

    Raises:
        ShardingError: JAX has already started with fewer devices.
    """
    if instance.platform != "cpu":
        return
    if instance.num_devices % num_processes:
        raise ShardingError(
            f"{instance.num_devices} simulated devices do not divide among {num_processes} "
            "processes",
            code="AX461",
            where=instance.name,
            hint=f"use cpu-{-(-instance.num_devices // num_processes) * num_processes}",
        )
    count = instance.num_devices // num_processes
    settings: Any = jax.config  # its attributes are made at run time
    if not settings.jax_platforms:
        # Has no effect once JAX has started, and then none is needed.
        jax.config.update("jax_platforms", "cpu")
    if settings.jax_num_cpu_devices >= count or count == 1:
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        started = jax.local_device_count("cpu")
        if started >= count:
            return
        raise ShardingError(
            f"JAX has already started with {started} CPU device{'s' * (started != 1)}, "
            f"expected {count}",
            code="AX461",
            where=instance.name,
            hint="call prepare_host first in the process, or start it with "
            f"JAX_NUM_CPU_DEVICES={count}",
        ) from error


def select_devices(instance: Instance) -> list[jax.Device]:  # pyright: ignore[reportInvalidTypeForm]
    """Returns the devices of an instance, of all processes; starts JAX.

    Args:
        instance: The instance, prepared with :func:`prepare_host`.

    Raises:
        ShardingError: This machine has no such devices, or too few.
    """
    try:
        devices = jax.devices(instance.platform)
    except RuntimeError as error:
        raise ShardingError(
            f"no {instance.platform!r} devices here, expected {instance.num_devices}: {error}",
            code="AX462",
            where=instance.name,
            hint="run on that machine, or compile for it here with `axcore aot`",
        ) from error
    wanted = instance.num_devices
    # One process may use a part of its machine; of several processes each must be part of the mesh.
    if len(devices) < wanted or (jax.process_count() > 1 and len(devices) != wanted):
        raise ShardingError(
            f"{len(devices)} {instance.platform!r} devices in {jax.process_count()} process(es), "
            f"expected {wanted}",
            code="AX462",
            where=instance.name,
            hint=f"use an instance of {len(devices)} devices"
            + (f", such as cpu-{len(devices)}" if instance.platform == "cpu" else ""),
        )
    return devices[:wanted]


def peak_flops(instance: Instance, dtype: str) -> float | None:
    """Returns the peak dense rate of one device, FLOP/s; None when the vendor states none.

    For the CPU it is measured, once per process (about 0.1 s), over all cores; simulated devices
    share them.

    Args:
        instance: The instance.
        dtype: Dtype name of the factors, such as ``"bfloat16"``.
    """
    if instance.platform == "cpu":
        # Narrow products that XLA's CPU backend has no fast code for are no measure of the machine.
        best = max(_measured_cpu_flops(dtype), _measured_cpu_flops("float32"))
        return best / instance.num_devices
    return instance.peak_flops.get(dtype)


@functools.cache
def _measured_cpu_flops(dtype: str, size: int = 1024, repeats: int = 5) -> float:
    """Returns the best rate of a square matrix multiplication, FLOP/s."""
    device = jax.local_devices(backend="cpu")[0]
    x = jax.device_put(jnp.ones((size, size), dtype), device)
    multiply = jax.jit(lambda x: x @ x).lower(x).compile()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        multiply(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
