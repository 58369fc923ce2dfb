"""How long a collective takes, from which devices it joins and by which network.

Two networks: the fast one inside a *domain* (a slice, a host, a rack) and the one between domains.
A mesh axis lies inside, across, or partly both; that follows from its size and its stride, since
later mesh axes get nearer neighbours. With ``n = i * o`` devices, ``i`` of them in each of ``o``
domains, ``b`` bytes (of the whole array for gather and reduce, of one device's part for the
others), ``F`` bytes/s inside and ``W`` bytes/s of one device's part of the network outside:

    all_gather, reduce_scatter   max(b (1 - 1/n) / F,  b (1 - 1/o) / (i W))
    all_reduce                   twice that
    all_to_all                   max(b (i - 1)/n * h / F,  b (1 - 1/o) / W),  h hops
    permute                      b / F, or b / W when a neighbour is in another domain

plus latency for each hop. Both networks work at the same time, so the slower one counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from axcore.errors import ShardingError
from axcore.parallel.axes import MESH_AXES
from axcore.parallel.cost._rates import LINK_EFFICIENCY, measured_memory_bytes
from axcore.parallel.mesh import MeshShape
from axcore.plugins import Instance

__all__ = ["CollectiveKind", "Group", "Network"]

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]

# Orders of magnitude, not fitted: a hop between neighbours, and one through a network of switches.
INSIDE_HOP_SECONDS = 2e-6
OUTSIDE_HOP_SECONDS = 1e-5


@dataclass(frozen=True)
class Group:
    """Devices that take part in one collective.

    Attributes:
        inside: How many of them are in each domain.
        outside: Domains they are in.
    """

    inside: int
    outside: int

    @property
    def size(self) -> int:
        """Devices in all."""
        return self.inside * self.outside


class Network:
    """The links of an instance as a mesh sees them.

    Args:
        instance: The machine.
        shape: Mesh shape.

    Raises:
        ShardingError: The mesh does not fit the devices.
    """

    def __init__(self, instance: Instance, shape: MeshShape):
        self.instance = instance
        slices = instance.num_slices
        self.inside, self.across = shape.split(instance.num_devices, slices)
        per_slice = instance.num_devices // slices
        domain = min(instance.ici_domain_devices or per_slice, per_slice)
        fast, slow = instance.ici_bandwidth_bytes, instance.dcn_bandwidth_bytes
        if fast is None and instance.platform == "cpu":
            fast = measured_memory_bytes() / instance.num_devices  # simulated: they share memory
        # Without a fast network every device is a domain of its own.
        self.domain = domain if fast is not None or domain == 1 else 1
        self.fast = None if fast is None else fast * LINK_EFFICIENCY
        per_host = max(instance.num_devices // instance.num_hosts, 1)
        self.slow = None if slow is None else slow * LINK_EFFICIENCY / per_host
        text = (instance.topology or "").split("x")
        self.torus = tuple(int(n) for n in text if n.isdigit() and int(n) > 1)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Mesh axis -> size, over all slices."""
        return {axis: self.inside[axis] * self.across[axis] for axis in MESH_AXES}

    def group(self, axes: Sequence[str]) -> Group:
        """Returns who takes part in a collective over some mesh axes together."""
        inside = outside = 1
        stride = 1
        for axis in reversed(MESH_AXES):
            size = self.inside[axis]
            if axis in axes:
                near = math.gcd(size, max(self.domain // stride, 1))
                inside, outside = inside * near, outside * (size // near) * self.across[axis]
            stride *= size
        return Group(inside, outside)

    def seconds(self, kind: CollectiveKind, num_bytes: float, axes: Sequence[str]) -> float:
        """Returns how long one collective takes.

        Args:
            kind: Which one.
            num_bytes: Of the whole array that is gathered, scattered or reduced; of one device's
                part for ``all_to_all`` and ``permute``.
            axes: Mesh axes it runs over.

        Raises:
            ShardingError: The instance does not say how fast the network is.
        """
        group = self.group(axes)
        if group.size == 1 or num_bytes <= 0:
            return 0.0
        return self._bandwidth(kind, num_bytes, group) + self._latency(kind, group)

    def moved(self, kind: CollectiveKind, num_bytes: float, axes: Sequence[str]) -> float:
        """Returns the bytes that one device receives."""
        n = self.group(axes).size
        if kind == "permute":
            return num_bytes if n > 1 else 0.0
        return num_bytes * (1 - 1 / n) * (2 if kind == "all_reduce" else 1)

    def _bandwidth(self, kind: CollectiveKind, num_bytes: float, group: Group) -> float:
        i, o, n = group.inside, group.outside, group.size
        if kind == "permute":
            return num_bytes / (self._outside(group) if o > 1 else self._inside(group))
        if kind == "all_to_all":
            inside = num_bytes * (i - 1) / n * self._hops(i) if i > 1 else 0.0
            outside = num_bytes * (1 - 1 / o)
        else:
            times = 2 if kind == "all_reduce" else 1
            inside = times * num_bytes * (1 - 1 / n) if i > 1 else 0.0
            outside = times * num_bytes * (1 - 1 / o) / i
        return max(
            inside / self._inside(group) if inside else 0.0,
            outside / self._outside(group) if outside else 0.0,
        )

    def _inside(self, group: Group) -> float:
        """Bytes/s into one device from its domain; of a torus by the dims that are covered."""
        assert self.fast is not None  # then a domain has one device
        return self.fast * self._covered(group.inside)

    def _outside(self, group: Group) -> float:
        if self.slow is None:
            raise ShardingError(
                f"a collective joins {group.outside} groups of devices, and the bandwidth between "
                "them is not known",
                code="AX492",
                where=self.instance.name,
                hint="the instance type states dcn_bandwidth_bytes",
            )
        return self.slow

    def _covered(self, size: int) -> float:
        """Share of a device's links that a group of ``size`` devices of the domain uses."""
        if not self.torus or size <= 1:
            return 1.0
        whole = math.log(size) / math.log(math.prod(self.torus))
        return min(max(whole, 1 / len(self.torus)), 1.0)

    def _hops(self, size: int) -> float:
        """Links that data cross on average from any device to any other of the group."""
        return max(self._ring(size) / 4, 1.0)

    def _ring(self, size: int) -> float:
        """Sum of the side lengths of the part of a torus that a group covers; 0 with switches."""
        if not self.torus:
            return 0.0
        dims = max(round(self._covered(size) * len(self.torus)), 1)
        return dims * size ** (1 / dims)

    def _latency(self, kind: CollectiveKind, group: Group) -> float:
        if kind == "permute":
            return OUTSIDE_HOP_SECONDS if group.outside > 1 else INSIDE_HOP_SECONDS
        # Rings of a torus go both ways; switches allow trees.
        inside = self._ring(group.inside) / 2 or math.log2(group.inside)
        once = inside * INSIDE_HOP_SECONDS * (group.inside > 1)
        once += math.log2(group.outside) * OUTSIDE_HOP_SECONDS
        return once * (2 if kind == "all_reduce" else 1)
