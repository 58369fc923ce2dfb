import subprocess
import sys

import jax
import pytest

from axcore.errors import PluginLookupError, ShardingError
from axcore.parallel import (
    detect,
    peak_flops,
    prepare_host,
    resolve_instance,
    select_devices,
)
from axcore.plugins import PluginHost, reset_host


def test_cpu_is_one_device_with_the_memory_of_the_machine():
    instance = resolve_instance("cpu")
    assert (instance.platform, instance.num_devices, instance.simulated_devices) == ("cpu", 1, None)
    assert 2**28 < instance.hbm_bytes < 2**46


def test_simulated_devices_share_the_memory():
    one, eight = resolve_instance("cpu"), resolve_instance("cpu-8")
    assert (eight.num_devices, eight.simulated_devices, eight.num_hosts) == (8, 8, 1)
    assert eight.hbm_bytes == one.hbm_bytes // 8


@pytest.mark.parametrize(
    ("name", "meant"),
    [("cpu8", "cpu-8"), ("cpus-4", "cpu-4"), ("CPU-8", None), ("cpu-0", "cpu-8"), ("cpu-x", "cpu")],
)
def test_an_unknown_instance_names_near_misses(name, meant):
    with pytest.raises(PluginLookupError, match=f"unknown instance '{name}'") as info:
        resolve_instance(name)
    assert info.value.exit_code == 2
    if meant:
        assert f"did you mean '{meant}" in str(info.value)
        assert str(info.value).count("did you mean") == 1


def test_a_machine_that_no_installed_plugin_knows_points_at_plugins():
    former = reset_host(PluginHost([]))
    try:
        with pytest.raises(PluginLookupError, match="unknown instance 'tpu-v5e-8'") as info:
            resolve_instance("tpu-v5e-8")
    finally:
        reset_host(former)
    assert "hardware plugins" in info.value.hint and "axcore plugins list" in info.value.hint


def test_this_machine_is_a_cpu():
    assert detect() == "cpu"


def test_devices_are_those_of_the_instance():
    assert select_devices(resolve_instance("cpu-8")) == jax.devices("cpu")
    assert select_devices(resolve_instance("cpu-2")) == jax.devices("cpu")[:2]
    with pytest.raises(ShardingError, match=r"8 'cpu' devices(.|\n)*expected 16(.|\n)*cpu-8"):
        select_devices(resolve_instance("cpu-16"))


def test_peak_flops_of_the_cpu_are_measured_and_shared():
    whole = peak_flops(resolve_instance("cpu"), "float32")
    assert whole is not None and 1e8 < whole < 1e14
    assert peak_flops(resolve_instance("cpu-4"), "float32") == whole / 4


def test_simulated_devices_do_not_divide_among_any_number_of_processes():
    with pytest.raises(ShardingError, match=r"8 simulated devices .* 3 processes(.|\n)*cpu-9"):
        prepare_host(resolve_instance("cpu-8"), num_processes=3)


def _python(code: str) -> str:
    prefix = "from axcore.parallel import prepare_host, resolve_instance, select_devices\n"
    done = subprocess.run([sys.executable, "-c", prefix + code], capture_output=True, text=True)
    return done.stdout + done.stderr


def test_prepare_host_makes_the_devices_in_a_fresh_process():
    code = (
        "i = resolve_instance('cpu-3'); prepare_host(i); print(len(select_devices(i)), 'devices')"
    )
    assert "3 devices" in _python(code)


def test_prepare_host_says_when_it_is_too_late():
    code = "import jax; jax.devices(); prepare_host(resolve_instance('cpu-3'))"
    output = _python(code)
    assert "JAX has already started with 1 CPU device, expected 3" in output
    assert "JAX_NUM_CPU_DEVICES=3" in output
