"""What the GPU compiler must know of a GPU that is not there: a description in XLA's text form.

XLA reads a ``GpuTargetConfigProto`` (openxla/xla, stream_executor/device_description.proto) instead
of asking a driver. It is made here from a few facts of each chip:

- streaming multiprocessors, float32 lanes, L2 cache and boost clock: NVIDIA's white papers "A100
  Tensor Core GPU Architecture" and "H100 Tensor Core GPU Architecture", and for Blackwell what
  drivers report (148 SMs of B200, 152 of GB200 and GB300);
- compute capability, and what follows from it (shared memory, registers, threads): the table
  "Technical Specifications per Compute Capability" of the CUDA C++ Programming Guide;
- rates of the tensor cores, memory and its bandwidth: :mod:`axlearn_gpu._gpus`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass

from axlearn_gpu._gpus import GPU, GPUS

__all__ = ["SILICON", "Silicon", "target_config"]

_KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Silicon:
    """What decides how code for a GPU looks.

    Attributes:
        capability: CUDA compute capability.
        sms: Streaming multiprocessors.
        lanes: float32 lanes of each.
        shared_bytes: Shared memory of each; a block may use all but 1 KiB of it.
        l2_bytes: L2 cache.
        clock_hz: Boost clock.
    """

    capability: tuple[int, int]
    sms: int
    lanes: int
    shared_bytes: int
    l2_bytes: int
    clock_hz: float


_A100 = Silicon(
    capability=(8, 0),
    sms=108,
    lanes=64,
    shared_bytes=164 * _KIB,
    l2_bytes=40 * _KIB**2,
    clock_hz=1.41e9,
)
_H100 = Silicon(
    capability=(9, 0),
    sms=132,
    lanes=128,
    shared_bytes=228 * _KIB,
    l2_bytes=50 * _KIB**2,
    clock_hz=1.98e9,
)


def _blackwell(capability: tuple[int, int], sms: int, l2_bytes: int, clock_hz: float) -> Silicon:
    return Silicon(
        capability=capability,
        sms=sms,
        lanes=128,
        shared_bytes=228 * _KIB,
        l2_bytes=l2_bytes,
        clock_hz=clock_hz,
    )


SILICON: Mapping[str, Silicon] = {
    "a100-40": _A100,
    "a100-80": _A100,
    "h100": _H100,
    "h200": _H100,
    "b200": _blackwell((10, 0), 148, 132_644_864, 1.965e9),
    "gb200": _blackwell((10, 0), 152, 135_528_448, 2.062e9),
    "gb300": _blackwell((10, 3), 152, 135_528_448, 2.07e9),
}

# XLA's number of a dtype; tensor cores take float32 as tensorfloat32.
_DTYPES = {
    "int8": 2,
    "float16": 10,
    "tensorfloat32": 11,
    "bfloat16": 16,
    "float8_e5m2": 19,
    "float8_e4m3fn": 20,
}
_TENSOR_CORES = 4  # of an SM, on all of these


def target_config(name: str) -> str:
    """Returns the description of a GPU.

    Args:
        name: A key of :data:`axlearn_gpu._gpus.GPUS`.

    Example:
        >>> "core_count: 132" in target_config("h100")
        True
    """
    gpu, chip = GPUS[name], SILICON[name]
    major, minor = chip.capability
    # Instructions that only this very chip has (wgmma, tcgen05), as a driver's chip reports them.
    own = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    capability = f"{{ major: {major} minor: {minor}{own} }}"
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "shared_memory_per_block": 48 * _KIB,  # what a kernel has without asking for more
        "shared_memory_per_block_optin": chip.shared_bytes - _KIB,
        "shared_memory_per_core": chip.shared_bytes,
        "core_count": chip.sms,
        "fpus_per_core": chip.lanes,
        "clock_rate_ghz": chip.clock_hz / 1e9,
        "l2_cache_size": chip.l2_bytes,
        "memory_bandwidth": int(gpu.hbm_bandwidth_bytes),
        "device_memory_size": gpu.hbm_bytes,
    }
    lines = [f"  {field}: {value}" for field, value in fields.items()]
    lines.append(f"  cuda_compute_capability {capability}")
    lines.append(f"  matrix_unit_description {{ {' '.join(_rates(gpu, chip))} }}")
    info = "\n".join(lines)
    return (
        f'gpu_device_info {{\n{info}\n}}\nplatform_name: "CUDA"\n{_cudnn()}'
        f'device_description_str: "{gpu.device_kind}"\n'
    )


def _rates(gpu: GPU, chip: Silicon) -> list[str]:
    """Returns operations of a tensor core per clock, from the peaks of the data sheet."""
    lines: list[str] = []
    for dtype, peak in gpu.peak_flops.items():
        per_core = peak / (2 * chip.sms * _TENSOR_CORES)  # multiply-adds/s
        # Cores do powers of two a clock, at a clock somewhat below the boost clock.
        ops = 1
        while per_core / (2 * ops) >= 0.85 * chip.clock_hz:
            ops *= 2
        rate = f"clock_rate_ghz: {per_core / ops / 1e9:.4f} units_per_core: {_TENSOR_CORES} "
        value = f"{{ {rate}ops_per_clock: {ops} }}"
        lines.append(f"rate_infos {{ key: {_DTYPES[dtype]} value {value} }}")
    return lines


def _cudnn() -> str:
    """Returns the line that says which cuDNN there is; none without its package."""
    for package in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        major, minor, patch = version.split(".")[:3]
        return f"dnn_version_info {{ major: {major} minor: {minor} patch: {patch} }}\n"
    return ""
