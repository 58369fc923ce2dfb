"""GPU machines: names, counts, figures, and finding out where one is."""

import subprocess
import sys

import pytest

from axcore.errors import PluginError, PluginLookupError
from axcore.parallel import resolve_instance
from axlearn_gpu._gpus import GPUS, MACHINES
from axlearn_gpu.instances import _detect


@pytest.mark.parametrize(
    ("name", "gpu", "hosts", "per_host", "domain"),
    [
        ("gpu-p5.48xlarge-256", "h100", 32, 8, 8),
        ("gpu-h100-256", "h100", 32, 8, 8),
        ("gpu-h100-4", "h100", 1, 4, 4),
        ("gpu-a100-40-16", "a100-40", 2, 8, 8),
        ("gpu-a100-80-1", "a100-80", 1, 1, 1),
        ("gpu-p4d.24xlarge-8", "a100-40", 1, 8, 8),
        ("gpu-p4de.24xlarge-64", "a100-80", 8, 8, 8),
        ("gpu-p5en.48xlarge-512", "h200", 64, 8, 8),
        ("gpu-p6-b200.48xlarge-512", "b200", 64, 8, 8),
        ("gpu-a2-megagpu-16g-32", "a100-40", 2, 16, 16),
        ("gpu-a3-megagpu-8g-1024", "h100", 128, 8, 8),
        ("gpu-a4-highgpu-8g-8", "b200", 1, 8, 8),
        ("gpu-gb200-72", "gb200", 18, 4, 72),
        ("gpu-gb300-576", "gb300", 144, 4, 72),
        ("gpu-a4x-highgpu-4g-64", "gb200", 16, 4, 64),
    ],
)
def test_names_say_machine_and_gpus_in_all(name, gpu, hosts, per_host, domain):
    instance = resolve_instance(name)
    assert (instance.name, instance.platform, instance.family) == (name, "gpu", f"gpu-{gpu}")
    assert (instance.num_hosts, instance.devices_per_host) == (hosts, per_host)
    assert instance.num_devices == int(name.rpartition("-")[2])
    assert instance.num_slices == 1
    assert instance.attributes["nvlink_domain"] == str(domain)
    assert instance.hbm_bytes == GPUS[gpu].hbm_bytes


@pytest.mark.parametrize("machine", MACHINES)
def test_every_machine_resolves_whole(machine):
    instance = resolve_instance(f"gpu-{machine}-{MACHINES[machine].gpus * 2}")
    assert instance.num_hosts == 2
    assert instance.attributes["xla_target"] == GPUS[MACHINES[machine].gpu].xla_target


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gpu-p5.48xlarge-100", "gpu-p5.48xlarge-96 and gpu-p5.48xlarge-104"),
        ("gpu-p5.48xlarge-4", "gpu-p5.48xlarge-8"),
        ("gpu-h100-3", "gpu-h100-2 and gpu-h100-4"),
        ("gpu-gb200-70", "gpu-gb200-68 and gpu-gb200-72"),
    ],
)
def test_a_number_that_makes_no_whole_machines_names_the_nearest(name, hint):
    with pytest.raises(PluginError, match="no number of whole machines") as caught:
        resolve_instance(name)
    assert (caught.value.code, caught.value.hint) == ("AX283", f"the nearest: {hint}")


def test_an_unknown_machine_names_the_near_one():
    with pytest.raises(PluginLookupError, match="unknown instance") as caught:
        resolve_instance("gpu-p5.48xlarg-8")
    assert "gpu-p5.48xlarge-8" in (caught.value.hint or "")
    with pytest.raises(PluginError, match="is not of the form gpu-MACHINE-COUNT"):
        resolve_instance("gpu-h100-08")


