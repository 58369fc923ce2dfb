"""Machines that are nowhere, for compiling ahead: their compiler is XLA for the CPU."""

from __future__ import annotations

import jax

from axcore.parallel import MeshShape, MeshShapeModifier
from axcore.parallel.aot import OutOfMemory
from axcore.plugins import Instance

# Of one device: a step of the tests' model needs 217,000, half of its batch 156,000.
SMALL_BYTES = 190_000
RULE = MeshShapeModifier.Config(mesh_shape=MeshShape(fsdp=-1))


def resolve(name):
    """Returns ``fake-big-N``, ``fake-small-N``, ``fake-kind-N`` or ``fake-none-N``."""
    _, kind, count = name.split("-")
    return Instance(
        name=name,
        family=f"fake-{kind}",
        platform="nocompiler" if kind == "none" else "fakechip",
        num_hosts=1,
        devices_per_host=int(count),
        hbm_bytes=SMALL_BYTES if kind == "small" else 2**30,
        peak_flops={"bfloat16": 1e12, "float32": 5e11},
        hbm_bandwidth_bytes=1e11,
        ici_bandwidth_bytes=1e10,
        dcn_bandwidth_bytes=1e9,
        attributes={"aot_stand_ins": "rms_norm.fake_root"} if kind == "kind" else {},
    )


class FakeCompiler:
    """Compiles on this process's CPU devices; cannot build the kernel."""

    name = "fake"
    compiles = True
    reports_out_of_memory = False
    blind_spots = ("it is not a real one",)
    stand_ins = {("rms_norm", "fake_root"): ("xla", "its assembler is not here")}  # noqa: RUF012

    def version(self):
        return "1.0"

    def prepare(self):
        pass

    def devices(self, instance):
        return jax.devices("cpu")[: instance.num_devices]

    def compile_options(self, instance):
        return {}

    def memory_limit_bytes(self, instance):
        return instance.hbm_bytes

    def out_of_memory(self, error):
        return OutOfMemory(2_000, 1_000) if "RESOURCE_EXHAUSTED" in str(error) else None


class NoCompiler(FakeCompiler):
    """Knows its limit and nothing else."""

    name = "none"
    compiles = False

    def devices(self, instance):
        raise AssertionError("there are none")


def rms_norm(x, scale=None, *, eps=1e-6):
    """The kernel, which must not be traced."""
    raise AssertionError("the assembler is not here")
