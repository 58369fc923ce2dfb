"""The hooks: strings only."""

from axcore.plugins import CompilerOptionSpec, InstanceTypeSpec, KernelSpec, MeshRuleSpec, hookimpl


@hookimpl
def axcore_instance_types():
    return [
        InstanceTypeSpec(
            pattern="fake-x1-*",
            family="fake-x1",
            platform="cpu",
            target="fake_accelerator.machine:resolve",
            detect="fake_accelerator.machine:detect",
        )
    ]


@hookimpl
def axcore_mesh_rules():
    return [
        MeshRuleSpec(
            name="x1",
            pattern="fake-x1-*",
            target="fake_accelerator.machine:rule",
            reason="little memory, and pairs of devices share a fast link",
        )
    ]


@hookimpl
def axcore_compiler_options():
    return [
        CompilerOptionSpec(
            name="exact",
            pattern="fake-x1-*",
            key="xla_cpu_enable_fast_math",
            value=False,
            reason="its units round as IEEE says",
        )
    ]


@hookimpl
def axcore_kernels():
    return [
        KernelSpec(
            op="rms_norm",
            implementation="fake_root",
            platforms=("cpu",),
            target="fake_accelerator.kernels:rms_norm",
            supports="fake_accelerator.machine:supports_rms_norm",
            partitioning={"x": ("batch", "seq")},
        )
    ]
