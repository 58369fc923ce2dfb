"""The hooks: strings only."""

from axcore.plugins import (
    CompilerSpec,
    InstanceTypeSpec,
    KernelSpec,
    MeshRuleSpec,
    hookimpl,
)


@hookimpl
def axcore_instance_types():
    return [
        InstanceTypeSpec(
            pattern=f"fake-{kind}-*",
            family=f"fake-{kind}",
            platform="nocompiler" if kind == "none" else "fakechip",
            target="fake_chip.machine:resolve",
        )
        for kind in ("big", "small", "kind", "none")
    ]


@hookimpl
def axcore_compilers():
    return [
        CompilerSpec(platform="fakechip", target="fake_chip.machine:FakeCompiler"),
        CompilerSpec(platform="nocompiler", target="fake_chip.machine:NoCompiler"),
    ]


@hookimpl
def axcore_mesh_rules():
    return [
        MeshRuleSpec(name="all", pattern="fake-*", target="fake_chip.machine:RULE", reason="a test")
    ]


@hookimpl
def axcore_kernels():
    return [
        KernelSpec(
            op="rms_norm",
            implementation="fake_root",
            platforms=("fakechip",),
            target="fake_chip.machine:rms_norm",
            partitioning={"x": ("batch", "seq", "residual_seq")},
        )
    ]