# -- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "layers", "dim", "seconds", "mfu"),
    [
        ("gpu-p5.48xlarge-256", 6.74e9, 32, 4096, 1.4, 54.2),
        ("gpu-h100-512", 69.0e9, 80, 8192, 9.2, 40.0),
    ],
)
def test_peaks_reproduce_published_utilization(name, params, layers, dim, seconds, mfu):
    """6 N + 12 L d S FLOPs a token, 1,024 rows of 4,096: the AXLearn paper's table of training."""
    flops = (6 * params + 12 * layers * dim * 4096) * 1024 * 4096
    instance = resolve_instance(name)
    peak = instance.peak_flops["bfloat16"] * instance.num_devices
    assert 100 * flops / (seconds * peak) == pytest.approx(mfu, abs=1.3)


def test_peaks_are_those_of_published_comparisons():
    """The AXLearn paper reckons with 989 TFLOP/s for H100 and 2,250 for B200."""
    peaks = {name: gpu.peak_flops["bfloat16"] / 1e12 for name, gpu in GPUS.items()}
    assert (peaks["h100"], peaks["b200"]) == (989, 2250)


@pytest.mark.parametrize("name", GPUS)
def test_figures_are_plausible(name):
    gpu = GPUS[name]
    bf16 = gpu.peak_flops["bfloat16"]
    for dtype, factor in (("float16", 1), ("float8_e4m3fn", 2), ("int8", 2)):
        if dtype in gpu.peak_flops:
            assert gpu.peak_flops[dtype] / bf16 == pytest.approx(factor, rel=0.002)
    assert 100 < bf16 / gpu.hbm_bandwidth_bytes < 500
    assert gpu.nvlink_bandwidth_bytes < gpu.hbm_bandwidth_bytes


def test_adapters_are_shared_by_the_gpus_of_a_host():
    assert resolve_instance("gpu-p5.48xlarge-16").dcn_bandwidth_bytes == 8 * 50e9
    assert resolve_instance("gpu-h100-2").dcn_bandwidth_bytes == 2 * 50e9
    assert resolve_instance("gpu-p4d.24xlarge-8").dcn_bandwidth_bytes == 50e9


# -- detection ------------------------------------------------------------------------------------


@pytest.fixture
def host_of(tmp_path):
    """Makes a file system with GPUs in ``/proc`` and a product name from the firmware."""

    def make(*models, product=None):
        for i, model in enumerate(models):
            folder = tmp_path / f"proc/driver/nvidia/gpus/0000:0{i}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 1\n")
        if product:
            folder = tmp_path / "sys/devices/virtual/dmi/id"
            folder.mkdir(parents=True)
            (folder / "product_name").write_text(product + "\n")
        return tmp_path

    return make


H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("models", "product", "environ", "expected"),
    [
        ([H100] * 8, None, {}, "gpu-h100-8"),
        ([H100] * 8, "p5.48xlarge", {}, "gpu-p5.48xlarge-8"),
        ([H100] * 8, "p5.48xlarge", {"SLURM_STEP_NUM_NODES": "32"}, "gpu-p5.48xlarge-256"),
        ([H100] * 8, "p5.48xlarge", {"CUDA_VISIBLE_DEVICES": "0,1"}, "gpu-h100-2"),
        ([H100] * 8, None, {"CUDA_VISIBLE_DEVICES": ""}, None),
        (["NVIDIA H200 141GB HBM3e"], "Google Compute Engine", {}, "gpu-h200-1"),
        (["NVIDIA A100-SXM4-40GB"] * 2, None, {}, "gpu-a100-40-2"),
        (["NVIDIA GB200"] * 4, None, {}, "gpu-gb200-4"),
        ([], "p5.48xlarge", {}, None),
    ],
)
def test_machines_are_recognized_from_files(host_of, models, product, environ, expected):
    assert _detect(environ, host_of(*models, product=product), usable=True) == expected


def test_gpus_without_a_data_sheet_here_are_left_alone_with_a_warning(host_of, caplog):
    assert _detect({}, host_of("NVIDIA H100 PCIe"), usable=True) is None
    assert "NVIDIA H100 PCIe" in caplog.text


def test_a_process_that_cannot_use_gpus_has_none(host_of):
    assert _detect({}, host_of(H100), usable=False) is None


def test_resolving_and_detecting_import_no_jax():
    code = (
        "import sys; from axlearn_gpu.instances import detect, resolve; "
        "resolve('gpu-h100-8'), detect(); sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
