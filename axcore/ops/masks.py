"""Structured attention masks: small frozen records that kernels inspect instead of a dense array.

A mask answers "may the query at position i see the key at position j". Masks combine with ``&``.
What differs per example (segment ids, prefix lengths, a traced window) is passed to
:func:`axcore.ops.attention` as arrays; the mask only says that it is used, so masks stay hashable,
printable configuration values. This module imports no JAX, so a kernel's ``supports`` may use it.

Example:
    >>> import numpy as np
    >>> mask = Causal() & SlidingWindow(left=1)
    >>> mask.dense(np.arange(3), np.arange(3)).astype(int)
    array([[1, 0, 0],
           [1, 1, 0],
           [0, 1, 1]])
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from axcore.errors import OpError

__all__ = [
    "And",
    "Causal",
    "Full",
    "Mask",
    "MaskArrays",
    "PrefixLM",
    "SegmentIds",
    "SlidingWindow",
    "TracedWindow",
]


class MaskArrays(NamedTuple):
    """The per-example values that some masks read. All optional; any array type.

    Attributes:
        q_segment_ids: (B, T) int; 0 is padding.
        kv_segment_ids: (B, S) int; 0 is padding.
        prefix_lengths: (B,) int, for ``PrefixLM(None)``.
        window: () int, for ``TracedWindow``: how many earlier positions are seen.
    """

    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    prefix_lengths: Any = None
    window: Any = None


#: For masks that need none.
NO_ARRAYS = MaskArrays()


def _pairs(q_positions: Any, kv_positions: Any) -> tuple[Any, Any]:
    """Positions (..., T) and (..., S) as broadcastable (..., T, 1) and (..., 1, S)."""
    return q_positions[..., :, None], kv_positions[..., None, :]


@dataclasses.dataclass(frozen=True)
class Mask:
    """What a query may see; frozen, of static values only. Masks combine with ``&``."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The :class:`MaskArrays` fields that must be given."""
        return ()

    @property
    def uses_positions(self) -> bool:
        """Whether the answer depends on positions (else only on the arrays)."""
        return True

    @property
    def is_relative(self) -> bool:
        """Whether the answer stays when all positions are moved alike; False where in doubt."""
        return False

    def parts(self) -> tuple[Mask, ...]:
        """The masks that are combined: ``(self,)`` unless this is an :class:`And`."""
        return (self,)

    def dense(self, q_positions: Any, kv_positions: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """The mask as a boolean array, True where the key is visible.

        Args:
            q_positions: (T,) or (B, T) int.
            kv_positions: (S,) or (B, S) int.
            arrays: Per-example values, for masks that need them.

        Returns:
            (T, S) or (B, T, S) bool.
        """
        raise NotImplementedError

    def kv_range(self, q_start: int, q_stop: int, num_kv: int) -> tuple[int, int]:
        """Keys that queries ``q_start <= i < q_stop`` can see at most, when positions are indices.

        Kernels and the reference skip what lies outside. Always safe: ``(0, num_kv)``.
        """
        del q_start, q_stop
        return 0, num_kv

    def reaches(self, q_range: Any, kv_range: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """Whether any query of a block may see any key of one; decides cheaply what to skip.

        Where it says False every pair must be hidden; True is always safe. As ``kv_range``, for
        blocks whose place is known only at run time.

        Args:
            q_range: The lowest and the highest position of the queries; numbers or () arrays.
            kv_range: Those of the keys.
            arrays: Per-example values of these queries and keys, for masks that need them.

        Returns:
            True, or a bool of the type that comparing positions gives.
        """
        del q_range, kv_range, arrays
        return True

    def __and__(self, other: Mask) -> Mask:
        """Both masks must allow the pair; nested ones are flattened, ``Full`` is dropped."""
        parts: list[Mask] = []
        for mask in (*self.parts(), *other.parts()):
            if mask not in parts and not isinstance(mask, Full):
                parts.append(mask)
        if not parts:
            return Full()
        return parts[0] if len(parts) == 1 else And(tuple(parts))


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key."""

    @property
    def uses_positions(self) -> bool:
        """Never."""
        return False

    @property
    def is_relative(self) -> bool:
        """Always."""
        return True

    def dense(self, q_positions: Any, kv_positions: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """All True."""
        q, kv = _pairs(q_positions, kv_positions)
        return (q == q) & (kv == kv)


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """A query sees keys at its own and at earlier positions: ``j <= i``."""

    @property
    def is_relative(self) -> bool:
        """Always."""
        return True

    def dense(self, q_positions: Any, kv_positions: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """``q_positions >= kv_positions``."""
        q, kv = _pairs(q_positions, kv_positions)
        return q >= kv

    def kv_range(self, q_start: int, q_stop: int, num_kv: int) -> tuple[int, int]:
        """Nothing past the last query."""
        return 0, min(num_kv, q_stop)

    def reaches(self, q_range: Any, kv_range: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """Whether the last query is not before the first key."""
        return q_range[1] >= kv_range[0]


@dataclasses.dataclass(frozen=True)
class SlidingWindow(Mask):
    """A query at i sees keys ``i - left <= j <= i + right``; None leaves that side open.

    ``Causal() & SlidingWindow(left=1023)`` is the usual window of 1,024 tokens, itself included.

    Attributes:
        left: Earlier positions seen, in tokens, or None.
        right: Later positions seen, in tokens, or None.
    """

    left: int | None
    right: int | None = None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise OpError(
                    f"SlidingWindow({name}={value}): expected >= 0 tokens or None",
                    code="AX401",
                    hint="the window counts the positions seen besides the query's own",
                )

    @property
    def is_relative(self) -> bool:
        """Always."""
        return True

    def dense(self, q_positions: Any, kv_positions: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """``-right <= q_positions - kv_positions <= left``."""
        q, kv = _pairs(q_positions, kv_positions)
        distance = q - kv
        seen = distance == distance
        if self.left is not None:
            seen = seen & (distance <= self.left)
        if self.right is not None:
            seen = seen & (distance >= -self.right)
        return seen

    def kv_range(self, q_start: int, q_stop: int, num_kv: int) -> tuple[int, int]:
        """From the first query's left edge to the last query's right edge."""
        lo = 0 if self.left is None else max(0, q_start - self.left)
        hi = num_kv if self.right is None else min(num_kv, q_stop + self.right)
        return min(lo, hi), hi

    def reaches(self, q_range: Any, kv_range: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """Whether the nearest pair is within the window on either side."""
        seen = True
        if self.left is not None:
            seen = (q_range[0] - kv_range[1] <= self.left) & seen
        if self.right is not None:
            seen = (kv_range[0] - q_range[1] <= self.right) & seen
        return seen


@dataclasses.dataclass(frozen=True)
class TracedWindow(Mask):
    """As ``SlidingWindow(left=window)`` with ``arrays.window`` a traced scalar.

    One scanned stack can so hold layers with different windows; kernels that compile a fixed window
    refuse it.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        """``window``."""
        return ("window",)

    @property
    def is_relative(self) -> bool:
        """Always."""
        return True

    def dense(self, q_positions: Any, kv_positions: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """``q_positions - kv_positions <= window``."""
        q, kv = _pairs(q_positions, kv_positions)
        return (q - kv) <= arrays.window

    def reaches(self, q_range: Any, kv_range: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """Whether the nearest pair is within the window."""
        return q_range[0] - kv_range[1] <= arrays.window


@dataclasses.dataclass(frozen=True)
class SegmentIds(Mask):
    """A query sees keys of its own segment; segment 0 is padding, neither seeing nor seen."""

    @property
    def needs(self) -> tuple[str, ...]:
        """``q_segment_ids`` and ``kv_segment_ids``."""
        return ("q_segment_ids", "kv_segment_ids")

    @property
    def uses_positions(self) -> bool:
        """Never."""
        return False

    @property
    def is_relative(self) -> bool:
        """Always."""
        return True

    def dense(self, q_positions: Any, kv_positions: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """``q_segment_ids == kv_segment_ids != 0``, (B, T, S)."""
        q, kv = _pairs(arrays.q_segment_ids, arrays.kv_segment_ids)
        return (q == kv) & (q != 0)

    def reaches(self, q_range: Any, kv_range: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """Whether the ranges of the ids overlap in any row, padding aside."""
        q, kv = arrays.q_segment_ids, arrays.kv_segment_ids
        # Padding is 0: its row's highest id stands in, so that it never lowers the lower end.
        lows = [x + (x == 0).astype(x.dtype) * x.max(axis=-1, keepdims=True) for x in (q, kv)]
        q_low, kv_low = (x.min(axis=-1) for x in lows)
        q_high, kv_high = (x.max(axis=-1) for x in (q, kv))
        return ((q_high >= kv_low) & (kv_high >= q_low) & (q_high > 0) & (kv_high > 0)).any()


@dataclasses.dataclass(frozen=True)
class PrefixLM(Mask):
    """Causal, except that every query sees the first ``length`` positions.

    Of documents that are packed into a row, each has such a prefix.

    Attributes:
        length: Prefix length in tokens, or None to read ``arrays.prefix_lengths`` (B,).
    """

    length: int | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """``prefix_lengths`` unless the length is static."""
        return ("prefix_lengths",) if self.length is None else ()

    def dense(self, q_positions: Any, kv_positions: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """``(kv_positions <= q_positions) | (kv_positions < length)``."""
        q, kv = _pairs(q_positions, kv_positions)
        length = arrays.prefix_lengths[:, None, None] if self.length is None else self.length
        return (kv <= q) | (kv < length)

    def kv_range(self, q_start: int, q_stop: int, num_kv: int) -> tuple[int, int]:
        """Nothing past the later of the last query and the prefix."""
        if self.length is None:
            return 0, num_kv
        return 0, min(num_kv, max(q_stop, self.length))

    def reaches(self, q_range: Any, kv_range: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """Whether the first key is not after the last query, or in a prefix."""
        length = arrays.prefix_lengths.max() if self.length is None else self.length
        return (kv_range[0] <= q_range[1]) | (kv_range[0] < length)


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """A pair is visible when all of ``masks`` allow it. Written ``a & b``."""

    masks: tuple[Mask, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        """All that its parts need."""
        return tuple(dict.fromkeys(name for mask in self.masks for name in mask.needs))

    @property
    def uses_positions(self) -> bool:
        """Whether any part does."""
        return any(mask.uses_positions for mask in self.masks)

    @property
    def is_relative(self) -> bool:
        """Whether all parts are."""
        return all(mask.is_relative for mask in self.masks)

    def parts(self) -> tuple[Mask, ...]:
        """The combined masks."""
        return self.masks

    def dense(self, q_positions: Any, kv_positions: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """The conjunction of the parts."""
        result = self.masks[0].dense(q_positions, kv_positions, arrays)
        for mask in self.masks[1:]:
            result = result & mask.dense(q_positions, kv_positions, arrays)
        return result

    def kv_range(self, q_start: int, q_stop: int, num_kv: int) -> tuple[int, int]:
        """The intersection of the parts' ranges."""
        lo, hi = 0, num_kv
        for mask in self.masks:
            part_lo, part_hi = mask.kv_range(q_start, q_stop, num_kv)
            lo, hi = max(lo, part_lo), min(hi, part_hi)
        return min(lo, hi), hi

    def reaches(self, q_range: Any, kv_range: Any, arrays: MaskArrays = NO_ARRAYS) -> Any:
        """Whether every part may reach; exact for none of them alone, safe for all."""
        seen = True
        for mask in self.masks:
            seen = mask.reaches(q_range, kv_range, arrays) & seen
        return seen
