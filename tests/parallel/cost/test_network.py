"""Seconds of collectives, by hand, for each kind and each level of the network."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axcore.errors import ShardingError
from axcore.parallel import MeshShape
from axcore.parallel.cost._network import Network
from axcore.plugins import Instance

# Links reach 80 % of what is stated: 80 GB/s inside a host of 4, and of a host's 80 GB/s each of
# its devices has 20, so 16.
INSIDE, OUTSIDE = 80e9, 16e9
LARGE = 1e12  # bytes; against it latency is nothing


def machine(**fields) -> Instance:
    known = dict(
        name="test-16",
        family="test",
        platform="test",
        num_hosts=4,
        devices_per_host=4,
        hbm_bytes=2**34,
        ici_bandwidth_bytes=100e9,
        ici_domain_devices=4,
        dcn_bandwidth_bytes=80e9,
    )
    return Instance(**(known | fields))


def network(instance: Instance | None = None, **sizes: int) -> Network:
    return Network(instance or machine(), MeshShape.of(sizes))


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("all_gather", 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_reduce", 2 * 3 / 4),
        ("all_to_all", 3 / 4),
        ("permute", 1),
    ],
)
@pytest.mark.parametrize(("axis", "rate"), [("fsdp", INSIDE), ("data", OUTSIDE)])
def test_one_level_moves_its_share_at_its_rate(kind, share, axis, rate):
    found = network(data=4, fsdp=4).seconds(kind, LARGE, (axis,))
    assert found == pytest.approx(LARGE * share / rate, rel=1e-4)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_over_both_levels_the_slower_one_counts(kind):
    # 8 devices, 4 in each of 2 hosts: 7/8 comes through links, and half of it into each host,
    # shared by the 4.
    both = network(data=2, fsdp=8)
    group = both.group(("fsdp",))
    assert (group.inside, group.outside) == (4, 2)
    inside, outside = LARGE * (7 / 8) / INSIDE, LARGE * (1 / 2) / (4 * OUTSIDE)
    assert inside > outside
    assert both.seconds(kind, LARGE, ("fsdp",)) == pytest.approx(inside, rel=1e-4)
    slow = network(machine(dcn_bandwidth_bytes=20e9), data=2, fsdp=8)
    assert slow.seconds(kind, LARGE, ("fsdp",)) == pytest.approx(4 * outside, rel=1e-4)


def test_axes_join():
    joined = network(data=4, fsdp=4).group(("data", "fsdp"))
    assert (joined.inside, joined.outside) == (4, 4)
    model = network(fsdp=4, model=4)
    assert (model.group(("model",)).outside, model.group(("fsdp",)).inside) == (1, 1)


def test_an_exchange_of_all_with_all_sends_most_outside():
    # Of one device's bytes 3/4 leave its host, each through the device's own share of the network.
    found = network(fsdp=16).seconds("all_to_all", LARGE, ("fsdp",))
    assert found == pytest.approx(LARGE * (3 / 4) / OUTSIDE, rel=1e-4)


def test_slices_are_joined_by_the_slow_network():
    slices = machine(num_slices=2, ici_domain_devices=None)
    found = network(slices, fsdp=8)
    assert (found.group(("fsdp",)).inside, found.group(("fsdp",)).outside) == (8, 1)
    assert (found.group(("data",)).inside, found.group(("data",)).outside) == (1, 2)
    gather = found.seconds("all_gather", LARGE, ("fsdp",))
    assert gather == pytest.approx(LARGE * (7 / 8) / INSIDE, rel=1e-4)
    reduce = found.seconds("all_reduce", LARGE, ("data",))
    assert reduce == pytest.approx(2 * LARGE * (1 / 2) / OUTSIDE, rel=1e-4)


def torus() -> Instance:
    return machine(num_hosts=16, devices_per_host=4, ici_domain_devices=None, topology="4x4x4")


def test_an_axis_of_a_torus_has_the_links_of_the_dims_that_it_covers():
    one = network(torus(), fsdp=16, model=4)
    assert one.seconds("all_gather", LARGE, ("model",)) == pytest.approx(
        LARGE * (3 / 4) / (INSIDE / 3), rel=1e-4
    )
    assert one.seconds("all_gather", LARGE, ("fsdp",)) == pytest.approx(
        LARGE * (15 / 16) / (INSIDE * 2 / 3), rel=1e-4
    )
    whole = network(torus(), fsdp=64)
    assert whole.seconds("all_gather", LARGE, ("fsdp",)) == pytest.approx(
        LARGE * (63 / 64) / INSIDE, rel=1e-4
    )


def test_bytes_cross_several_links_of_a_torus():
    # On average a quarter of each of three rings of 4: 3 links.
    found = network(torus(), fsdp=64).seconds("all_to_all", LARGE, ("fsdp",))
    assert found == pytest.approx(LARGE * (63 / 64) * 3 / INSIDE, rel=1e-4)


def test_a_small_collective_takes_its_hops():
    small = network(data=4, fsdp=4)
    assert small.seconds("all_gather", 1, ("fsdp",)) == pytest.approx(2 * 2e-6, rel=1e-3)
    assert small.seconds("all_gather", 1, ("data",)) == pytest.approx(2 * 1e-5, rel=1e-3)
    assert small.seconds("permute", 1, ("data",)) == pytest.approx(1e-5, rel=1e-3)
    # Half of each of three rings of 4, both ways at once.
    ring = network(torus(), fsdp=64).seconds("all_gather", 1, ("fsdp",))
    assert ring == pytest.approx(6 * 2e-6, rel=1e-3)


def test_one_device_has_nobody_to_talk_to():
    assert network(data=16).seconds("all_reduce", LARGE, ("model",)) == 0.0


def test_a_network_that_nobody_describes_is_refused():
    with pytest.raises(ShardingError, match="bandwidth between them is not known") as error:
        network(machine(dcn_bandwidth_bytes=None), data=16).seconds("all_reduce", 1, ("data",))
    assert error.value.code == "AX492" and "dcn_bandwidth_bytes" in str(error.value)


def test_without_a_fast_network_every_device_is_alone():
    slow = network(machine(ici_bandwidth_bytes=None), fsdp=16)
    assert slow.group(("fsdp",)).outside == 16


KINDS = st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"])


@settings(max_examples=60, deadline=None)
@given(
    kind=KINDS,
    sizes=st.sampled_from([(16, 1, 1), (4, 4, 1), (2, 2, 4), (1, 16, 1), (1, 4, 4), (8, 2, 1)]),
    axis=st.sampled_from(["data", "fsdp", "model"]),
    num_bytes=st.floats(1, 1e12),
    faster=st.floats(1, 10),
    topology=st.sampled_from([None, "4x4"]),
)
def test_a_faster_link_is_never_slower_and_more_bytes_never_faster(
    kind, sizes, axis, num_bytes, faster, topology
):
    shape = MeshShape(data=sizes[0], fsdp=sizes[1], model=sizes[2])
    base = Network(machine(topology=topology), shape).seconds(kind, num_bytes, (axis,))
    for field in ("ici_bandwidth_bytes", "dcn_bandwidth_bytes"):
        known = getattr(machine(), field)
        fast = Network(machine(topology=topology, **{field: known * faster}), shape)
        assert fast.seconds(kind, num_bytes, (axis,)) <= base
    more = Network(machine(topology=topology), shape).seconds(kind, 2 * num_bytes, (axis,))
    assert more >= base and math.isfinite(more)
