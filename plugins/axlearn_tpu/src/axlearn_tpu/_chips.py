"""What the vendor publishes of each TPU generation; figures are per chip.

Sources: the pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x (Ironwood)" of the Cloud TPU
documentation (docs.cloud.google.com/tpu/docs); ICI of v4 from Jouppi et al., "TPU v4"
(arXiv:2304.01433). The pages give ICI in both directions together; here it is one way, hence half
of it. A guess, since not published: the data centre network of v4, taken to be that of v5p. Less
certain: int8 of v5p and v6e, which earlier versions of their pages gave and present ones leave out.
Where no page gives a peak for a dtype, there is none here (int8 of 7x, float8 of v4 and v5e).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CHIPS", "FITTED", "FITTED_SOURCE", "MATMUL_EFFICIENCY", "Chip"]

# The share of the peak that a training step's products reach. Fitted for v5p; the other generations
# take its number, since none of the published rows is of them.
MATMUL_EFFICIENCY = 0.801
FITTED = "v5p"
FITTED_SOURCE = (
    "python benchmarks/cost_model.py: Llama 2 7B on 256 chips, 2.5 s, and 70B on 512, 11.6 s a "
    "step (AXLearn paper)"
)

_GIB = 2**30
_GBIT = 1e9 / 8  # bytes


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation.

    Attributes:
        generation: As in instance names: ``"v5p"``.
        libtpu_name: What libtpu calls it in topology names.
        device_kind: What JAX calls its devices.
        counts_cores: Whether the vendor counts TensorCores, two a chip, and not chips.
        devices_per_chip: JAX devices; v4 and v5p join their two cores to one (megacore).
        max_dims: The largest slice, chips along each dim; two dims or three.
        max_chips: Chips of the largest slice.
        hbm_bytes: Memory.
        hbm_bandwidth_bytes: Its bandwidth, bytes/s.
        peak_flops: dtype name -> peak dense rate, FLOP/s (or integer operations/s).
        ici_bandwidth_bytes: One way, over all links of a chip together, bytes/s.
        dcn_bandwidth_bytes: A chip's share of its host's network, one way, bytes/s.
        chip_config_name: What libtpu must be told to give these devices, if anything.
    """

    generation: str
    libtpu_name: str
    device_kind: str
    counts_cores: bool
    devices_per_chip: int = 1
    max_dims: tuple[int, ...]
    max_chips: int
    hbm_bytes: int
    hbm_bandwidth_bytes: float
    peak_flops: Mapping[str, float]
    ici_bandwidth_bytes: float
    dcn_bandwidth_bytes: float
    chip_config_name: str | None = None


CHIPS: Mapping[str, Chip] = {
    chip.generation: chip
    for chip in (
        Chip(
            generation="v4",
            libtpu_name="v4",
            device_kind="TPU v4",
            counts_cores=True,
            max_dims=(16, 16, 16),
            max_chips=4096,
            hbm_bytes=32 * _GIB,
            hbm_bandwidth_bytes=1200e9,
            peak_flops={"bfloat16": 275e12, "int8": 275e12},
            ici_bandwidth_bytes=300e9,  # six links of 50 GB/s
            dcn_bandwidth_bytes=50 * _GBIT,  # not published
            chip_config_name="megacore",
        ),
        Chip(
            generation="v5e",
            libtpu_name="v5e",
            device_kind="TPU v5 lite",
            counts_cores=False,
            max_dims=(16, 16),
            max_chips=256,
            hbm_bytes=16 * _GIB,
            hbm_bandwidth_bytes=819e9,
            peak_flops={"bfloat16": 197e12, "int8": 393e12},
            ici_bandwidth_bytes=200e9,
            dcn_bandwidth_bytes=25 * _GBIT,  # 6.4 Tbit/s for a pod of 256
        ),
        Chip(
            generation="v5p",
            libtpu_name="v5p",
            device_kind="TPU v5",
            counts_cores=True,
            max_dims=(16, 16, 24),
            max_chips=6144,
            hbm_bytes=95 * _GIB,
            hbm_bandwidth_bytes=2765e9,
            peak_flops={"bfloat16": 459e12, "float8_e4m3fn": 459e12, "int8": 918e12},
            ici_bandwidth_bytes=600e9,
            dcn_bandwidth_bytes=50 * _GBIT,
        ),
        Chip(
            generation="v6e",
            libtpu_name="v6e",
            device_kind="TPU v6 lite",
            counts_cores=False,
            max_dims=(16, 16),
            max_chips=256,
            hbm_bytes=32 * _GIB,
            hbm_bandwidth_bytes=1638e9,
            peak_flops={"bfloat16": 918e12, "float8_e4m3fn": 918e12, "int8": 1836e12},
            ici_bandwidth_bytes=400e9,
            dcn_bandwidth_bytes=100 * _GBIT,
        ),
        Chip(
            generation="7x",
            libtpu_name="tpu7x",
            device_kind="TPU7x",
            counts_cores=False,
            devices_per_chip=2,  # two chiplets, each a device with half of everything
            max_dims=(16, 24, 24),
            max_chips=9216,
            hbm_bytes=192 * _GIB,
            hbm_bandwidth_bytes=7380e9,
            peak_flops={"bfloat16": 2307e12, "float8_e4m3fn": 4614e12},
            ici_bandwidth_bytes=600e9,
            dcn_bandwidth_bytes=100 * _GBIT,
        ),
    )
}
