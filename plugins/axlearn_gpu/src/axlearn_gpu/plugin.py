"""What axlearn-gpu contributes to axcore: GPU machines and their use, compiler options, kernels."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

from axcore.plugins import (
    CompilerOptionSpec,
    CompilerSpec,
    InstanceTypeSpec,
    KernelSpec,
    MeshRuleSpec,
    hookimpl,
)
from axlearn_gpu._gpus import MACHINES
from axlearn_gpu.kernels import KERNELS

__all__: list[str] = []


@hookimpl
def axcore_instance_types() -> Iterable[InstanceTypeSpec]:
    return tuple(
        InstanceTypeSpec(
            pattern=f"gpu-{machine.name}-*",
            family=f"gpu-{machine.gpu}",
            platform="gpu",
            target="axlearn_gpu.instances:resolve",
            # One answer for the machine, whatever its GPU.
            detect="axlearn_gpu.instances:detect" if machine.name == "a100-40" else None,
            description=f"{machine.gpus} x {machine.gpu} a host; the count is GPUs in all",
        )
        for machine in MACHINES.values()
    )


@hookimpl
def axcore_kernels() -> Iterable[KernelSpec]:
    return KERNELS


@hookimpl
def axcore_compilers() -> Iterable[CompilerSpec]:
    return (
        CompilerSpec(
            platform="gpu",
            target="axlearn_gpu.compiler:GpuCompiler",
            description="XLA's CUDA plugin with a description of the GPU, no driver needed",
        ),
    )


@hookimpl
def axcore_mesh_rules() -> Iterable[MeshRuleSpec]:
    return tuple(
        MeshRuleSpec(
            name=machine.name,
            pattern=f"gpu-{machine.name}-*",
            target="axlearn_gpu.rules:gpu",
            reason="parameters are sharded over all GPUs; beyond one NVLink domain of "
            f"{machine.nvlink_domain} tensors are split over the {min(8, machine.gpus)} GPUs of a "
            f"host, for {machine.network_bytes / machine.gpus / 1e9:g} GB/s a GPU between hosts "
            "are too little to gather whole weights; attention's projections and output are saved "
            "where they fit",
        )
        for machine in MACHINES.values()
    ) + tuple(
        MeshRuleSpec(
            name=f"{machine.name}-experts",
            pattern=f"gpu-{machine.name}-*",
            traits=("moe",),
            target="axlearn_gpu.rules:experts",
            reason="parameters are sharded over all GPUs; experts are in as many groups as their "
            "gathered weights need to fit and to arrive in time, for tokens that travel to them "
            "are waited for; experts are too narrow to split; attention's projections and output "
            "are saved where they fit",
        )
        for machine in MACHINES.values()
    )


def _option(name: str, key: str, value: bool | int | str, reason: str) -> CompilerOptionSpec:
    return CompilerOptionSpec(name=name, pattern="gpu-*", key=key, value=value, reason=reason)


def _pipelined_all_gather() -> tuple[str, bool | str]:
    """Returns the option's name and value, which changed with jaxlib 0.11.1."""
    numbers = importlib.metadata.version("jaxlib").split(".")[:3]
    if tuple(int(n) for n in numbers if n.isdigit()) < (0, 11, 1):
        return "xla_gpu_enable_pipelined_all_gather", True
    return "xla_gpu_pipeline_all_gather", "COLLECTIVE_PIPELINING_MODE_ON"


@hookimpl
def axcore_compiler_options() -> Iterable[CompilerOptionSpec]:
    """Names accepted by jaxlib 0.10.2 and 0.12.0.1; what they gain has not been measured here."""
    combined = "a layer's weights and gradients travel in one piece, not in pieces of 30 MiB: "
    return (
        _option(
            "latency-hiding",
            "xla_gpu_enable_latency_hiding_scheduler",
            True,
            "collectives are started early and awaited late",
        ),
        _option(
            "async-stream",
            "xla_gpu_enable_highest_priority_async_stream",
            True,
            "what others wait for goes first: collectives before kernels",
        ),
        _option(
            "pipelined-all-gather",
            *_pipelined_all_gather(),
            "in a loop over layers the next layer's weights are gathered while this one computes; "
            "left alone (double-buffered loops too) a gather waits for the layer before it",
        ),
        _option(
            "combine-all-gather",
            "xla_gpu_all_gather_combine_threshold_bytes",
            2**30,
            combined + "few large messages use the adapters best",
        ),
        _option(
            "combine-reduce-scatter",
            "xla_gpu_reduce_scatter_combine_threshold_bytes",
            2**30,
            combined + "few large messages use the adapters best",
        ),
        _option(
            "combine-all-reduce",
            "xla_gpu_all_reduce_combine_threshold_bytes",
            2**30,
            combined + "few large messages use the adapters best",
        ),
        _option(
            "cublas",
            "xla_gpu_enable_triton_gemm",
            False,
            "large products by cuBLASLt, which is tuned for them; Triton's have to be tuned at "
            "each compilation",
        ),
    )
