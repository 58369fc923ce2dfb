"""What core tells plugins: the machine, and one call of an op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from axcore.config import FrozenMapping

from ._values import field_error
from .specs import NOTHING

Purpose = Literal["train", "prefill", "decode"]


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A concrete machine or cluster, as ``--instance NAME`` selects it.

    Attributes:
        name: The full name, such as ``"tpu-v5p-512"``.
        family: The family, such as ``"tpu-v5p"``.
        platform: JAX platform of the devices (``"cpu"``, ``"gpu"``, ``"tpu"``, ``"neuron"``).
        num_hosts: Hosts in all, over all slices.
        devices_per_host: JAX devices on each host.
        hbm_bytes: Memory of one device, bytes.
        peak_flops: dtype name -> peak dense rate of one device, FLOP/s.
        hbm_bandwidth_bytes: Memory bandwidth of one device, bytes/s.
        ici_bandwidth_bytes: One-way bandwidth of one device to its peers inside a slice or
            NVLink domain, bytes/s; None where there is no such network.
        ici_domain_devices: Devices that this network joins; None where it joins a whole slice.
        dcn_bandwidth_bytes: One-way bandwidth of one host to other hosts or slices, bytes/s.
        num_slices: Slices (groups of devices joined by the fast network).
        topology: Shape of one slice as the vendor writes it, such as ``"4x8x8"``.
        device_kind: What JAX calls the device, if known.
        matmul_efficiency: Share of the peak that the large products of a training step reach, for
            predicted step times; None where nobody has fitted it.
        matmul_efficiency_source: The command and the measurements that it comes from.
        price_per_hour: Price of the whole instance, US dollars per hour, if known.
        simulated_devices: Number of devices that are simulated on one host, or None.
        attributes: What else its own plugin needs, such as the compiler's target description.
    """

    name: str
    family: str
    platform: str
    num_hosts: int
    devices_per_host: int
    hbm_bytes: int
    peak_flops: Mapping[str, float] = NOTHING
    hbm_bandwidth_bytes: float | None = None
    ici_bandwidth_bytes: float | None = None
    ici_domain_devices: int | None = None
    dcn_bandwidth_bytes: float | None = None
    num_slices: int = 1
    topology: str | None = None
    device_kind: str | None = None
    matmul_efficiency: float | None = None
    matmul_efficiency_source: str = ""
    price_per_hour: float | None = None
    simulated_devices: int | None = None
    attributes: Mapping[str, str] = NOTHING

    def __post_init__(self) -> None:
        for name in ("num_hosts", "devices_per_host", "num_slices"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                where = f"Instance({self.name!r})"
                raise field_error(where, name, value, "an int of at least 1")
        for name in ("peak_flops", "attributes"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name)))

    @property
    def num_devices(self) -> int:
        """JAX devices in all."""
        return self.simulated_devices or self.num_hosts * self.devices_per_host


@dataclass(frozen=True, kw_only=True)
class OpCall:
    """One call of an op, as a kernel's ``supports`` sees it. Holds no arrays and no JAX objects.

    Attributes:
        op: The op's name.
        shapes: Argument name -> global shape.
        device_shapes: Argument name -> shape on one device.
        dtypes: Argument name -> dtype name, such as ``"bfloat16"``.
        axes: Argument name -> logical axis (or None) of each dim.
        mesh_axes: Logical axis -> the mesh axes it is sharded over; absent means whole.
        mask: The structured mask object, or None.
        view: The KV cache's view, or None.
        purpose: ``"train"``, ``"prefill"`` or ``"decode"``.
        needs_gradient: Whether the call is differentiated.
        instance: Name of the target instance.
        platform: Platform of the target, never of the host that compiles.
        options: The op's static arguments, such as a logit cap.
    """

    op: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    device_shapes: Mapping[str, tuple[int, ...]] = NOTHING
    axes: Mapping[str, tuple[str | None, ...]] = NOTHING
    mesh_axes: Mapping[str, tuple[str, ...]] = NOTHING
    mask: Any = None
    view: Any = None
    purpose: Purpose = "train"
    needs_gradient: bool = True
    instance: str = "cpu"
    platform: str = "cpu"
    options: Mapping[str, Any] = NOTHING

    def __post_init__(self) -> None:
        if not self.device_shapes:
            object.__setattr__(self, "device_shapes", self.shapes)
        for name in ("shapes", "dtypes", "device_shapes", "axes", "mesh_axes", "options"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name)))

    def sharded_dims(self, argument: str) -> tuple[int, ...]:
        """Returns the dims of ``argument`` that are split over devices."""
        pairs = zip(self.shapes[argument], self.device_shapes[argument], strict=True)
        return tuple(i for i, (whole, part) in enumerate(pairs) if whole != part)
