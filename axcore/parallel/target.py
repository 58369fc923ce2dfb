"""What a program is built for: instance, mesh, rules and acceptable kernels in one value."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axcore.config import FrozenMapping
from axcore.errors import ShardingError
from axcore.parallel.rules import RuleTable, ShardingRules, TableName
from axcore.parallel.sharding import named_shardings, partition_spec
from axcore.plugins import Instance

__all__ = ["ProgramTarget"]


@dataclass(frozen=True)
class ProgramTarget:
    """Implements :class:`axcore.context.Target` for a mesh of devices.

    Attributes:
        instance: Instance name.
        platform: JAX platform of the target, never of the host that compiles.
        mesh: The mesh, or None for one device without sharding.
        rules: The sharding rules.
        kernels: Op -> acceptable implementations, best first.
        fallbacks: Ops that may fall back to the reference when none of those serves a call.
        stand_ins: ``OP.IMPLEMENTATION`` -> the implementation that is traced in its place, for a
            compiler that cannot build the former.
        options: What else changes the traced program, such as ``{"quantization": "fp8"}``.
    """

    instance: str
    platform: str
    mesh: Mesh | None = None
    rules: ShardingRules = field(default_factory=ShardingRules)
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=FrozenMapping[tuple[str, ...]])
    fallbacks: frozenset[str] = frozenset()
    stand_ins: Mapping[str, str] = field(default_factory=FrozenMapping[str])
    options: Mapping[str, str] = field(default_factory=FrozenMapping[str])

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", FrozenMapping(self.kernels))
        object.__setattr__(self, "fallbacks", frozenset(self.fallbacks))
        object.__setattr__(self, "stand_ins", FrozenMapping(self.stand_ins))
        object.__setattr__(self, "options", FrozenMapping(self.options))
        self.rules.check()

    @classmethod
    def for_instance(
        cls,
        instance: Instance,
        mesh: Mesh | None,
        rules: ShardingRules | None = None,
        *,
        kernels: Mapping[str, tuple[str, ...]] | None = None,
        fallbacks: Iterable[str] = (),
        stand_ins: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
    ) -> ProgramTarget:
        """Returns the target of a mesh on an instance."""
        return cls(
            instance=instance.name,
            platform=instance.platform,
            mesh=mesh,
            rules=rules or ShardingRules(),
            kernels=kernels or {},
            fallbacks=frozenset(fallbacks),
            stand_ins=stand_ins or {},
            options=options or {},
        )

    @functools.cached_property
    def _tables(self) -> dict[TableName, RuleTable]:
        names: tuple[TableName, ...] = ("param", "optimizer", "activation", "cache")
        return {name: self.rules.table(name) for name in names}

    def spec(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        table: TableName = "activation",
        name: str = "activation",
    ) -> PartitionSpec:
        """Returns how an array of this shape and these logical axes is split.

        Raises:
            ShardingError: See :func:`axcore.parallel.partition_spec`.
        """
        return partition_spec(shape, axes, self.mesh or _NO_MESH, self._tables[table], name=name)

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """Constrains an activation to the sharding of its logical axes.

        Names and sizes are checked on every mesh; on one device nothing else happens. Inside
        ``shard_map`` the mesh axes that it handles are left out.

        Args:
            x: Activation of any shape.
            axes: Logical axis, or None for a dim that is whole on every device, for each dim.

        Raises:
            ShardingError: See :func:`axcore.parallel.partition_spec`.
        """
        manual = _manual_axes()
        if manual:
            # Sizes in here are already divided by the axes that are handled.
            mesh = _without(self.mesh, manual)
            table = self._tables["activation"]
            spec = partition_spec(x.shape, _fit(x, axes), mesh, table, name="activation")
        else:
            spec = self.spec(x.shape, axes)
        if self.mesh is None or self.mesh.size == 1:
            return x
        if manual:
            # Only the enclosing shard_map's abstract mesh knows which axes are taken.
            return x if not any(spec) else jax.lax.with_sharding_constraint(x, spec)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def mesh_axes(
        self, logical_axis: str, size: int | None = None, *, table: TableName = "activation"
    ) -> tuple[str, ...]:
        """Returns the mesh axes, of more than one device, over which a logical axis is split.

        Inside ``shard_map`` the mesh axes that it handles are left out, as in :meth:`constrain`.

        Args:
            logical_axis: The axis.
            size: Size of the dim, which decides between alternatives; None takes the first.
            table: Of activations, or of parameters.

        Raises:
            ShardingError: The axis is unknown or the size does not divide.
        """
        manual = _manual_axes()
        mesh = _without(self.mesh, manual) if manual else self.mesh or _NO_MESH
        spec = partition_spec(
            (size or 0,), (logical_axis,), mesh, self._tables[table], name="activation"
        )
        entry = spec[0]
        return (entry,) if isinstance(entry, str) else tuple(entry or ())

    def shardings(self, specs: object, *, table: TableName = "param") -> object:
        """Returns the shardings of a tree of parameter specs.

        Raises:
            ShardingError: The target has no mesh; see :func:`axcore.parallel.named_shardings`.
        """
        if self.mesh is None:
            raise ShardingError(
                f"target {self.instance!r} has no mesh", hint="build one with build_mesh"
            )
        return named_shardings(specs, self.mesh, self.rules, table=table)

    def digest(self) -> str:
        """Returns a short text that differs whenever the traced program may differ."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        mesh = None
        if self.mesh is not None:
            # An abstract mesh, for tracing alone, has no devices.
            found = self.mesh.devices.flat if isinstance(self.mesh, Mesh) else ()
            devices = ",".join(str(d.id) for d in found)
            mesh = f"{tuple(self.mesh.shape.items())}:{self.mesh.axis_types}:{devices}"
        # Sorted: mappings are equal in any order.
        mappings = [vars(self.rules)[n] for n in sorted(vars(self.rules))]
        mappings += [self.kernels, self.stand_ins, self.options]
        parts = (
            (self.instance, self.platform, mesh, sorted(self.fallbacks)),
            *(sorted(m.items()) for m in mappings),
        )
        text = "\n".join(map(repr, parts))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Sizes:
    """Stands for a mesh where only its sizes are asked for; an absent axis has size 1."""

    shape: Mapping[str, int] = FrozenMapping[int]()


_NO_MESH: Mesh = _Sizes()  # pyright: ignore[reportAssignmentType]


def _manual_axes() -> frozenset[str]:
    """Returns the mesh axes that an enclosing ``shard_map`` handles."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def _fit(x: jax.Array, axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    if len(axes) != x.ndim:
        raise ShardingError(
            f"got {len(axes)} axis names {axes} for shape {x.shape}",
            code="AX456",
            hint="give one logical axis name, or None, for each dim",
        )
    return axes


def _without(mesh: Mesh | None, manual: frozenset[str]) -> Mesh:
    """Returns the sizes of the mesh axes that no enclosing ``shard_map`` handles."""
    sizes = {} if mesh is None else dict(mesh.shape)
    left = _Sizes({axis: size for axis, size in sizes.items() if axis not in manual})
    return left  # pyright: ignore[reportReturnType]
