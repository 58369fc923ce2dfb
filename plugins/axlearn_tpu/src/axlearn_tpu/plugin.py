"""What axlearn-tpu contributes to axcore: TPU slices and how they are used, kernels, options."""

from __future__ import annotations

from collections.abc import Iterable

from axcore.plugins import (
    CompilerOptionSpec,
    CompilerSpec,
    InstanceTypeSpec,
    KernelSpec,
    MeshRuleSpec,
    hookimpl,
)
from axlearn_tpu.kernels import KERNELS

__all__: list[str] = []

_GENERATIONS = {
    "v4": "TPU v4; the count is TensorCores, two a chip",
    "v5e": "TPU v5e; the count is chips",
    "v5p": "TPU v5p; the count is TensorCores, two a chip",
    "v6e": "TPU v6e (Trillium); the count is chips",
    "7x": "TPU7x (Ironwood); the count is chips, each two devices",
}


@hookimpl
def axcore_instance_types() -> Iterable[InstanceTypeSpec]:
    return tuple(
        InstanceTypeSpec(
            pattern=f"tpu-{generation}-*",
            family=f"tpu-{generation}",
            platform="tpu",
            target="axlearn_tpu.instances:resolve",
            # One answer for the machine, whatever its generation.
            detect="axlearn_tpu.instances:detect" if generation == "v4" else None,
            description=description,
        )
        for generation, description in _GENERATIONS.items()
    )


@hookimpl
def axcore_compilers() -> Iterable[CompilerSpec]:
    return (
        CompilerSpec(
            platform="tpu",
            target="axlearn_tpu.compiler:TpuCompiler",
            description="libtpu, which compiles without a chip",
        ),
    )


@hookimpl
def axcore_mesh_rules() -> Iterable[MeshRuleSpec]:
    sharded = "parameters are sharded over the slice, whose ICI hides gathering them, and copied "
    sharded += "across slices; "
    reasons = {
        "v4": "32 GiB: attention's projections and output are saved where they fit",
        "v5e": "16 GiB: results of matrix products wait in host memory, which costs less than "
        "computing them twice (the rule published for 256 chips)",
        "v5p": "95 GiB hold attention's projections and output; recomputing the rest is cheap",
        "v6e": "32 GiB and much arithmetic: attention is saved where it fits, else products wait "
        "in host memory",
        "7x": "96 GiB a device hold attention's projections and output; recomputing the rest is "
        "cheap",
    }
    return tuple(
        MeshRuleSpec(
            name=generation,
            pattern=f"tpu-{generation}-*",
            target=f"axlearn_tpu.rules:{'v' if generation == '7x' else ''}{generation}",
            reason=sharded + reason,
        )
        for generation, reason in reasons.items()
    ) + tuple(
        MeshRuleSpec(
            name=f"{generation}-experts",
            pattern=f"tpu-{generation}-*",
            traits=("moe",),
            target="axlearn_tpu.rules:experts",
            reason="parameters are sharded over the slice; experts are in as many groups as their "
            "gathered weights need to fit and to arrive in time, for tokens that travel to them "
            "are waited for; attention's projections and output are saved where they fit",
        )
        for generation in reasons
    )


@hookimpl
def axcore_kernels() -> Iterable[KernelSpec]:
    return KERNELS


_HIDE = "gathers of weights run while matrix products do: "
# Names accepted by libtpu 0.0.42.1; what they gain has not been measured here.
_OPTIONS: tuple[tuple[str, str, str, bool | int, str], ...] = (
    (
        "latency-hiding",
        "tpu-*",
        "xla_tpu_enable_latency_hiding_scheduler",
        True,
        "collectives are started early and awaited late",
    ),
    (
        "async-fusion",
        "tpu-*",
        "xla_tpu_enable_async_collective_fusion",
        True,
        _HIDE + "a collective is fused into the work beside it",
    ),
    (
        "async-fusion-gather",
        "tpu-*",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        True,
        _HIDE + "all-gathers too, which full sharding has most of",
    ),
    (
        "async-fusion-steps",
        "tpu-*",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        True,
        _HIDE + "one collective may spread over several products",
    ),
    (
        "overlap",
        "tpu-*",
        "xla_tpu_overlap_compute_collective_tc",
        True,
        _HIDE + "on the core that computes",
    ),
    (
        "scatter-halo",
        "tpu-*",
        "xla_tpu_ars_halo_exchange_count",
        8,
        "a scattered gradient whose parts no tile divides (7168 over 512) is put in place by up to "
        "so many permutes, 64 unless told otherwise; each takes a barrier, of which there are few, "
        "and ragged exchanges need one",
    ),
    (
        "multislice-all-reduce",
        "tpu-*-*-*",
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        True,
        "gradients cross the slow network between slices while the backward pass goes on",
    ),
    (
        "multislice-sizes",
        "tpu-*-*-*",
        "xla_tpu_data_parallel_opt_different_sized_ops",
        True,
        "the same, for gradients of different sizes",
    ),
    (
        "v5e-host-transfers",
        "tpu-v5e-*",
        "xla_tpu_host_transfer_overlap_limit",
        24,
        "offloaded products of many layers may be on their way to host memory at once",
    ),
    (
        "v6e-vmem",
        "tpu-v6e-*",
        "xla_tpu_scoped_vmem_limit_kib",
        98304,
        "128 MiB of vector memory, of which a fusion may use 16 MiB unless told otherwise",
    ),
)


@hookimpl
def axcore_compiler_options() -> Iterable[CompilerOptionSpec]:
    return tuple(
        CompilerOptionSpec(name=name, pattern=pattern, key=key, value=value, reason=reason)
        for name, pattern, key, value, reason in _OPTIONS
    )
