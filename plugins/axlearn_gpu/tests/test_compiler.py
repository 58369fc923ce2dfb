"""What the GPU compiler states of GPUs and machines, without compiling anything."""

import importlib.util

import pytest

from axcore.errors import AotError
from axcore.parallel import resolve_instance
from axcore.parallel.aot import compiler_for
from axlearn_gpu import compiler as module
from axlearn_gpu._gpus import GPUS
from axlearn_gpu._target import SILICON, target_config
from axlearn_gpu.compiler import GpuCompiler, topology


def test_it_serves_every_machine_on_platform_gpu():
    instance = resolve_instance("gpu-p5.48xlarge-256")
    compiler = compiler_for(instance)
    assert isinstance(compiler, GpuCompiler)
    assert (instance.platform, compiler.reports_out_of_memory) == ("gpu", False)


@pytest.mark.parametrize("name", GPUS)
def test_the_chip_can_do_what_the_data_sheet_says(name):
    """Lanes x clock is the float32 rate of the data sheets, which the plugin states nowhere."""
    float32_tflops = {
        "a100-40": 19.5, "a100-80": 19.5, "h100": 67, "h200": 67,
        "b200": 75, "gb200": 80, "gb300": 80,
    }  # fmt: skip
    chip = SILICON[name]
    rate = 2 * chip.sms * chip.lanes * chip.clock_hz / 1e12
    assert rate == pytest.approx(float32_tflops[name], rel=0.02)


@pytest.mark.parametrize(("name", "bf16"), [("a100-80", 256), ("h100", 512), ("b200", 1024)])
def test_tensor_cores_do_as_many_operations_a_clock_as_their_architecture(name, bf16):
    """Multiply-adds per clock of one of four tensor cores of an SM, by the white papers."""
    line = next(part for part in target_config(name).split("rate_infos") if "key: 16 " in part)
    assert f"units_per_core: 4 ops_per_clock: {bf16} " in line


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpu-h100-1", "1x1x1"),
        ("gpu-h100-8", "1x1x8"),
        ("gpu-p5.48xlarge-256", "32x1x8"),  # NVLink ends at the host
        ("gpu-gb200-72", "1x18x4"),
        ("gpu-gb200-256", "4x16x4"),  # 64 hosts: 18 do not divide them, 16 do
    ],
)
def test_a_slice_is_what_nvlink_joins(name, expected):
    assert topology(resolve_instance(name)) == expected


def test_the_limit_is_what_the_runtime_will_take(monkeypatch):
    instance = resolve_instance("gpu-h100-8")
    for name in module._VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert GpuCompiler().memory_limit_bytes(instance) == int(0.92 * instance.hbm_bytes)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".75")
    assert GpuCompiler().memory_limit_bytes(instance) == int(0.75 * instance.hbm_bytes)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(AotError, match="'most', expected a number"):
        GpuCompiler().memory_limit_bytes(instance)


def test_without_the_cuda_plugin_the_error_names_the_extra(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        module.importlib.util,
        "find_spec",
        lambda name: None if name.startswith("jax_plugins") else find_spec(name),
    )
    instance = resolve_instance("gpu-h100-8")
    for call in (GpuCompiler().version, lambda: GpuCompiler().devices(instance)):
        with pytest.raises(AotError, match="CUDA plugin of JAX is not installed") as caught:
            call()
        assert caught.value.code == "AX480"
        assert 'pip install "axlearn-gpu[aot]"' in (caught.value.hint or "")
