"""What one device does in a grouped dispatch: sort, send, multiply, send back, add up.

Everything here is a function of a device's own arrays. Shapes in comments: T tokens and N
assignments of this device, L experts on one device, P devices that tokens travel among, D the
model's dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from axlearn_moe._permute import gather_tokens, inverse, permute_rows

__all__ = ["Exchange", "exchanged"]

Weights = Mapping[str, jax.Array]
Grouped = Callable[..., jax.Array]


@dataclass(frozen=True)
class Exchange:
    """Who has which experts.

    Attributes:
        num_experts: Experts in all.
        expert_axes: Mesh axes that they are split over, with their sizes.
        token_axes: Mesh axes that tokens are split over.
        hidden_axes: Mesh axes that an expert's hidden units are split over.
        ragged: Whether devices send what there is, instead of buffers of one size.
        capacity: Most assignments that an expert has in a row; None: no limit.
        buffer_factor: Room for what arrives, as a multiple of the equal share; None: for all.
    """

    num_experts: int
    expert_axes: tuple[tuple[str, int], ...]
    token_axes: tuple[str, ...]
    hidden_axes: tuple[str, ...]
    ragged: bool
    capacity: int | None
    buffer_factor: float | None

    @property
    def num_local(self) -> int:
        """Experts of one device."""
        return self.num_experts // math.prod(size for _, size in self.expert_axes)

    @property
    def travel_axes(self) -> tuple[str, ...]:
        """Axes over which tokens travel: their experts are elsewhere."""
        return tuple(axis for axis, _ in self.expert_axes if axis in self.token_axes)

    @property
    def num_peers(self) -> int:
        """Devices among which tokens travel."""
        return math.prod(size for axis, size in self.expert_axes if axis in self.token_axes)

    @property
    def sum_axes(self) -> tuple[str, ...]:
        """Axes over which each device makes a part of every token's result."""
        shared = (axis for axis, _ in self.expert_axes if axis not in self.token_axes)
        return (*shared, *self.hidden_axes)

    def peer_and_share(self, experts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns which peer has each expert, and whether it is in this device's share.

        Experts are split over ``expert_axes``, the first one outermost.
        """
        at = experts // self.num_local
        peer = jnp.zeros_like(at)
        mine = jnp.ones(at.shape, bool)
        left = math.prod(size for _, size in self.expert_axes)
        for axis, size in self.expert_axes:
            left //= size
            index = at // left % size
            if axis in self.token_axes:
                peer = peer * size + index
            else:
                mine &= index == jax.lax.axis_index(axis)
        return peer, mine


def exchanged(
    plan: Exchange,
    grouped: Grouped,
    x: jax.Array,
    experts: jax.Array,
    gates: jax.Array,
    valid: jax.Array,
    tokens: jax.Array | None,
    weights: Weights,
) -> tuple[jax.Array, jax.Array]:
    """Returns this device's results (its rows, its seq, D) and how many found no room, in all.

    Args:
        plan: Who has which experts.
        grouped: ``BaseExperts.grouped``.
        x: (rows, seq, D).
        experts: (rows, A, K); this and the next are as in ``Routing``.
        gates: (rows, A, K).
        valid: (rows, A, K).
        tokens: (rows, A, K) or None.
        weights: This device's part of them.
    """
    num_rows, seq, dim = x.shape
    flat = x.reshape(num_rows * seq, dim)
    peer, mine = plan.peer_and_share(experts)
    num_slots = plan.num_peers * plan.num_local
    # Peer by peer, and expert by expert within one; what goes nowhere comes last.
    slot = jnp.where(valid & mine, peer * plan.num_local + experts % plan.num_local, num_slots)
    slot = slot.reshape(-1)
    order = jnp.argsort(slot, stable=True)
    # A token is at an expert once, so this many rows hold all that goes anywhere.
    order = order[: flat.shape[0] * num_slots]
    slot = slot[order]
    starts = jnp.searchsorted(slot, jnp.arange(num_slots + 1)).astype(jnp.int32)
    choices = experts.shape[-1]
    if tokens is None:
        source = order // choices
    else:
        row = order // (experts.size // num_rows)
        source = row * seq + tokens.reshape(-1)[order]
    is_full = tokens is None and order.size == experts.size
    places = inverse(order) if is_full else order
    rows: Any = gather_tokens(flat, order, places, choices) if is_full else flat[source]

    is_first = jnp.array(True)
    for axis in plan.hidden_axes:
        is_first &= jax.lax.axis_index(axis) == 0
    run = functools.partial(grouped, weights, is_first=is_first)
    if plan.num_peers == 1:
        made, lost = run(rows, jnp.diff(starts)), jnp.zeros((), jnp.float32)
    else:
        send = _ragged if plan.ragged else _fixed
        made, lost = send(plan, run, rows, slot, starts, _room(plan, x.shape, experts.size))

    made = jnp.where((slot < num_slots)[:, None], made, 0)
    if is_full:
        by_token = permute_rows(made, places, order).reshape(flat.shape[0], choices, dim)
        gates = gates.reshape(flat.shape[0], choices)
        y = jnp.einsum("tkd,tk->td", by_token, gates, preferred_element_type=jnp.float32)
    else:
        weighted = made.astype(jnp.float32) * gates.reshape(-1)[order][:, None]
        y = jnp.zeros(flat.shape, jnp.float32).at[source].add(weighted)
    y = y.astype(x.dtype)
    if plan.sum_axes:
        y = jax.lax.psum(y, plan.sum_axes)
    if plan.buffer_factor is not None and plan.num_peers > 1:
        over = tuple({*plan.token_axes, *(axis for axis, _ in plan.expert_axes)})
        lost = jax.lax.psum(lost, over)
    return y.reshape(x.shape), lost


def _room(plan: Exchange, shape: tuple[int, ...], num_assignments: int) -> int:
    """Returns the most assignments that one device may send to another."""
    rows, seq, _ = shape
    worst = min(num_assignments, rows * seq * plan.num_local)
    if plan.capacity is not None:
        worst = min(worst, rows * plan.capacity * plan.num_local)
    if plan.buffer_factor is not None:
        worst = min(worst, math.ceil(plan.buffer_factor * num_assignments / plan.num_peers))
    return max(worst, 1)


def _fixed(
    plan: Exchange,
    run: Grouped,
    rows: jax.Array,
    slot: jax.Array,
    starts: jax.Array,
    room: int,
) -> tuple[jax.Array, jax.Array]:
    """Sends ``room`` rows to each peer, runs this device's experts, and sends the results back."""
    peers, local, dim = plan.num_peers, plan.num_local, rows.shape[1]
    exchange = functools.partial(
        jax.lax.all_to_all, axis_name=plan.travel_axes, split_axis=0, concat_axis=0, tiled=True
    )
    begins = starts[::local][:peers]  # (P,)
    ends = jnp.cumsum(jnp.diff(starts).reshape(peers, local), axis=1)  # (P, L)
    ends = jnp.minimum(ends, room)
    counts = jnp.diff(ends, axis=1, prepend=0)
    at = begins[:, None] + jnp.arange(room)  # (P, room)
    is_used = jnp.arange(room) < ends[:, -1:]
    sent = jnp.where(is_used[..., None], rows[jnp.minimum(at, rows.shape[0] - 1)], 0)
    got = exchange(sent)
    arrived = exchange(counts)

    upto = jnp.cumsum(arrived, axis=1)
    expert = jax.vmap(lambda e: jnp.searchsorted(e, jnp.arange(room), side="right"))(upto)
    order = jnp.argsort(expert.reshape(-1), stable=True)
    places = inverse(order)
    made = run(
        permute_rows(got.reshape(peers * room, dim), order, places), jnp.sum(arrived, axis=0)
    )
    back = exchange(permute_rows(made, places, order).reshape(peers, room, dim))

    peer = jnp.minimum(slot // local, peers - 1)
    place = jnp.arange(slot.size) - begins[peer]
    arrives = (slot < peers * local) & (place < room)
    index = jnp.where(arrives, peer * room + place, 0)
    result = jnp.where(arrives[:, None], back.reshape(peers * room, dim)[index], 0)
    lost = starts[-1] - jnp.sum(counts)
    return result, lost.astype(jnp.float32)


def _ragged(
    plan: Exchange,
    run: Grouped,
    rows: jax.Array,
    slot: jax.Array,
    starts: jax.Array,
    room: int,
) -> tuple[jax.Array, jax.Array]:
    """Sends each peer what there is for it, runs this device's experts, sends the results back."""
    del slot
    peers, local, dim = plan.num_peers, plan.num_local, rows.shape[1]
    axes: Any = plan.travel_axes
    room *= peers
    me = jax.lax.axis_index(axes)
    counts = jnp.diff(starts).reshape(peers, local)
    everyones = jax.lax.all_gather(counts, axes)  # (from, to, L)
    # Rows arrive from one peer after the other, until there is no more room.
    wanted = jnp.sum(everyones, axis=2)  # (from, to)
    ends = jnp.minimum(jnp.cumsum(wanted, axis=0), room)
    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    sizes = ends - begins
    offsets = jnp.cumsum(wanted, axis=1) - wanted  # where in the sender's rows: (from, to)

    got = jax.lax.ragged_all_to_all(
        rows,
        jnp.zeros((room, dim), rows.dtype),
        offsets[me],
        sizes[me],
        begins[me],
        sizes[:, me],
        axis_name=axes,
    )
    upto = jnp.minimum(jnp.cumsum(everyones[:, me], axis=1), sizes[:, me, None])
    arrived = jnp.diff(upto, axis=1, prepend=0)  # (P, L)
    group = jnp.searchsorted(jnp.cumsum(arrived.reshape(-1)), jnp.arange(room), side="right")
    expert = jnp.where(group < peers * local, group % local, local)
    order = jnp.argsort(expert, stable=True)
    places = inverse(order)
    made = run(permute_rows(got, order, places), jnp.sum(arrived, axis=0))
    result = jax.lax.ragged_all_to_all(
        permute_rows(made, places, order),
        jnp.zeros_like(rows),
        begins[:, me],
        sizes[:, me],
        offsets[:, me],
        sizes[me],
        axis_name=axes,
    )
    lost = jnp.sum(wanted[me]) - jnp.sum(sizes[me])
    return result, lost.astype(jnp.float32)
