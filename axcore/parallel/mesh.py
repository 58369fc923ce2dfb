"""How devices are arranged: the mesh shape as a value, and the mesh built from it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from axcore.config import FrozenMapping
from axcore.errors import ShardingError, did_you_mean
from axcore.parallel.axes import MESH_AXES

__all__ = ["MeshShape", "abstract_mesh", "build_mesh"]


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes inside one slice; -1, at most once, takes the devices that are left.

    Attributes:
        pipeline: Pipeline stages.
        data: Replicas of the parameters.
        expert: Groups of experts.
        fsdp: Shards of the parameters that each replica gathers when needed.
        seq: Parts of the sequence.
        model: Parts of each tensor (tensor parallelism).
        across_slices: Sizes across slices (over the slow network), multiplied to those above;
            empty puts all slices on ``data``.

    Raises:
        ShardingError: A size is neither positive nor -1, or two are -1.

    Example:
        >>> MeshShape(data=-1, model=2).sizes(8)["data"]
        4
    """

    pipeline: int = 1
    data: int = 1
    expert: int = 1
    fsdp: int = 1
    seq: int = 1
    model: int = 1
    across_slices: Mapping[str, int] = dataclasses.field(default_factory=FrozenMapping[int])

    def __post_init__(self) -> None:
        across = FrozenMapping(self.across_slices)
        object.__setattr__(self, "across_slices", across)
        _check_sizes({name: getattr(self, name) for name in MESH_AXES}, "mesh_shape")
        _check_sizes(across, "mesh_shape.across_slices")

    @classmethod
    def of(cls, value: MeshShape | Mapping[str, int]) -> MeshShape:
        """Returns the shape that a mapping of axis name to size stands for.

        Args:
            value: A shape, or a mapping such as ``{"data": -1, "model": 2}``.

        Raises:
            ShardingError: An axis is unknown or a size is impossible.
        """
        if isinstance(value, MeshShape):
            return value
        sizes = dict(value)
        across = sizes.pop("across_slices", {})
        _check_sizes(sizes, "mesh_shape")
        return cls(**sizes, across_slices=across)  # pyright: ignore[reportArgumentType]

    def sizes(self, num_devices: int, num_slices: int = 1) -> dict[str, int]:
        """Returns mesh axis -> size over all slices, in mesh order.

        Args:
            num_devices: Devices in all.
            num_slices: Slices they are in, all of one size.

        Raises:
            ShardingError: The sizes do not multiply to the number of devices.
        """
        inside, across = self.split(num_devices, num_slices)
        return {name: inside[name] * across[name] for name in MESH_AXES}

    def split(self, num_devices: int, num_slices: int = 1) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the sizes inside a slice and across slices; see :meth:`sizes`."""
        if num_devices < 1 or num_slices < 1 or num_devices % num_slices:
            raise ShardingError(
                f"{num_devices} devices do not divide into {num_slices} slices", code="AX452"
            )
        inside = {name: getattr(self, name) for name in MESH_AXES}
        across = dict.fromkeys(MESH_AXES, 1) | dict(self.across_slices or {"data": -1})
        return (
            _fill(inside, num_devices // num_slices, "mesh_shape", "devices per slice"),
            _fill(across, num_slices, "mesh_shape.across_slices", "slices"),
        )

    def describe(self) -> str:
        """Returns the sizes that are not 1, such as ``data=-1 model=2``."""
        return _text({name: getattr(self, name) for name in MESH_AXES})


def _text(sizes: Mapping[str, int]) -> str:
    return " ".join(f"{name}={size}" for name, size in sizes.items() if size != 1) or "data=1"


def _check_sizes(sizes: Mapping[str, int], where: str) -> None:
    for name, size in sizes.items():
        if name not in MESH_AXES:
            raise ShardingError(
                f"unknown mesh axis {name!r}; known: {', '.join(MESH_AXES)}",
                code="AX453",
                where=where,
                hint=did_you_mean(name, MESH_AXES) or None,
            )
        if type(size) is not int or (size < 1 and size != -1):
            raise ShardingError(
                f"mesh axis {name!r} has size {size!r}, expected a positive int or -1 (the rest)",
                code="AX453",
                where=where,
            )
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ShardingError(
            f"mesh axes {' and '.join(map(repr, rest))} are all -1: only one can take the rest",
            code="AX453",
            where=where,
        )


def _fill(sizes: dict[str, int], total: int, where: str, what: str) -> dict[str, int]:
    """Puts the rest in place of -1 and checks the product."""
    fixed = math.prod(size for size in sizes.values() if size != -1)
    rest = [name for name, size in sizes.items() if size == -1]
    if rest and total % fixed == 0:
        return sizes | {rest[0]: total // fixed}
    if not rest and fixed == total:
        return dict(sizes)
    expected = f"a divisor of {total}" if rest else f"exactly {total}"
    near = [_text(s) for s in _nearest(sizes, total)]
    raise ShardingError(
        f"mesh {_text(sizes)}: its axes multiply to {fixed}, expected {expected} ({what})",
        code="AX452",
        where=where,
        hint=f"nearest that work: {'; '.join(near)}"
        if near
        else f"use data=-1, or a machine of {fixed} {what}",
    )


def _nearest(sizes: dict[str, int], total: int) -> list[dict[str, int]]:
    """Returns shapes that fit and differ in one axis, the least changed first."""
    found: list[tuple[float, dict[str, int]]] = []
    has_rest = -1 in sizes.values()
    for name, size in sizes.items():
        if size == -1:
            continue
        for new in range(1, total + 1):
            if total % new or new == size:
                continue
            changed = sizes | {name: new}
            product = math.prod(s for s in changed.values() if s != -1)
            if total % product == 0 if has_rest else product == total:
                # An axis that was not asked for is the last to be offered.
                distance = abs(math.log(new / size)) + (10.0 if size == 1 else 0.0)
                found.append((distance, changed))
    found.sort(key=lambda pair: pair[0])
    wanted = [shape for distance, shape in found if distance < 10] or [s for _, s in found]
    return wanted[:3]


def abstract_mesh(
    shape: MeshShape | Mapping[str, int], num_devices: int, num_slices: int = 1
) -> AbstractMesh:
    """Returns the mesh of a shape without its devices.

    Args:
        shape: Sizes of the axes; -1 takes the rest.
        num_devices: Devices in all.
        num_slices: Slices they are in.

    Raises:
        ShardingError: The sizes do not multiply to the number of devices.
    """
    sizes = MeshShape.of(shape).sizes(num_devices, num_slices)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def build_mesh(
    shape: MeshShape,
    devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
    *,
    num_slices: int = 1,
) -> Mesh:
    """Arranges devices in the mesh axes ``pipeline, data, expert, fsdp, seq, model``.

    Axis types are ``Auto`` (``jax.make_mesh`` defaults to ``Explicit``). On hardware with a
    topology JAX places neighbours, and divides a dim of it among mesh axes only where no whole dims
    give the sizes (2 x 512 of 8 x 8 x 16); across slices the outer part of each axis is over the
    slow network. Devices without slices (simulated ones) are grouped in the order given.

    Args:
        shape: Sizes of the axes.
        devices: All devices, of all processes.
        num_slices: Slices that they are in.

    Raises:
        ShardingError: The sizes do not multiply to the number of devices.
    """
    inside, across = shape.split(len(devices), num_slices)
    types = (AxisType.Auto,) * len(MESH_AXES)
    inner, outer = tuple(inside.values()), tuple(across.values())
    found = {getattr(device, "slice_index", None) for device in devices}
    if num_slices == 1:
        grid = mesh_utils.create_device_mesh(inner, devices, allow_split_physical_axes=True)
    elif len(found) == num_slices and None not in found:
        grid = mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, allow_split_physical_axes=True
        )
    else:
        # (slices..., inside...) -> one axis each, the slice's part outermost.
        grid = np.array(devices, dtype=object).reshape(*outer, *inner)
        n = len(MESH_AXES)
        grid = grid.transpose([axis for i in range(n) for axis in (i, n + i)])
        grid = grid.reshape([o * i for o, i in zip(outer, inner, strict=True)])
    return Mesh(grid, MESH_AXES, axis_types=types)
