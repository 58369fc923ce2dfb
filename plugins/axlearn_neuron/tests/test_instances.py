"""Trainium machines: names, hosts, logical cores, figures, and finding out where one is."""

import subprocess
import sys

import pytest

from axcore.errors import PluginError, PluginLookupError
from axcore.parallel import resolve_instance
from axlearn_neuron._machines import CHIPS, MACHINES
from axlearn_neuron.instances import _detect


@pytest.mark.parametrize(
    ("name", "per_host", "gib", "chips", "cores"),
    [
        ("neuron-trn1.32xlarge-4", 32, 16, 64, "1"),
        ("neuron-trn1n.32xlarge-1", 32, 16, 16, "1"),
        ("neuron-trn2.48xlarge-64", 64, 24, 1024, "2"),
        ("neuron-trn2n.48xlarge-64", 64, 24, 1024, "2"),
        ("neuron-trn2u.48xlarge-4", 64, 24, 64, "2"),
        ("neuron-trn3.48xlarge-4", 64, 36, 64, "2"),
    ],
)
def test_the_number_is_hosts_and_devices_are_logical_cores(name, per_host, gib, chips, cores):
    instance = resolve_instance(name)
    assert (instance.name, instance.platform) == (name, "neuron")
    assert instance.num_hosts == int(name.rpartition("-")[2])
    assert instance.devices_per_host == per_host
    assert instance.hbm_bytes == gib * 2**30
    assert instance.attributes["chips"] == str(chips)
    assert instance.attributes["physical_cores_per_device"] == cores


@pytest.mark.parametrize("name", ["neuron-trn2.48xlarge-0", "neuron-trn2.48xlarge-99999999"])
def test_a_number_of_hosts_that_cannot_be_is_an_error(name):
    with pytest.raises(PluginError, match="is not of the form neuron-MACHINE-HOSTS") as caught:
        resolve_instance(name)
    assert caught.value.code == "AX284"


def test_an_unknown_machine_names_the_near_one():
    with pytest.raises(PluginLookupError) as caught:
        resolve_instance("neuron-trn2.48xlarg-64")
    assert "neuron-trn2.48xlarge-64" in (caught.value.hint or "")


# -- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "layers", "dim", "seconds", "mfu"),
    [(6.74e9, 32, 4096, 1.2, 24.2), (69.0e9, 80, 8192, 11.2, 25.0)],
)
def test_peaks_reproduce_published_utilization(params, layers, dim, seconds, mfu):
    """6 N + 12 L d S FLOPs a token, 1,024 rows of 4,096: the AXLearn paper's table of training."""
    flops = (6 * params + 12 * layers * dim * 4096) * 1024 * 4096
    instance = resolve_instance("neuron-trn2.48xlarge-64")
    peak = instance.peak_flops["bfloat16"] * instance.num_devices
    assert peak == 1024 * 667e12
    assert 100 * flops / (seconds * peak) == pytest.approx(mfu, abs=1.3)


@pytest.mark.parametrize("name", MACHINES)
def test_the_devices_of_a_host_add_up_to_its_chips(name):
    """Against the vendor's tables of instances: memory in GiB, 16-bit PFLOP/s."""
    gib, pflops = {"trn1": (512, 3.04), "trn2": (1536, 10.7), "trn3": (9216 / 4, 42.944 / 4)}[
        name[:4]
    ]
    instance = resolve_instance(f"neuron-{name}-1")
    assert instance.num_devices * instance.hbm_bytes == gib * 2**30
    peak = instance.num_devices * instance.peak_flops["bfloat16"]
    assert peak == pytest.approx(pflops * 1e15, rel=0.01)


@pytest.mark.parametrize("name", CHIPS)
def test_figures_are_plausible(name):
    chip = CHIPS[name]
    assert 100 < chip.peak_flops["bfloat16"] / chip.hbm_bandwidth_bytes < 300
    assert chip.cores % chip.cores_per_device == 0


def test_assumed_figures_are_marked():
    assumed = {n for n in MACHINES
               if resolve_instance(f"neuron-{n}-1").attributes["figures"] == "assumed"}  # fmt: skip
    assert assumed == {"trn2n.48xlarge", "trn3.48xlarge"}


# -- detection ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("product", "environ", "expected"),
    [
        ("trn2.48xlarge", {}, "neuron-trn2.48xlarge-1"),
        ("trn2.48xlarge", {"SLURM_STEP_NUM_NODES": "64"}, "neuron-trn2.48xlarge-64"),
        (
            "trn1.32xlarge",
            {"NEURON_PJRT_PROCESSES_NUM_DEVICES": "32,32,32,32"},
            "neuron-trn1.32xlarge-4",
        ),
        ("p5.48xlarge", {}, None),
        (None, {}, None),
    ],
)
def test_machines_are_recognized_by_their_firmware(tmp_path, product, environ, expected):
    if product:
        folder = tmp_path / "sys/devices/virtual/dmi/id"
        folder.mkdir(parents=True)
        (folder / "product_name").write_text(product + "\n")
    assert _detect(environ, tmp_path, usable=True) == expected
    assert _detect(environ, tmp_path, usable=False) is None


def test_resolving_and_detecting_import_no_jax():
    code = (
        "import sys; from axlearn_neuron.instances import detect, resolve; "
        "resolve('neuron-trn2.48xlarge-64'), detect(); sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
