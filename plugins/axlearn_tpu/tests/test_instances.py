"""TPU slices: names, counts, shapes, figures, and finding out where one is."""

import math
import subprocess
import sys

import pytest

from axcore.errors import PluginError
from axcore.parallel import resolve_instance
from axlearn_tpu import _topology
from axlearn_tpu._chips import CHIPS
from axlearn_tpu.instances import _detect

# Rows of the vendor's tables of configurations (pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e",
# "TPU7x"): name, topology, chips, hosts.
PUBLISHED = [
    ("tpu-v4-8", "2x2x1", 4, 1),
    ("tpu-v4-16", "2x2x2", 8, 2),
    ("tpu-v4-64", "2x4x4", 32, 8),
    ("tpu-v4-512", "4x8x8", 256, 64),
    ("tpu-v4-4096", "8x16x16", 2048, 512),
    ("tpu-v5e-1", "1x1", 1, 1),
    ("tpu-v5e-4", "2x2", 4, 1),
    ("tpu-v5e-8", "2x4", 8, 1),
    ("tpu-v5e-16", "4x4", 16, 4),
    ("tpu-v5e-128", "8x16", 128, 32),
    ("tpu-v5e-256", "16x16", 256, 64),
    ("tpu-v5p-8", "2x2x1", 4, 1),
    ("tpu-v5p-128", "4x4x4", 64, 16),
    ("tpu-v5p-256", "4x4x8", 128, 32),
    ("tpu-v5p-512", "4x8x8", 256, 64),
    ("tpu-v5p-1024", "8x8x8", 512, 128),
    ("tpu-v5p-2048", "8x8x16", 1024, 256),
    ("tpu-v5p-8192", "16x16x16", 4096, 1024),
    ("tpu-v5p-12288", "16x16x24", 6144, 1536),
    ("tpu-v6e-8", "2x4", 8, 1),
    ("tpu-v6e-64", "8x8", 64, 16),
    ("tpu-7x-4", "2x2x1", 4, 1),
    ("tpu-7x-64", "4x4x4", 64, 16),
]


@pytest.mark.parametrize(("name", "topology", "chips", "hosts"), PUBLISHED)
def test_slices_have_the_published_shape(name, topology, chips, hosts):
    instance = resolve_instance(name)
    assert (instance.name, instance.platform, instance.num_slices) == (name, "tpu", 1)
    assert (instance.topology, instance.attributes["chips"]) == (topology, str(chips))
    assert instance.num_hosts == hosts
    per_chip = 2 if name.startswith("tpu-7x") else 1
    assert instance.num_devices == chips * per_chip


@pytest.mark.parametrize("generation", CHIPS)
def test_every_shape_multiplies_to_its_chips_and_fits_the_largest_slice(generation):
    chip = CHIPS[generation]
    sizes = _topology._sizes(generation)
    assert max(sizes) == chip.max_chips == math.prod(chip.max_dims)
    for chips in sizes:
        shape = _topology.slice_shape(chip, chips)
        assert shape is not None and math.prod(shape) == chips
        assert all(n <= most for n, most in zip(sorted(shape), sorted(chip.max_dims), strict=True))
        hosts, chips_per_host = _topology.hosts_and_chips(chip, chips)
        assert hosts * chips_per_host == chips


def test_a_second_number_is_slices():
    one, four = resolve_instance("tpu-v5e-256"), resolve_instance("tpu-v5e-256-4")
    assert (four.num_slices, four.num_devices, four.num_hosts) == (4, 1024, 256)
    assert four.topology == one.topology == "16x16"


@pytest.mark.parametrize(
    ("name", "topology", "bounds", "config"),
    [
        ("tpu-v5p-512", "v5p:4x8x8", "2,2,1", None),
        ("tpu-v5e-8", "v5e:2x4", "2,4,1", None),
        ("tpu-v5e-1", "v5e:1x1", "1,1,1", None),
        ("tpu-v4-8", "v4:2x2x1", "2,2,1", "megacore"),
        ("tpu-7x-64", "tpu7x:4x4x4", "2,2,1", None),
    ],
)
def test_what_libtpu_is_told(name, topology, bounds, config):
    attributes = resolve_instance(name).attributes
    assert attributes["libtpu_topology"] == topology
    assert attributes["chips_per_host_bounds"] == bounds
    assert attributes.get("chip_config_name") == config


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tpu-v5e-100", "tpu-v5e-64 and tpu-v5e-128"),
        ("tpu-v5e-512", "tpu-v5e-256"),
        ("tpu-v5e-100-2", "tpu-v5e-64-2 and tpu-v5e-128-2"),
        ("tpu-v5p-500", "tpu-v5p-384 and tpu-v5p-512"),
        ("tpu-v5p-9", "tpu-v5p-8 and tpu-v5p-16"),
        ("tpu-v4-4", "tpu-v4-8"),
    ],
)
def test_a_size_that_does_not_exist_names_the_nearest(name, hint):
    with pytest.raises(PluginError, match="there is no") as caught:
        resolve_instance(name)
    assert (caught.value.code, caught.value.hint) == ("AX281", f"the nearest: {hint}")


