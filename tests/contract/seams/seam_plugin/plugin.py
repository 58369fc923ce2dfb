"""The hooks: strings only."""

from axcore.plugins import (
    InstanceTypeSpec,
    KernelSpec,
    LayerSpec,
    MeshRuleSpec,
    NamedSpec,
    hookimpl,
)


def _rms_norm(implementation, platform, priority=0):
    return KernelSpec(
        op="rms_norm",
        implementation=implementation,
        platforms=(platform,),
        target=f"seam_plugin.kernels:{implementation}_rms_norm",
        supports="seam_plugin.kernel_support:rms_norm",
        partitioning={"x": ("batch", "seq")},
        priority=priority,
    )


@hookimpl
def axcore_kernels():
    return [_rms_norm("seam_cpu", "cpu"), _rms_norm("seam_npu", "npu")]


@hookimpl
def axcore_layers():
    return [LayerSpec(name="SeamWide", target="seam_plugin.layers:Wide", tags=("wide",))]


@hookimpl
def axcore_modifiers():
    return [NamedSpec("seam-plugin:int8", "seam_plugin.modifiers:Int8")]


@hookimpl
def axcore_instance_types():
    return [
        InstanceTypeSpec(
            pattern="seam-*", family="seam", platform="npu", target="seam_plugin.machines:resolve"
        )
    ]


@hookimpl
def axcore_mesh_rules():
    return [
        MeshRuleSpec(
            name="seam", pattern="seam-*", target="seam_plugin.machines:RULE", reason="one device"
        )
    ]
