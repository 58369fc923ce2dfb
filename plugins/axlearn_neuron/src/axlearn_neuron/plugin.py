"""What axlearn-neuron contributes to axcore: Trainium machines, their use, kernels and recipes.

There are no compiler options: the vendor's compiler takes its flags from ``NEURON_CC_FLAGS``, not
from XLA's options.
"""

from __future__ import annotations

from collections.abc import Iterable

from axcore.plugins import (
    CompilerSpec,
    InstanceTypeSpec,
    KernelSpec,
    MeshRuleSpec,
    QuantizationSpec,
    hookimpl,
)
from axlearn_neuron._machines import MACHINES
from axlearn_neuron.kernels import KERNELS

__all__: list[str] = []


@hookimpl
def axcore_instance_types() -> Iterable[InstanceTypeSpec]:
    return tuple(
        InstanceTypeSpec(
            pattern=f"neuron-{machine.name}-*",
            family=f"neuron-{machine.name.partition('.')[0]}",
            platform="neuron",
            target="axlearn_neuron.instances:resolve",
            # One answer for the machine, whatever its chip.
            detect="axlearn_neuron.instances:detect" if machine.name == "trn1.32xlarge" else None,
            description=f"{machine.chips} x {machine.chip} a host; the count is hosts",
        )
        for machine in MACHINES.values()
    )


@hookimpl
def axcore_kernels() -> Iterable[KernelSpec]:
    return KERNELS


@hookimpl
def axcore_quantization() -> Iterable[QuantizationSpec]:
    training = "training: linear layers, forward and backward"
    e4m3, e3m4, e5m2 = "float8_e4m3", "float8_e3m4", "float8_e5m2"
    recipes = {
        "neuron-fp8-e4m3": ("fp8_e4m3", (e4m3, e5m2), "float8 e4m3 with infinities, up to 240"),
        "neuron-fp8-e5m2": ("fp8_e5m2", (e5m2,), "float8 e5m2 throughout: range, not precision"),
        "neuron-fp8-e3m4": ("fp8_e3m4", (e3m4, e5m2), "float8 e3m4 with a scale per channel"),
        "neuron-int8": ("int8", ("int8",), "int8, gradients rounded at random"),
        "neuron-bf16-stochastic": (
            "bf16_stochastic",
            ("bfloat16",),
            "bfloat16, gradients rounded at random",
        ),
    }
    return tuple(
        QuantizationSpec(
            name=name,
            target=f"axlearn_neuron.quantization:{target}",
            dtypes=dtypes,
            scope=training,
            description=description,
        )
        for name, (target, dtypes, description) in recipes.items()
    )


@hookimpl
def axcore_compilers() -> Iterable[CompilerSpec]:
    return (
        CompilerSpec(
            platform="neuron",
            target="axlearn_neuron.compiler:NeuronCompiler",
            description="none to be had: the memory model and the FLOP count",
        ),
    )


@hookimpl
def axcore_mesh_rules() -> Iterable[MeshRuleSpec]:
    sharded = "parameters are sharded over all devices; "
    rules = {
        "trainium1": ("trn1", "tensors are split over four chips and all is recomputed: 16 GiB"),
        "trainium2": (
            "trn2",
            "tensors are split over the four devices of a chip, which share memory and links; "
            "attention's projections and output are saved where they fit",
        ),
        "trainium3": ("trn3", "as Trainium2, whose chip it resembles; not measured"),
    }
    return tuple(
        MeshRuleSpec(
            name=machine.name,
            pattern=f"neuron-{machine.name}-*",
            target=f"axlearn_neuron.rules:{rules[machine.chip][0]}",
            reason=sharded + rules[machine.chip][1],
        )
        for machine in MACHINES.values()
    ) + tuple(
        MeshRuleSpec(
            name=f"{machine.name}-experts",
            pattern=f"neuron-{machine.name}-*",
            traits=("moe",),
            target="axlearn_neuron.rules:experts",
            reason="parameters are sharded over all devices; experts are in as many groups as "
            "their gathered weights need to fit and to arrive in time, and too narrow to split",
        )
        for machine in MACHINES.values()
    )
