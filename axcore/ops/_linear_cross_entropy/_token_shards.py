"""Linear cross-entropy where devices have different tokens: each sums up its own.

Left to a compiler, a loop over chunks gathers a sharded weight in every iteration and sums the
iteration's gradient over the devices: communication grows with the number of chunks. Here the mesh
axes that split tokens are handled by hand (``shard_map``): the weight is gathered once for each
pass, its gradient adds up on the device, and one sum goes over the devices.

Between the two, each device's weight is a row of an array with one row for each device, (n, V, D).
So the loss can leave other mesh axes, such as those of the vocabulary, to the compiler, while what
communicates handles them all: a compiler makes dims of its own whole where only some axes are
handled by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from axcore.ops._linear_cross_entropy._contract import LinearCrossEntropy
from axcore.ops._select import ambient_target, sharded_axes
from axcore.ops._shards import auto_axes

__all__ = ["TokenShards", "token_shards"]

_Axes = tuple[str, ...]
_Losses = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], LinearCrossEntropy]


class TokenShards(NamedTuple):
    """How a call's arrays lie on the mesh.

    Attributes:
        mesh: The mesh; None inside a ``shard_map`` that handles other axes.
        axes: All mesh axes that are not handled yet.
        tokens: Mesh axes of each dim of the targets.
        gathered: Of these, those that split each dim of the weight.
        kept: Other mesh axes that split each dim of the weight.
    """

    mesh: Any
    axes: frozenset[str]
    tokens: tuple[_Axes, ...]
    gathered: tuple[_Axes, _Axes]
    kept: tuple[_Axes, _Axes]

    @property
    def by_hand(self) -> _Axes:
        """The mesh axes that split tokens."""
        return tuple(axis for axes in self.tokens for axis in axes)

    def run(
        self,
        losses: _Losses,
        hidden: jax.Array,
        weight_f32: jax.Array,
        targets: jax.Array,
        seen: jax.Array,
    ) -> LinearCrossEntropy:
        """Runs ``losses`` on each device's tokens and the whole weight.

        Args:
            losses: A function of the arrays below, of any number of tokens.
            hidden: (..., D).
            weight_f32: (V, D) or (D, V), float32; multiplied in hidden's dtype.
            targets: (...).
            seen: (...) bool.
        """
        lead: Any = _spec(self.tokens)

        def local(
            hidden: jax.Array, copies: jax.Array, targets: jax.Array, seen: jax.Array
        ) -> LinearCrossEntropy:
            return losses(hidden, copies[0], targets, seen)

        mapped: Any = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(lead, PartitionSpec(self.by_hand), lead, lead),
            out_specs=LinearCrossEntropy(lead, lead, lead),
            axis_names=set(self.by_hand),
            check_vma=False,
        )

        # Recomputed: the whole weight is not kept from one pass to the other.
        @partial(jax.checkpoint, prevent_cse=False)
        def gathered_and_run(hidden: jax.Array, weight: jax.Array, *rest: jax.Array) -> Any:
            return mapped(hidden, _copies(self, hidden.dtype, weight), *rest)

        return gathered_and_run(hidden, weight_f32, targets, seen)

    def everywhere(self, fn: Callable[[jax.Array], jax.Array], inside: Any, outside: Any) -> Any:
        """Returns ``fn`` of one device's part, from one spec to another."""
        return jax.shard_map(
            fn,
            mesh=self.mesh,
            in_specs=(inside,),
            out_specs=outside,
            axis_names=set(self.axes),
            check_vma=False,
        )

    @property
    def stored(self) -> PartitionSpec:
        """How the weight lies."""
        return _spec(tuple((*k, *g) for k, g in zip(self.kept, self.gathered, strict=True)))

    @property
    def copied(self) -> PartitionSpec:
        """How the devices' weights lie, (n, ...)."""
        return _spec((self.by_hand, *self.kept))


def token_shards(
    tokens: tuple[int, ...], weight: tuple[int, ...], layout: str
) -> TokenShards | None:
    """Returns how the running call's tokens are split, or None if they are not.

    Axes that split the vocabulary too are left to the compiler, as are dims that do not divide.

    Args:
        tokens: Shape of the targets.
        weight: Shape of the weight.
        layout: ``vd`` or ``dv``.
    """
    target = ambient_target()
    if target is None or target.mesh is None:
        return None
    sizes, free = target.mesh.shape, auto_axes(target)
    of_vocab = sharded_axes(target, "vocab")

    def dividing(size: int, axes: _Axes) -> _Axes:
        return axes if size % math.prod(sizes[a] for a in axes) == 0 else ()

    split = tuple(
        dividing(size, tuple(a for a in sharded_axes(target, name) if a not in of_vocab))
        for size, name in zip(tokens, ("batch", "seq"), strict=False)
    )
    by_hand = {axis for axes in split for axis in axes}
    if not by_hand:
        return None
    names = ("vocab", "embed") if layout == "vd" else ("embed", "vocab")
    stored = [
        dividing(size, tuple(a for a in target.mesh_axes(name, table="param") if a in free))
        for size, name in zip(weight, names, strict=True)
    ]
    gathered, kept = (
        (tuple(a for a in stored[0] if (a in by_hand) is whole),
         tuple(a for a in stored[1] if (a in by_hand) is whole))
        for whole in (True, False)
    )  # fmt: skip
    inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
    mesh = None if inside else target.mesh
    return TokenShards(mesh, frozenset(free), split, gathered, kept)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _copies(shards: TokenShards, dtype: Any, weight_f32: jax.Array) -> jax.Array:
    """Each device's weight, (n, ...), rounded to ``dtype``; the gradient stays float32."""

    def gather(weight: jax.Array) -> jax.Array:
        weight = weight.astype(dtype)
        for dim, axes in enumerate(shards.gathered):
            if axes:
                weight = lax.all_gather(weight, axes, axis=dim, tiled=True)
        return weight.astype(jnp.float32)[None]

    return shards.everywhere(gather, shards.stored, shards.copied)(weight_f32)


def _copies_fwd(shards: TokenShards, dtype: Any, weight_f32: jax.Array) -> tuple[jax.Array, None]:
    return _copies(shards, dtype, weight_f32), None


def _copies_bwd(shards: TokenShards, dtype: Any, saved: None, grad: jax.Array) -> tuple[jax.Array]:
    del dtype, saved
    rest = tuple(a for a in shards.by_hand if not any(a in axes for axes in shards.gathered))

    def scatter(grad: jax.Array) -> jax.Array:
        grad = grad[0]
        for dim, axes in enumerate(shards.gathered):
            if axes:
                grad = lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
        grad = lax.psum(grad, rest) if rest else grad
        # libtpu 0.0.42 fails on a sum over devices that a loop over microbatches adds up.
        return lax.optimization_barrier(grad)

    return (shards.everywhere(scatter, shards.copied, shards.stored)(grad),)


_copies.defvjp(_copies_fwd, _copies_bwd)


def _spec(dims: tuple[_Axes, ...]) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in dims))
