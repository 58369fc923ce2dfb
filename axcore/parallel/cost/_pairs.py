"""How many keys the queries of a sequence see, from the structured mask."""

from __future__ import annotations

import functools
from typing import NamedTuple

from axcore.ops.masks import Causal, Full, Mask, PrefixLM, SegmentIds, SlidingWindow, TracedWindow

__all__ = ["Pairs", "count_pairs"]


class Pairs(NamedTuple):
    """Query-key pairs of one row.

    Attributes:
        causal: Those that the mask lets through: all the work there has to be.
        full: Those counted when causality is ignored, as most published MFUs do: each query sees
            all keys, or all of its window.
    """

    causal: float
    full: float


@functools.cache
def count_pairs(mask: Mask, num_queries: int, num_keys: int, window: int | None = None) -> Pairs:
    """Returns the pairs of a mask when positions are indices.

    A row is taken as one document: :class:`SegmentIds` hides nothing. A prefix whose length comes
    with the data (``PrefixLM(None)``) counts as empty, that is as causal.

    Args:
        mask: The mask of an attention layer.
        num_queries: Tokens that ask.
        num_keys: Tokens that are seen.
        window: What ``TracedWindow`` reads: earlier positions seen.
    """
    left: int | None = None
    right: int | None = None
    known: Mask = Full()
    is_causal = False
    for part in mask.parts():
        if isinstance(part, TracedWindow):
            left = _least(left, window)
        elif isinstance(part, SlidingWindow):
            left, right = _least(left, part.left), _least(right, part.right)
        elif isinstance(part, SegmentIds):
            continue
        elif isinstance(part, PrefixLM) and part.length is None:
            known, is_causal = known & Causal(), True
        else:
            known, is_causal = known & part, is_causal or isinstance(part, Causal | PrefixLM)
    full = num_queries * num_keys
    if left is not None or right is not None:
        known = known & SlidingWindow(left, right)
        seen_left = num_keys if left is None else left
        seen_right = (0 if is_causal else num_keys) if right is None else right
        full = num_queries * min(num_keys, seen_left + 1 + seen_right)
    return Pairs(_visible(known, num_queries, num_keys), full)


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def _visible(mask: Mask, num_queries: int, num_keys: int) -> int:
    if isinstance(mask, Full):
        return num_queries * num_keys
    if isinstance(mask, Causal) and num_queries <= num_keys:
        return num_queries * (num_queries + 1) // 2
    total = 0
    for query in range(num_queries):
        low, high = mask.kv_range(query, query + 1, num_keys)
        total += max(0, high - low)
    return total
