"""What the vendor publishes of Trainium chips and of the machines that hold them.

Sources: the pages "Trainium Architecture", "Trainium2 Architecture", "Trainium3 Architecture" and
"Amazon EC2 Trn1/Trn1n, Trn2, Trn3 Architecture" of the AWS Neuron documentation
(awsdocs-neuron.readthedocs-hosted.com), peaks dense.

A JAX device is a *logical* core: with the default logical NeuronCore configuration (LNC) two
physical cores of Trainium2 and Trainium3 make one, and one of Trainium1 (page "Logical NeuronCore
configuration"). A trn2.48xlarge so has 64 devices of 24 GiB.

Less certain: whether NeuronLink's bandwidth is published for one direction or both (taken as both,
hence half of it here); ``trn2n.48xlarge``, whose name the vendor's tools know and whose figures no
page gives (taken to be those of trn2.48xlarge); ``trn3.48xlarge``, a name of the vendor's driver,
taken to be one of the four servers of a Gen1 UltraServer, with a quarter of its network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "CHIPS",
    "FITTED",
    "FITTED_SOURCE",
    "MACHINES",
    "MATMUL_EFFICIENCY",
    "Chip",
    "Machine",
]

# The share of the peak that a training step's products reach. Fitted for Trainium2; the others take
# its number, since none of the published rows is of them.
MATMUL_EFFICIENCY = 0.294
FITTED = "trainium2"
FITTED_SOURCE = (
    "python benchmarks/cost_model.py: Llama 2 7B, 1.2 s, and 70B, 11.2 s a step, both on 1,024 "
    "chips (AXLearn paper)"
)

_GIB = 2**30
# The formats of configurable FP8 (cFP8); e4m3 is the one with infinities. Its relative without,
# e4m3fn, is for Trainium3 and later (the compiler's error NCC_EVRF051).
_FLOAT8 = ("float8_e4m3", "float8_e5m2", "float8_e3m4")
_GBIT = 1e9 / 8  # bytes


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation; figures per chip.

    Attributes:
        name: Its name.
        cores: Physical NeuronCores.
        cores_per_device: Physical cores of a logical one, by default.
        hbm_bytes: Memory.
        hbm_bandwidth_bytes: Its bandwidth, bytes/s.
        peak_flops: dtype name -> peak dense rate, FLOP/s (or integer operations/s).
    """

    name: str
    cores: int
    cores_per_device: int
    hbm_bytes: int
    hbm_bandwidth_bytes: float
    peak_flops: Mapping[str, float]


CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="trainium1",
            cores=2,
            cores_per_device=1,
            hbm_bytes=32 * _GIB,
            hbm_bandwidth_bytes=820e9,
            # Its configurable FP8 is no faster than bfloat16.
            peak_flops={"bfloat16": 190e12, "int8": 380e12, **dict.fromkeys(_FLOAT8, 190e12)},
        ),
        Chip(
            name="trainium2",
            cores=8,
            cores_per_device=2,
            hbm_bytes=96 * _GIB,
            hbm_bandwidth_bytes=2900e9,
            peak_flops={"bfloat16": 667e12, **dict.fromkeys(_FLOAT8, 1299e12)},
        ),
        Chip(
            name="trainium3",
            cores=8,
            cores_per_device=2,
            hbm_bytes=144 * _GIB,
            hbm_bandwidth_bytes=4900e9,
            # The 8-bit rate is that of MXFP8, blocks of 32 with a common exponent. No page gives
            # one for float8 without: taken to be no faster than bfloat16.
            peak_flops={
                "bfloat16": 671e12,
                "float8_e4m3fn": 2517e12,
                **dict.fromkeys(_FLOAT8, 671e12),
            },
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host with Trainium chips.

    Attributes:
        name: As in instance names: ``"trn2.48xlarge"``.
        chip: Name of its chip.
        chips: How many it has.
        link_bandwidth_bytes: NeuronLink of one chip, one way, bytes/s.
        link_domain: Hosts that NeuronLink joins.
        network_bytes: EFA, one way to other hosts, bytes/s.
        certain: Whether a page of the vendor gives the figures under this name.
    """

    name: str
    chip: str
    chips: int
    link_bandwidth_bytes: float
    link_domain: int = 1
    network_bytes: float
    certain: bool = True


MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine(
            name="trn1.32xlarge",
            chip="trainium1",
            chips=16,
            link_bandwidth_bytes=384 * _GIB / 2,
            network_bytes=800 * _GBIT,
        ),
        Machine(
            name="trn1n.32xlarge",
            chip="trainium1",
            chips=16,
            link_bandwidth_bytes=768 * _GIB / 2,
            network_bytes=1600 * _GBIT,
        ),
        Machine(
            name="trn2.48xlarge",
            chip="trainium2",
            chips=16,
            link_bandwidth_bytes=1024e9 / 2,
            network_bytes=3200 * _GBIT,
        ),
        Machine(
            name="trn2n.48xlarge",
            chip="trainium2",
            chips=16,
            link_bandwidth_bytes=1024e9 / 2,
            network_bytes=3200 * _GBIT,
            certain=False,
        ),
        # Four hosts of an UltraServer: 64 chips, 256 GB/s a chip from host to host.
        Machine(
            name="trn2u.48xlarge",
            chip="trainium2",
            chips=16,
            link_bandwidth_bytes=1024e9 / 2,
            link_domain=4,
            network_bytes=3200 * _GBIT,
        ),
        Machine(
            name="trn3.48xlarge",
            chip="trainium3",
            chips=16,
            link_bandwidth_bytes=2048 * _GIB / 2,
            link_domain=4,
            network_bytes=3200 * _GBIT,
            certain=False,
        ),
    )
}
