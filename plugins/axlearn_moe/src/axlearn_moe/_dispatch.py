"""Dispatch: how tokens get to their experts and back."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from axcore.errors import ModuleError, ShardingError
from axcore.layers.base import Layer
from axcore.module import no_context
from axlearn_moe._exchange import Exchange, exchanged
from axlearn_moe._experts import BaseExperts
from axlearn_moe._routing import Routing

__all__ = ["BaseDispatch", "EinsumDispatch", "GroupedDispatch"]

# Platforms whose compiler does not know ``jax.lax.ragged_all_to_all``.
_WITHOUT_RAGGED = frozenset({"cpu"})


class BaseDispatch(Layer):
    """Role of the dispatch: runs the experts on the tokens that the routing assigns to them."""

    class Config(Layer.Config):
        """No fields."""

    @abc.abstractmethod
    def forward(
        self, x: jax.Array, routing: Routing, experts: BaseExperts, capacity: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the sum of the experts' results, times their gates.

        Args:
            x: (batch, seq, input_dim).
            routing: What goes where; what exceeds the capacity is invalid in it.
            experts: The experts.
            capacity: Most assignments that an expert has in a row; None: no limit.

        Returns:
            (batch, seq, input_dim), and the float32 number of valid assignments that found no room
            in a buffer.
        """

    @no_context
    def check(self, experts: BaseExperts) -> None:
        """Raises ModuleError if it cannot run these experts."""
        del experts


