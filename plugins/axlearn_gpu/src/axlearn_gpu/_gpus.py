"""What vendors publish of GPUs and of the machines that hold them.

GPUs: NVIDIA's data sheets "A100 Tensor Core GPU", "H100 Tensor Core GPU" (SXM5), "H200 Tensor Core
GPU", "DGX B200", "GB200 NVL72" and "GB300 NVL72", dense rates (half of those with sparsity). Memory
is what the driver reports, as recorded in the target descriptions of OpenXLA
(xla/backends/gpu/target_config/specs), a little less than the data sheet's. NVLink is published in
both directions together; here it is one way, hence half.

Networks: as many adapters as NVIDIA's reference systems have (DGX A100: 200 Gbit/s per GPU; DGX
H100, DGX H200, DGX B200 and GB200 NVL72: 400; GB300 NVL72: 800). Machines of clouds: the page
"Accelerated computing" of Amazon EC2 instance types (EFA), the page "Networking and GPU machines"
of Compute Engine (the adapters for traffic between GPUs where the page separates them).

Less certain: the peak rates of B200 differ between NVIDIA's own pages by a few percent (2,250 here,
as the DGX B200 gives); INT8 of GB300 is left out, since it is far below that of GB200 and no
per-GPU dense figure was found; the network of a4x-maxgpu-4g is the page's total without the 400
Gbit/s that its smaller sibling keeps for other traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["FITTED", "FITTED_SOURCE", "GPU", "GPUS", "MACHINES", "MATMUL_EFFICIENCY", "Machine"]

# The share of the peak that a training step's products reach. Fitted for the H100; other GPUs take
# its number, since none of the published rows is of them.
MATMUL_EFFICIENCY = 0.665
FITTED = "h100"
FITTED_SOURCE = (
    "python benchmarks/cost_model.py: Llama 2 7B on 256 GPUs, 1.4 s, and 70B on 512, 9.2 s a step "
    "(AXLearn paper)"
)

_GBIT = 1e9 / 8  # bytes


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One kind of GPU.

    Attributes:
        name: As in instance names: ``"h100"``.
        device_kind: What the driver, and so JAX, calls it.
        hbm_bytes: Memory as the driver reports it.
        hbm_bandwidth_bytes: Its bandwidth, bytes/s.
        peak_flops: dtype name -> peak dense rate, FLOP/s (or integer operations/s).
        nvlink_bandwidth_bytes: One way to the switch, bytes/s.
        xla_target: Name of OpenXLA's target description.
    """

    name: str
    device_kind: str
    hbm_bytes: int
    hbm_bandwidth_bytes: float
    peak_flops: Mapping[str, float]
    nvlink_bandwidth_bytes: float
    xla_target: str


def _rates(bf16: float, *, fp8: float = 0, int8: float = 0, tf32: float = 0) -> dict[str, float]:
    """Returns dtype name -> FLOP/s of the rates given in TFLOP/s."""
    rates = {
        "bfloat16": bf16,
        "float16": bf16,
        "float8_e4m3fn": fp8,
        "float8_e5m2": fp8,
        "int8": int8,
        "tensorfloat32": tf32,
    }
    return {dtype: rate * 1e12 for dtype, rate in rates.items() if rate}


