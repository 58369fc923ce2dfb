"""How a ring lays positions out: which blocks meet at which hop, and what that leaves idle."""

from __future__ import annotations

import functools
from typing import NamedTuple

from axcore.ops.masks import Mask

__all__ = ["RingPlan", "plan_ring"]

#: Zigzag moves queries, keys, values and outputs once each way; it must save more than that.
_WORTHWHILE = 0.8


class RingPlan(NamedTuple):
    """The layout of a ring.

    Attributes:
        zigzag: Whether device i of n holds the i-th and the i-th last of 2 n pieces of the
            sequence, in place of two neighbours. Under a causal mask every device then has the same
            work at every hop.
        hops: Blocks of keys that a device sees, its own included; those after are out of reach.
    """

    zigzag: bool
    hops: int


@functools.lru_cache(maxsize=256)
def plan_ring(mask: Mask, num_local: int, num_devices: int) -> RingPlan:
    """Returns the layout that takes the least time when positions are indices.

    The devices pass keys on together, so a hop lasts as long as its busiest device: the time is the
    sum over hops of the most pairs of pieces that one device must compare.

    Args:
        mask: The mask; only its ``kv_range`` is read.
        num_local: Positions on one device.
        num_devices: Devices in the ring.
    """
    splits = 2 if num_local % 2 == 0 else 1
    num_pieces, size = splits * num_devices, num_local // splits
    reach = [mask.kv_range(i * size, (i + 1) * size, num_pieces * size) for i in range(num_pieces)]

    def meets(query: int, key: int) -> bool:
        low, high = reach[query]
        return low < (key + 1) * size and key * size < high

    def time(pieces: list[tuple[int, ...]]) -> tuple[int, int]:
        work = [
            max(
                sum(meets(q, k) for q in pieces[i] for k in pieces[i - hop])
                for i in range(num_devices)
            )
            for hop in range(num_devices)
        ]
        return sum(work), max((hop + 1 for hop, pairs in enumerate(work) if pairs), default=1)

    in_order = [tuple(range(i * splits, (i + 1) * splits)) for i in range(num_devices)]
    cost, hops = time(in_order)
    if splits == 2:
        mirrored = [(i, num_pieces - 1 - i) for i in range(num_devices)]
        mirrored_cost, mirrored_hops = time(mirrored)
        if mirrored_cost < _WORTHWHILE * cost:
            return RingPlan(True, mirrored_hops)
    return RingPlan(False, hops)
