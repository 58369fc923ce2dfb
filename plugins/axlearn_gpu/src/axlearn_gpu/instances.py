"""GPU machines: ``gpu-p5.48xlarge-256``, ``gpu-h100-256``; the number is GPUs in all.

A name holds a cloud's machine, or a GPU for NVIDIA's reference system with it. Nothing here imports
JAX or touches a device; :func:`detect` reads the environment, ``/proc`` and ``/sys``.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from axcore.errors import PluginError, did_you_mean
from axcore.plugins import Instance
from axlearn_gpu._gpus import (
    FITTED,
    FITTED_SOURCE,
    GPUS,
    MACHINES,
    MATMUL_EFFICIENCY,
    Machine,
)

__all__ = ["detect", "resolve"]

_NAME = re.compile(r"gpu-(?P<machine>.+)-(?P<count>[1-9]\d*)")
_MAX_GPUS = 2**20  # more is a slip of the finger
_log = logging.getLogger(__name__)


def resolve(name: str) -> Instance:
    """Returns the machines called ``name``.

    ``attributes`` holds ``gpu``, ``nvlink_domain`` (GPUs that NVLink joins), ``xla_target``, the
    name of OpenXLA's description of the GPU, and ``aot_stand_ins``, the kernels whose stand-ins the
    deviceless compiler may take.

    Args:
        name: ``gpu-MACHINE-COUNT`` or ``gpu-GPU-COUNT``; a multiple of the GPUs of one machine. Of
            NVIDIA's reference systems a part of one host may be asked for: 1, 2, 4 or 8 GPUs.

    Raises:
        PluginError: The name has another form, or machines do not come in that number (AX283).
    """
    match = _NAME.fullmatch(name)
    machine = MACHINES.get(match["machine"]) if match else None
    if match is None or machine is None:
        near = did_you_mean(match["machine"], MACHINES) if match else ""
        raise PluginError(
            f"instance {name!r} is not of the form gpu-MACHINE-COUNT; machines: "
            f"{', '.join(MACHINES)}",
            code="AX283",
            hint=near or "for example gpu-h100-256, or gpu-p5.48xlarge-256",
        )
    count = int(match["count"])
    sizes = _sizes_near(machine, count)
    if count not in sizes:
        near = [f"gpu-{machine.name}-{n}" for n in sizes]
        raise PluginError(
            f"{machine.name} has {machine.gpus} GPUs; {count} is no number of whole machines",
            code="AX283",
            where=name,
            hint=f"the nearest: {' and '.join(near)}",
        )
    gpu = GPUS[machine.gpu]
    per_host = min(count, machine.gpus)
    return Instance(
        name=name,
        family=f"gpu-{gpu.name}",
        platform="gpu",
        num_hosts=count // per_host,
        devices_per_host=per_host,
        hbm_bytes=gpu.hbm_bytes,
        peak_flops=gpu.peak_flops,
        hbm_bandwidth_bytes=gpu.hbm_bandwidth_bytes,
        ici_bandwidth_bytes=gpu.nvlink_bandwidth_bytes,
        ici_domain_devices=min(count, machine.nvlink_domain),
        # A part of a host has its part of the adapters.
        dcn_bandwidth_bytes=machine.network_bytes * per_host / machine.gpus,
        device_kind=gpu.device_kind,
        matmul_efficiency=MATMUL_EFFICIENCY,
        matmul_efficiency_source=FITTED_SOURCE
        if gpu.name == FITTED
        else f"that of {FITTED}, not fitted",
        attributes={
            "gpu": gpu.name,
            "nvlink_domain": str(min(count, machine.nvlink_domain)),
            "xla_target": gpu.xla_target,
            # Of one kind with what stands in for it: GpuCompiler.stand_ins says why.
            "aot_stand_ins": "attention.cudnn",
            **_BLOCKS[count > 1],
        },
    )


# Products with a scale for each block, on one GPU and on several.
_BLOCKS = (
    {"block_scales_need": "xla_gpu_enable_triton_gemm=true"},
    {
        "no_block_scales": "XLA's partitioner cannot write `scaled-dot` down for several GPUs "
        "(tried with jaxlib 0.10.2 and 0.12.0.1)"
    },
)


def _sizes_near(machine: Machine, count: int) -> tuple[int, ...]:
    """Returns the next smaller and the next larger count that machines come in."""
    below = min(count, _MAX_GPUS) // machine.gpus * machine.gpus
    above = below + machine.gpus
    if machine.partial and count < machine.gpus:
        parts = [1 << n for n in range(machine.gpus.bit_length())]
        below = max(n for n in parts if n <= count)
        above = min(n for n in parts if n >= count)
    if count == below or above > _MAX_GPUS:
        return (below,)
    return tuple(n for n in (below, above) if n)


def detect() -> str | None:
    """Returns the name of the machines that this process's job has, or None without GPUs.

    Kind and number of GPUs come from ``/proc/driver/nvidia``, less what ``CUDA_VISIBLE_DEVICES``
    hides; on EC2 the machine is the one the firmware names. The number of hosts is that of the
    Slurm job step, one without Slurm. No device is touched. GPUs that no data sheet here describes
    are left alone, with a warning in the log.
    """
    return _detect(os.environ, Path("/"), _jax_may_use_gpu(os.environ))


def _jax_may_use_gpu(environ: Mapping[str, str]) -> bool:
    platforms = environ.get("JAX_PLATFORMS", "").split(",")
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    wanted = platforms == [""] or bool({"cuda", "gpu"} & set(platforms))
    return wanted and any(importlib.util.find_spec(name) for name in plugins)


def _detect(environ: Mapping[str, str], root: Path, usable: bool) -> str | None:
    if not usable:
        return None
    models = _models(root / "proc/driver/nvidia/gpus")
    count = len(models)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = min(count, len([part for part in visible.split(",") if part.strip()]))
    if not count:
        return None
    gpu = _gpu_of(models[0])
    if gpu is None or len(set(models)) > 1:
        _log.warning(
            "GPUs here that axlearn-gpu does not describe: %s; running on another platform unless "
            "--instance says otherwise",
            ", ".join(sorted(set(models))),
        )
        return None
    hosts = int(environ.get("SLURM_STEP_NUM_NODES") or 1)
    machine = _firmware_name(root / "sys/devices/virtual/dmi/id/product_name")
    if machine in MACHINES and MACHINES[machine].gpus == count:
        return f"gpu-{machine}-{count * hosts}"
    return f"gpu-{gpu}-{count * hosts}"


def _models(root: Path) -> list[str]:
    """Returns the model of each GPU, as the driver's files tell it."""
    found: list[str] = []
    for path in sorted(root.glob("*/information")):
        for line in path.read_text().splitlines():
            field, _, value = line.partition(":")
            if field.strip() == "Model":
                found.append(value.strip())
    return found


def _gpu_of(model: str) -> str | None:
    # The driver adds memory and form to some names: "NVIDIA H200 141GB HBM3e".
    for gpu in GPUS.values():
        kind = gpu.device_kind
        if model == kind or (model.startswith(f"{kind} ") and "PCIe" not in model):
            return gpu.name
    return None


def _firmware_name(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # no firmware tables here