GPUS: Mapping[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        GPU(
            name="a100-40",
            device_kind="NVIDIA A100-SXM4-40GB",
            hbm_bytes=42_298_834_944,
            hbm_bandwidth_bytes=1555e9,
            peak_flops=_rates(312, int8=624, tf32=156),
            nvlink_bandwidth_bytes=300e9,
            xla_target="a100_sxm_40",
        ),
        GPU(
            name="a100-80",
            device_kind="NVIDIA A100-SXM4-80GB",
            hbm_bytes=85_100_068_864,
            hbm_bandwidth_bytes=2039e9,
            peak_flops=_rates(312, int8=624, tf32=156),
            nvlink_bandwidth_bytes=300e9,
            xla_target="a100_sxm_80",
        ),
        GPU(
            name="h100",
            device_kind="NVIDIA H100 80GB HBM3",
            hbm_bytes=84_942_979_072,
            hbm_bandwidth_bytes=3350e9,
            peak_flops=_rates(989, fp8=1979, int8=1979, tf32=494),
            nvlink_bandwidth_bytes=450e9,
            xla_target="h100_sxm",
        ),
        GPU(
            name="h200",
            device_kind="NVIDIA H200",
            hbm_bytes=151_397_597_184,
            hbm_bandwidth_bytes=4800e9,
            peak_flops=_rates(989, fp8=1979, int8=1979, tf32=494),
            nvlink_bandwidth_bytes=450e9,
            xla_target="h200",
        ),
        GPU(
            name="b200",
            device_kind="NVIDIA B200",
            hbm_bytes=191_514_411_008,
            hbm_bandwidth_bytes=8000e9,
            peak_flops=_rates(2250, fp8=4500, int8=4500, tf32=1125),
            nvlink_bandwidth_bytes=900e9,
            xla_target="b200",
        ),
        GPU(
            name="gb200",
            device_kind="NVIDIA GB200",
            hbm_bytes=197_897_748_480,
            hbm_bandwidth_bytes=8000e9,
            peak_flops=_rates(2500, fp8=5000, int8=5000, tf32=1250),
            nvlink_bandwidth_bytes=900e9,
            xla_target="gb200",
        ),
        GPU(
            name="gb300",
            device_kind="NVIDIA GB300",
            hbm_bytes=297_021_079_552,
            hbm_bandwidth_bytes=8000e9,
            peak_flops=_rates(2500, fp8=5000, tf32=1250),
            nvlink_bandwidth_bytes=900e9,
            xla_target="gb300",
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A host with GPUs.

    Attributes:
        name: As in instance names: ``"p5.48xlarge"``, or the GPU's name for NVIDIA's own systems.
        gpu: Name of its GPU.
        gpus: How many it has.
        network_bytes: One way to other hosts, bytes/s, all adapters together.
        nvlink_domain: GPUs that NVLink joins, over several hosts for racks.
        partial: Whether fewer GPUs of one host may be asked for.
    """

    name: str
    gpu: str
    gpus: int
    network_bytes: float
    nvlink_domain: int
    partial: bool = False


def _machine(name: str, gpu: str, gpus: int, gbit: float, domain: int | None = None) -> Machine:
    return Machine(
        name=name,
        gpu=gpu,
        gpus=gpus,
        network_bytes=gbit * _GBIT,
        nvlink_domain=domain or gpus,
        partial=name in GPUS,
    )


MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        # NVIDIA's reference systems, under the name of the GPU. Racks hold 72.
        _machine("a100-40", "a100-40", 8, 8 * 200),
        _machine("a100-80", "a100-80", 8, 8 * 200),
        _machine("h100", "h100", 8, 8 * 400),
        _machine("h200", "h200", 8, 8 * 400),
        _machine("b200", "b200", 8, 8 * 400),
        _machine("gb200", "gb200", 4, 4 * 400, 72),
        _machine("gb300", "gb300", 4, 4 * 800, 72),
        # Amazon EC2.
        _machine("p4d.24xlarge", "a100-40", 8, 400),
        _machine("p4de.24xlarge", "a100-80", 8, 400),
        _machine("p5.48xlarge", "h100", 8, 3200),
        _machine("p5e.48xlarge", "h200", 8, 3200),
        _machine("p5en.48xlarge", "h200", 8, 3200),
        _machine("p6-b200.48xlarge", "b200", 8, 3200),
        _machine("p6e-gb200.36xlarge", "gb200", 4, 1600, 72),
        # Google Compute Engine.
        _machine("a2-highgpu-8g", "a100-40", 8, 100),
        _machine("a2-megagpu-16g", "a100-40", 16, 100),
        _machine("a2-ultragpu-8g", "a100-80", 8, 100),
        _machine("a3-highgpu-8g", "h100", 8, 800),
        _machine("a3-megagpu-8g", "h100", 8, 1600),
        _machine("a3-ultragpu-8g", "h200", 8, 3200),
        _machine("a4-highgpu-8g", "b200", 8, 3200),
        _machine("a4x-highgpu-4g", "gb200", 4, 1600, 72),
        _machine("a4x-maxgpu-4g", "gb300", 4, 3200, 72),
    )
}
