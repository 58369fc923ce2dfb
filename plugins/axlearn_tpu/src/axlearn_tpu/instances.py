"""TPU slices: ``tpu-v5p-512``, ``tpu-v5e-256-4``.

The number is the vendor's own count: TensorCores (two a chip) for v4 and v5p, chips for v5e, v6e
and 7x. A second number is slices, joined by the data centre network: ``tpu-v5e-256-4`` has 1,024
chips. Nothing here imports JAX or touches a device; :func:`detect` reads the environment and
``/sys``.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from axcore.errors import PluginError
from axcore.plugins import Instance
from axlearn_tpu._chips import CHIPS, FITTED, FITTED_SOURCE, MATMUL_EFFICIENCY, Chip
from axlearn_tpu._topology import hosts_and_chips, nearest_sizes, num_chips, slice_shape, text

__all__ = ["detect", "resolve"]

_NAME = re.compile(r"tpu-(?P<generation>[a-z0-9]+)-(?P<count>[1-9]\d*)(?:-(?P<slices>[1-9]\d*))?")


def resolve(name: str) -> Instance:
    """Returns the slice, or slices, called ``name``.

    ``attributes`` holds what libtpu wants to compile for it without a device: ``libtpu_topology``
    (``"v5p:4x8x8"``), ``chips_per_host_bounds`` and, where needed, ``chip_config_name``; and
    ``chips`` of one slice.

    Args:
        name: ``tpu-GENERATION-COUNT`` or ``tpu-GENERATION-COUNT-SLICES``.

    Raises:
        PluginError: The name has another form, or there is no slice of that size (AX281); the hint
            names the nearest ones.
    """
    match = _NAME.fullmatch(name)
    chip = CHIPS.get(match["generation"]) if match else None
    if match is None or chip is None:
        raise PluginError(
            f"instance {name!r} is not of the form tpu-GENERATION-COUNT[-SLICES]; generations: "
            f"{', '.join(CHIPS)}",
            code="AX281",
            hint="for example tpu-v5p-512, or tpu-v5e-256-4 for four slices",
        )
    count, num_slices = int(match["count"]), int(match["slices"] or 1)
    unit = 2 if chip.counts_cores else 1
    chips, rest = divmod(count, unit)
    shape = None if rest else slice_shape(chip, chips)
    if shape is None:
        tail = f"-{num_slices}" if match["slices"] else ""
        near = [
            f"tpu-{chip.generation}-{n * unit}{tail}" for n in nearest_sizes(chip, count / unit)
        ]
        counted = "TensorCores" if chip.counts_cores else "chips"
        raise PluginError(
            f"there is no {chip.generation} slice of {count} {counted}",
            code="AX281",
            where=name,
            hint=f"the nearest: {' and '.join(near)}",
        )
    return _instance(name, chip, chips, shape, num_slices)


def _instance(
    name: str, chip: Chip, chips: int, shape: tuple[int, ...], num_slices: int
) -> Instance:
    hosts, chips_per_host = hosts_and_chips(chip, chips)
    parts = chip.devices_per_chip
    attributes = {
        "chips": str(chips),
        "libtpu_topology": f"{chip.libtpu_name}:{text(shape)}",
        "chips_per_host_bounds": {1: "1,1,1", 4: "2,2,1", 8: "2,4,1"}[chips_per_host],
    }
    if chip.chip_config_name:
        attributes["chip_config_name"] = chip.chip_config_name
    return Instance(
        name=name,
        family=f"tpu-{chip.generation}",
        platform="tpu",
        num_hosts=hosts * num_slices,
        devices_per_host=chips_per_host * parts,
        hbm_bytes=chip.hbm_bytes // parts,
        peak_flops={dtype: flops / parts for dtype, flops in chip.peak_flops.items()},
        hbm_bandwidth_bytes=chip.hbm_bandwidth_bytes / parts,
        ici_bandwidth_bytes=chip.ici_bandwidth_bytes / parts,
        dcn_bandwidth_bytes=chip.dcn_bandwidth_bytes * chips_per_host,
        num_slices=num_slices,
        topology=text(shape),
        device_kind=chip.device_kind,
        matmul_efficiency=MATMUL_EFFICIENCY,
        matmul_efficiency_source=FITTED_SOURCE
        if chip.generation == FITTED
        else f"that of {FITTED}, not fitted",
        attributes=attributes,
    )


# PCI device id -> generation, under the vendor id of Google.
_PCI_VENDOR = "0x1ae0"
_PCI_DEVICES = {
    "0x005e": "v4",
    "0x0063": "v5e",
    "0x0062": "v5p",
    "0x006f": "v6e",
    "0x0076": "7x",
}
_ACCELERATOR = re.compile(r"(?:tpu-?)?(?P<kind>v4|v5litepod|v5e|v5p|v6e|7x)-(?P<count>\d+)")


def detect() -> str | None:
    """Returns the name of the slice that this host is part of, or None where there is no TPU.

    The size of the slice comes from ``TPU_ACCELERATOR_TYPE`` (with ``TPU_TOPOLOGY`` and
    ``MEGASCALE_NUM_SLICES`` where set), as the vendor's images and GKE set them. No metadata server
    is asked and no device is touched.

    Raises:
        PluginError: There are TPU chips here that this process would use, and nothing says how
            large the slice is (AX282).
    """
    return _detect(os.environ, Path("/sys/bus/pci/devices"), _jax_may_use_tpu(os.environ))


def _jax_may_use_tpu(environ: Mapping[str, str]) -> bool:
    platforms = environ.get("JAX_PLATFORMS", "")
    wanted = not platforms or "tpu" in platforms.split(",")
    return wanted and importlib.util.find_spec("libtpu") is not None


def _detect(environ: Mapping[str, str], pci: Path, usable: bool) -> str | None:
    if not usable:
        return None
    present = _chips_on_pci(pci)
    if not present:
        return None
    match = _ACCELERATOR.fullmatch(environ.get("TPU_ACCELERATOR_TYPE", ""))
    topology = environ.get("TPU_TOPOLOGY", "")
    generation = present[0]
    unit = 2 if CHIPS[generation].counts_cores else 1
    if topology:
        count = num_chips(topology) * unit
    elif match and generation != "7x":  # the vendor's count there is not documented
        count = int(match["count"])
    else:
        guess = f"tpu-{generation}-{len(present) * unit}"
        raise PluginError(
            f"there are {len(present)} TPU {generation} chips here, and nothing says how large the "
            "slice is",
            code="AX282",
            where="TPU_ACCELERATOR_TYPE, TPU_TOPOLOGY",
            hint=f"pass --instance, for example {guess} if this host is all of it",
        )
    slices = int(environ.get("MEGASCALE_NUM_SLICES") or 1)
    return f"tpu-{generation}-{count}" + (f"-{slices}" if slices > 1 else "")


def _chips_on_pci(root: Path) -> list[str]:
    """Returns the generation of each TPU chip on this host's PCI bus."""
    found: list[str] = []
    for device in sorted(root.glob("*")):
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "device").read_text().strip()
        except OSError:
            continue  # a bridge without these files, or one that went away
        if vendor == _PCI_VENDOR and kind in _PCI_DEVICES:
            found.append(_PCI_DEVICES[kind])
    return found