class EinsumDispatch(BaseDispatch):
    """One-hot tensors (batch, seq, experts, capacity) say who goes where: the reference.

    Simple, regular and large. GShard, arXiv:2006.16668, algorithm 1 and section 3.2. Without a
    capacity each expert has room for a whole row.
    """

    class Config(BaseDispatch.Config):
        """No fields."""

    def forward(
        self, x: jax.Array, routing: Routing, experts: BaseExperts, capacity: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the experts on (batch, seq, input_dim); see the role."""
        seq = x.shape[1]
        room = seq if capacity is None else capacity
        there, back = _one_hots(routing, seq, room)
        rows = jnp.einsum("bsec,bsd->ebcd", there.astype(x.dtype), x)
        rows = self._constrain(rows, "experts", "expert_batch", None, None)
        num, batch, _, dim = rows.shape
        made = experts(rows.reshape(num, batch * room, dim))
        made = self._constrain(
            made.reshape(num, batch, room, dim), "experts", "expert_batch", None, None
        )
        y = jnp.einsum("bsec,ebcd->bsd", back, made.astype(jnp.float32))
        y = self._constrain(y, "batch", "seq", None)
        return y.astype(self.compute_dtype), jnp.zeros((), jnp.float32)


def _one_hots(routing: Routing, seq: int, room: int) -> tuple[jax.Array, jax.Array]:
    """Returns float32 (batch, seq, experts, room): where each token goes, and with what gate."""
    num = routing.num_experts
    valid = routing.valid.astype(jnp.float32)
    if routing.tokens is not None:  # (batch, experts, room)
        there = jax.nn.one_hot(routing.tokens, seq) * valid[..., None]
        back = there * routing.gates[..., None]
        return jnp.einsum("becs->bsec", there), jnp.einsum("becs->bsec", back)
    expert = jax.nn.one_hot(routing.experts, num) * valid[..., None]
    batch, _, choices, _ = expert.shape
    # First choices of all tokens come before second ones.
    by_priority = jnp.swapaxes(expert, 1, 2).reshape(batch, choices * seq, num)
    before = jnp.cumsum(by_priority, axis=1) - by_priority
    before = jnp.swapaxes(before.reshape(batch, choices, seq, num), 1, 2)
    place = jnp.sum(before * expert, axis=-1).astype(jnp.int32)
    slot = jax.nn.one_hot(place, room)
    there = jnp.einsum("bske,bskc->bsec", expert, slot)
    back = jnp.einsum("bske,bskc,bsk->bsec", expert, slot, routing.gates)
    return there, back


@dataclass(frozen=True)
class _Layout:
    """Mesh axes that split a mixture's dims, and the sizes of all of them.

    Attributes:
        batch: Axes of rows.
        seq: Axes of tokens within a row.
        experts: Axes of experts.
        hidden: Axes of an expert's hidden units.
        sizes: Devices along each axis in the others.
    """

    batch: tuple[str, ...]
    seq: tuple[str, ...]
    experts: tuple[str, ...]
    hidden: tuple[str, ...]
    sizes: Mapping[str, int]


class GroupedDispatch(BaseDispatch):
    """Sorts assignments by expert and multiplies each expert's rows as one group; drops nothing.

    No array has a dim of experts beside one of tokens. MegaBlocks, arXiv:2211.15841.

    Expert parallel: where the rules split ``experts`` over mesh axes, tokens travel to their
    experts and back inside a ``shard_map``. Over axes that split the tokens too (``batch`` lies on
    ``data, expert, fsdp`` by default) that is an all-to-all; over others, where every device has
    all tokens, each adds up what its experts make. Attention and experts may thus be split over
    different axes.
    """

    class Config(BaseDispatch.Config):
        """How tokens travel between devices."""

        # `all_to_all` sends a buffer of one size to each device; `ragged` sends what there is.
        exchange: Literal["auto", "all_to_all", "ragged"] = "auto"
        # Room for the tokens that a device gets, as a multiple of its equal share; what exceeds it
        # is dropped and reported. None: room for the worst case.
        buffer_factor: float | None = None

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        if cfg.buffer_factor is not None and not 1 <= cfg.buffer_factor < math.inf:
            raise ModuleError(
                f"buffer_factor is {cfg.buffer_factor}, expected a finite number of at least 1: "
                "below, not even equal loads would fit",
                code="AX912",
                where=f"{self.config_path}.buffer_factor",
                hint="None has room for all, 2.0 for twice the equal share",
            )

    @no_context
    def check(self, experts: BaseExperts) -> None:
        """Raises ModuleError if the experts' products do not multiply groups of rows."""
        if not getattr(experts, "takes_groups", True):
            raise ModuleError(
                f"{type(self).__name__} multiplies by groups of rows, which the `dot` of "
                f"{experts.config_path or experts.path} does not know",
                code="AX916",
                where=self.config_path or self.path,
                hint="use dispatch=EinsumDispatch.Config(), or a product that does, such as the "
                "plain one, int8 or fp8",
            )

    def forward(
        self, x: jax.Array, routing: Routing, experts: BaseExperts, capacity: int | None
    ) -> tuple[jax.Array, jax.Array]:
        """Runs the experts on (batch, seq, input_dim); see the role."""
        target = self._context.target
        weights = experts.weights()
        arrays = (
            x.astype(self.compute_dtype),
            *(routing.experts, routing.gates, routing.valid, routing.tokens),
        )
        inside = bool(jax.sharding.get_abstract_mesh().manual_axes)
        layout = self._layout(x, routing, experts)
        run = functools.partial(
            exchanged, self._plan(layout, routing.num_experts, capacity), experts.grouped
        )
        if math.prod(layout.sizes.values()) == 1:
            return run(*arrays, weights)
        rows = PartitionSpec(layout.batch or None, layout.seq or None)
        mapped = jax.shard_map(
            run,
            mesh=None if inside else target.mesh,
            in_specs=(*[rows] * len(arrays), _weight_specs(layout, experts, weights)),
            out_specs=(rows, PartitionSpec()),
            axis_names=set(layout.sizes),
            check_vma=False,  # kernels in it do not say what they vary over
        )
        return mapped(*arrays, weights)

    def _layout(self, x: jax.Array, routing: Routing, experts: BaseExperts) -> _Layout:
        """Returns what the rules split, over axes that no enclosing ``shard_map`` handles."""
        target = self._context.target

        def axes(name: str, size: int) -> tuple[str, ...]:
            if target.mesh is None or target.mesh.size == 1:
                return ()
            return target.mesh_axes(name, size)

        batch = axes("batch", x.shape[0])
        # Experts that choose do so in whole rows.
        seq = axes("seq", x.shape[1]) if routing.tokens is None else ()
        over_experts = axes("experts", routing.num_experts)
        hidden = axes("expert_mlp", experts.cfg.hidden_dim)
        if clash := sorted({*batch, *seq} & {*hidden}):
            raise ShardingError(
                f"mesh axes {clash} split both the tokens and the hidden units of an expert",
                code="AX911",
                where=self.path,
                hint="give expert_mlp=() in activation_rules and param_rules, or other axes",
            )
        mesh: Any = target.mesh
        sizes = {a: int(mesh.shape[a]) for a in (*batch, *seq, *over_experts, *hidden)}
        return _Layout(batch, seq, over_experts, hidden, sizes)

    def _plan(self, layout: _Layout, num_experts: int, capacity: int | None) -> Exchange:
        ragged = self.cfg.exchange == "ragged" or (
            self.cfg.exchange == "auto" and self._context.target.platform in ("tpu", "gpu", "cuda")
        )
        plan = Exchange(
            num_experts=num_experts,
            expert_axes=tuple((a, layout.sizes[a]) for a in layout.experts),
            token_axes=(*layout.batch, *layout.seq),
            hidden_axes=layout.hidden,
            ragged=ragged,
            capacity=capacity,
            buffer_factor=self.cfg.buffer_factor,
        )
        if ragged and self._context.target.platform in _WITHOUT_RAGGED and plan.num_peers > 1:
            raise ShardingError(
                f"{self._context.target.platform} has no ragged all-to-all (tried with jaxlib "
                f"0.10.2), and tokens travel among {plan.num_peers} devices",
                code="AX976",
                where=f"{self.config_path}.exchange",
                hint="exchange='auto' takes it where there is one",
            )
        return plan


def _weight_specs(
    layout: _Layout, experts: BaseExperts, weights: Mapping[str, jax.Array]
) -> dict[str, PartitionSpec]:
    """Returns how each of the experts' weights is split.

    Raises:
        ShardingError: One is stored in blocks of hidden units that do not divide.
    """
    places = {"experts": layout.experts, "expert_mlp": layout.hidden}
    specs = {}
    for name, axes in experts.weight_axes.items():
        over = [places.get(axis or "") or None for axis in axes]
        for size, axes_of_dim in zip(weights[name].shape, over, strict=True):
            parts = math.prod(layout.sizes[axis] for axis in axes_of_dim or ())
            if size % parts:
                raise ShardingError(
                    f"{name} has {size} blocks of an expert's hidden units, which do not divide "
                    f"into {parts} parts ({', '.join(axes_of_dim or ())})",
                    code="AX951",
                    where=experts.path,
                    hint="store it with a smaller group, such as "
                    "int4-weights:options={'group':16}, or as int8",
                )
        specs[name] = PartitionSpec(*over)
    return specs
