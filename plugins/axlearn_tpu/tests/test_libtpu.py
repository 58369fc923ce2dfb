"""Against libtpu, where it is installed: the slices that it knows, and the options it accepts."""

import math

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axcore.parallel import MeshShape, build_mesh, resolve_instance
from axcore.plugins import host

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.xdist_group("libtpu"),
    pytest.mark.usefixtures("libtpu"),
]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Several processes may compile at once, and no metadata server is to be asked."""
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")


def topology(instance):
    """Returns the devices of one slice as libtpu describes it."""
    attributes = instance.attributes
    bounds = [int(n) for n in attributes["chips_per_host_bounds"].split(",")]
    kwargs = {"chips_per_host_bounds": bounds}
    if "chip_config_name" in attributes:
        kwargs["chip_config_name"] = attributes["chip_config_name"]
    if instance.num_slices > 1:
        kwargs["num_slices"] = instance.num_slices
    name = attributes["libtpu_topology"]
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **kwargs).devices


@pytest.mark.parametrize(
    "name",
    "tpu-v4-8 tpu-v4-16 tpu-v4-32 tpu-v4-64 tpu-v4-384 tpu-v4-8192 "
    "tpu-v5e-1 tpu-v5e-4 tpu-v5e-8 tpu-v5e-16 tpu-v5e-32 tpu-v5e-256 tpu-v5e-16-4 "
    "tpu-v5p-8 tpu-v5p-32 tpu-v5p-512 tpu-v5p-1536 tpu-v5p-4096 tpu-v5p-12288 "
    "tpu-v6e-1 tpu-v6e-8 tpu-v6e-64 tpu-v6e-256 "
    "tpu-7x-4 tpu-7x-16 tpu-7x-256 tpu-7x-9216".split(),
)
def test_devices_hosts_and_kinds_are_libtpus(name):
    instance = resolve_instance(name)
    devices = topology(instance)
    assert len(devices) == instance.num_devices
    assert len({d.process_index for d in devices}) == instance.num_hosts
    assert {d.device_kind for d in devices} == {instance.device_kind}
    shape = [int(n) for n in (instance.topology or "").split("x")]
    coords = {tuple(d.coords) for d in devices}
    assert len(coords) == math.prod(shape) == int(instance.attributes["chips"])
    assert [max(c[i] for c in coords) + 1 for i in range(len(shape))] == shape


@pytest.mark.parametrize("name", ["tpu-v4-8", "tpu-v5e-4", "tpu-v5p-8", "tpu-v6e-4-2", "tpu-7x-4"])
def test_its_compiler_accepts_the_options(name):
    devices = topology(resolve_instance(name))
    mesh = Mesh(np.array(devices), ("x",))
    x = jax.ShapeDtypeStruct((16, 128), np.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    lowered = jax.jit(lambda x: x + 1).lower(x)
    options = dict(host().active_for(name).options())
    lowered.compile(compiler_options=options)
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={**options, "xla_tpu_no_such_option": True})


def test_mesh_axes_share_a_dim_of_a_slice_where_no_whole_dims_give_their_sizes():
    """2 x 32 of 4 x 4 x 4: pairs are halves of one dim, whose other coordinates are the same."""
    instance = resolve_instance("tpu-v5p-128")
    assert instance.topology == "4x4x4"
    mesh = build_mesh(MeshShape(expert=2, fsdp=-1), topology(instance))
    pairs = mesh.devices.reshape(2, 32).T
    assert {d.id for d in pairs.flat} == set(range(64))
    apart = {tuple(np.abs(np.subtract(a.coords, b.coords)).tolist()) for a, b in pairs}
    assert len(apart) == 1 and np.count_nonzero(apart.pop()) == 1
