"""Linear cross-entropy where devices have different tokens: each sums up its own.

Left to a compiler, a loop over chunks gathers a sharded weight in every iteration and sums the
iteration's gradient over the devices: communication grows with the number of chunks. Here the mesh
axes that split tokens are handled by hand (``shard_map``): the weight is gathered once for each
pass, its gradient adds up on the device, and one sum goes over the devices.
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

__all__ = ["TokenShards", "token_shards"]

_Axes = tuple[str, ...]
_Losses = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], LinearCrossEntropy]


class TokenShards(NamedTuple):
    """How a call's arrays lie on the mesh axes that split its tokens.

    Attributes:
        mesh: The mesh; None inside a ``shard_map`` that handles other axes.
        tokens: Mesh axes of each dim of the targets.
        weight: Of these, those that split each dim of the weight.
    """

    mesh: Any
    tokens: tuple[_Axes, ...]
    weight: tuple[_Axes, _Axes]

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

        # Recomputed: the whole weight is not kept from one pass to the other.
        @partial(jax.checkpoint, prevent_cse=False)
        def local(hidden: jax.Array, weight_f32: jax.Array, *rest: jax.Array) -> LinearCrossEntropy:
            return losses(hidden, _gathered(self.weight, hidden.dtype, weight_f32), *rest)

        lead: Any = PartitionSpec(*(axes or None for axes in self.tokens))
        mapped: Any = jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(lead, PartitionSpec(*(axes or None for axes in self.weight)), lead, lead),
            out_specs=LinearCrossEntropy(lead, lead, lead),
            axis_names={axis for axes in self.tokens for axis in axes},
            check_vma=False,
        )
        return mapped(hidden, weight_f32, targets, seen)


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
    sizes = target.mesh.shape
    of_vocab = sharded_axes(target, "vocab")

    def dividing(size: int, axes: tuple[str, ...]) -> tuple[str, ...]:
        return axes if size % math.prod(sizes[a] for a in axes) == 0 else ()

    split = tuple(
        dividing(size, tuple(a for a in sharded_axes(target, name) if a not in of_vocab))
        for size, name in zip(tokens, ("batch", "seq"), strict=False)
    )
    by_hand = {axis for axes in split for axis in axes}
    if not by_hand:
        return None
    names = ("vocab", "embed") if layout == "vd" else ("embed", "vocab")
    first, second = (
        dividing(size, tuple(a for a in target.mesh_axes(name, table="param") if a in by_hand))
        for size, name in zip(weight, names, strict=True)
    )
    inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
    return TokenShards(None if inside else target.mesh, split, (first, second))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(places: tuple[_Axes, _Axes], dtype: Any, weight_f32: jax.Array) -> jax.Array:
    """The whole weight, rounded to ``dtype``; its gradient stays float32 and is scattered."""
    weight = weight_f32.astype(dtype)
    for dim, axes in enumerate(places):
        if axes:
            weight = lax.all_gather(weight, axes, axis=dim, tiled=True)
    return weight.astype(jnp.float32)


def _gathered_fwd(
    places: tuple[_Axes, _Axes], dtype: Any, weight_f32: jax.Array
) -> tuple[jax.Array, None]:
    return _gathered(places, dtype, weight_f32), None


def _gathered_bwd(
    places: tuple[_Axes, _Axes], dtype: Any, saved: None, grad: jax.Array
) -> tuple[jax.Array]:
    del dtype, saved
    for dim, axes in enumerate(places):
        if axes:
            grad = lax.psum_scatter(grad, axes, scatter_dimension=dim, tiled=True)
    return (grad,)


_gathered.defvjp(_gathered_fwd, _gathered_bwd)