@pytest.mark.parametrize("name", ["tpu-v5e-", "tpu-v5e-0", "tpu-v5e-08", "tpu-v5e-8-2-2"])
def test_a_name_of_another_form_is_an_error(name):
    with pytest.raises(PluginError, match="is not of the form tpu-GENERATION-COUNT"):
        resolve_instance(name)


# -- figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "layers", "dim", "seconds", "mfu"),
    [
        ("tpu-v5p-512", 6.74e9, 32, 4096, 2.5, 66.2),
        ("tpu-v5p-1024", 69.0e9, 80, 8192, 11.6, 68.0),
    ],
)
def test_peaks_reproduce_published_utilization(name, params, layers, dim, seconds, mfu):
    """6 N + 12 L d S FLOPs a token, 1,024 rows of 4,096: the AXLearn paper's table of training."""
    tokens = 1024 * 4096
    flops = (6 * params + 12 * layers * dim * 4096) * tokens
    instance = resolve_instance(name)
    peak = instance.peak_flops["bfloat16"] * instance.num_devices
    assert 100 * flops / (seconds * peak) == pytest.approx(mfu, abs=1.3)


@pytest.mark.parametrize("generation", CHIPS)
def test_figures_are_plausible(generation):
    chip = CHIPS[generation]
    bf16 = chip.peak_flops["bfloat16"]
    assert all(rate in (bf16, 2 * bf16) or rate / bf16 == pytest.approx(2, rel=0.01)
               for rate in chip.peak_flops.values())  # fmt: skip
    # A product is bound by arithmetic above some hundred FLOPs a byte, on every generation.
    assert 100 < bf16 / chip.hbm_bandwidth_bytes < 1000
    assert chip.dcn_bandwidth_bytes < chip.ici_bandwidth_bytes < chip.hbm_bandwidth_bytes


def test_the_two_devices_of_a_chip_share_it():
    instance, chip = resolve_instance("tpu-7x-4"), CHIPS["7x"]
    assert instance.devices_per_host == 8
    assert instance.hbm_bytes * 2 == chip.hbm_bytes == 192 * 2**30
    assert instance.peak_flops["bfloat16"] * 2 == 2307e12
    assert instance.dcn_bandwidth_bytes == 4 * 12.5e9


# -- detection ------------------------------------------------------------------------------------


@pytest.fixture
def pci(tmp_path):
    """A PCI bus with four v5e chips and a network adapter."""
    ids = [("0x1ae0", "0x0063")] * 4 + [("0x8086", "0x1572")]
    for i, (vendor, device) in enumerate(ids):
        folder = tmp_path / f"0000:00:0{i}.0"
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TPU_ACCELERATOR_TYPE": "v5litepod-16"}, "tpu-v5e-16"),
        ({"TPU_TOPOLOGY": "16x16"}, "tpu-v5e-256"),
        ({"TPU_TOPOLOGY": "16x16", "MEGASCALE_NUM_SLICES": "4"}, "tpu-v5e-256-4"),
    ],
)
def test_the_slice_is_read_from_the_environment(pci, environ, expected):
    assert _detect(environ, pci, usable=True) == expected


def test_chips_without_a_size_are_an_error_not_a_guess(pci):
    with pytest.raises(PluginError, match="4 TPU v5e chips here") as caught:
        _detect({}, pci, usable=True)
    assert "tpu-v5e-4 if this host is all of it" in (caught.value.hint or "")


def test_no_chip_or_no_use_for_one_is_none(pci, tmp_path):
    assert _detect({}, pci, usable=False) is None
    assert _detect({"TPU_TOPOLOGY": "2x2"}, tmp_path / "none", usable=True) is None


def test_resolving_and_detecting_import_no_jax():
    code = (
        "import sys; from axlearn_tpu.instances import detect, resolve; "
        "resolve('tpu-v5p-512'), detect(); sys.exit('jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
