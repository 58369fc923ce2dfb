"""Trainium machines: ``neuron-trn2.48xlarge-64``; the number is hosts.

JAX devices are logical NeuronCores: two physical cores on Trainium2 and 3, one on Trainium1, which
is the vendor's default. Nothing here imports JAX or touches a device; :func:`detect` reads the
environment and ``/sys``.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from axcore.errors import PluginError, did_you_mean
from axcore.plugins import Instance
from axlearn_neuron._machines import (
    CHIPS,
    FITTED,
    FITTED_SOURCE,
    MACHINES,
    MATMUL_EFFICIENCY,
)
from axlearn_neuron.kernels import NKI

__all__ = ["detect", "resolve"]

_NAME = re.compile(r"neuron-(?P<machine>.+)-(?P<hosts>[1-9]\d*)")
_MAX_HOSTS = 2**16  # more is a slip of the finger


def resolve(name: str) -> Instance:
    """Returns the machines called ``name``.

    ``attributes`` holds ``chips`` (in all), ``physical_cores_per_device`` (LNC), ``link_domain``
    (hosts that NeuronLink joins), ``figures``: ``published``, or ``assumed`` where no page of the
    vendor gives them under this name; and ``aot_stand_ins``, the kernels of which ``axcore aot``
    traces the reference.

    Args:
        name: ``neuron-MACHINE-HOSTS``.

    Raises:
        PluginError: The name has another form, or more hosts than there can be (AX284).
    """
    match = _NAME.fullmatch(name)
    machine = MACHINES.get(match["machine"]) if match else None
    hosts = int(match["hosts"]) if match else 0
    if machine is None or not 1 <= hosts <= _MAX_HOSTS:
        near = did_you_mean(match["machine"], MACHINES) if match and machine is None else ""
        raise PluginError(
            f"instance {name!r} is not of the form neuron-MACHINE-HOSTS, with 1 to {_MAX_HOSTS} "
            f"hosts; machines: {', '.join(MACHINES)}",
            code="AX284",
            hint=near or "for example neuron-trn2.48xlarge-64",
        )
    chip = CHIPS[machine.chip]
    parts = chip.cores // chip.cores_per_device
    return Instance(
        name=name,
        family=f"neuron-{machine.name.partition('.')[0]}",
        platform="neuron",
        num_hosts=hosts,
        devices_per_host=machine.chips * parts,
        hbm_bytes=chip.hbm_bytes // parts,
        peak_flops={dtype: flops / parts for dtype, flops in chip.peak_flops.items()},
        hbm_bandwidth_bytes=chip.hbm_bandwidth_bytes / parts,
        ici_bandwidth_bytes=machine.link_bandwidth_bytes / parts,
        ici_domain_devices=min(hosts, machine.link_domain) * machine.chips * parts,
        dcn_bandwidth_bytes=machine.network_bytes,
        matmul_efficiency=MATMUL_EFFICIENCY,
        matmul_efficiency_source=FITTED_SOURCE
        if chip.name == FITTED
        else f"that of {FITTED}, not fitted",
        attributes={
            "chips": str(machine.chips * hosts),
            "physical_cores_per_device": str(chip.cores_per_device),
            "link_domain": str(machine.link_domain),
            "figures": "published" if machine.certain else "assumed",
            # Accepted without being asked for: no compiler for these machines is to be had.
            "aot_stand_ins": " ".join(f"{op}.{name}" for op, name in NKI),
        },
    )


def detect() -> str | None:
    """Returns the name of the machines of this process's job, or None where there is no Trainium.

    EC2's firmware names the machine. The number of hosts is that of the Slurm job step, or of the
    processes that ``NEURON_PJRT_PROCESSES_NUM_DEVICES`` lists (one a host, as the vendor's bridge
    wants them), else one. No device is touched.
    """
    return _detect(os.environ, Path("/"), _jax_may_use_neuron(os.environ))


def _jax_may_use_neuron(environ: Mapping[str, str]) -> bool:
    platforms = environ.get("JAX_PLATFORMS", "")
    wanted = not platforms or "neuron" in platforms.split(",")
    return wanted and importlib.util.find_spec("jax_neuronx") is not None


def _detect(environ: Mapping[str, str], root: Path, usable: bool) -> str | None:
    if not usable:
        return None
    try:
        machine = (root / "sys/devices/virtual/dmi/id/product_name").read_text().strip()
    except OSError:
        return None  # no firmware tables here
    if machine not in MACHINES:
        return None
    listed = environ.get("NEURON_PJRT_PROCESSES_NUM_DEVICES")
    hosts = int(environ.get("SLURM_STEP_NUM_NODES") or 0)
    hosts = hosts or (len(listed.split(",")) if listed else 1)
    return f"neuron-{machine}-{hosts}"
