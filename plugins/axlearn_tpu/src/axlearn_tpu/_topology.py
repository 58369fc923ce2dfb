"""The shape of a slice, computed from its number of chips.

Three-dimensional slices are built of cubes of 4x4x4 chips; less than a cube are 4, 8, 16 and 32
chips. Of the boxes of cubes that have the right number and fit into a pod, the vendor's default is
the most compact one. Two-dimensional slices are powers of two.
"""

from __future__ import annotations

import functools
import itertools
import math

from axlearn_tpu._chips import Chip

__all__ = ["hosts_and_chips", "nearest_sizes", "slice_shape"]

_CUBE = 4
_BELOW_A_CUBE = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
# One host of four chips is the smallest that a slice of several hosts is made of.
_FLAT = {1: (1, 1), 4: (2, 2), 8: (2, 4)}


def slice_shape(chip: Chip, chips: int) -> tuple[int, ...] | None:
    """Returns chips along each dim of a slice of ``chips`` chips; None if there is no such slice.

    Example:
        >>> from axlearn_tpu._chips import CHIPS
        >>> slice_shape(CHIPS["v5p"], 256)
        (4, 8, 8)
    """
    if not 1 <= chips <= chip.max_chips:
        return None
    if len(chip.max_dims) == 2:
        if chips in _FLAT:
            return _FLAT[chips]
        exponent = chips.bit_length() - 1
        if chips < 16 or chips != 2**exponent:
            return None
        return 2 ** (exponent // 2), 2 ** (exponent - exponent // 2)
    return _BELOW_A_CUBE.get(chips) or _cubes(chips, chip.max_dims)


@functools.cache
def _cubes(chips: int, max_dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the most compact box of cubes."""
    cubes, rest = divmod(chips, _CUBE**3)
    if rest or not cubes:
        return None
    most = sorted(n // _CUBE for n in max_dims)
    found = [
        (a, b, cubes // (a * b))
        for a, b in itertools.product(range(1, most[0] + 1), range(1, most[1] + 1))
        if cubes % (a * b) == 0 and a <= b <= cubes // (a * b) <= most[2]
    ]
    if not found:
        return None
    best = min(found, key=lambda dims: (sum(dims), dims[2]))
    return tuple(n * _CUBE for n in best)


def hosts_and_chips(chip: Chip, chips: int) -> tuple[int, int]:
    """Returns hosts of a slice and chips on each.

    A v5e or v6e slice of 1 or 8 chips is one host; all others are made of hosts of 4 chips.
    """
    if len(chip.max_dims) == 2 and chips in (1, 8):
        return 1, chips
    return chips // 4, 4


@functools.cache
def _sizes(generation: str) -> tuple[int, ...]:
    from axlearn_tpu._chips import CHIPS

    chip = CHIPS[generation]
    counts = sorted({1, 4, 8, 16, 32, *range(64, chip.max_chips + 1, 64)})
    return tuple(n for n in counts if slice_shape(chip, n))


def nearest_sizes(chip: Chip, chips: float) -> tuple[int, ...]:
    """Returns the next smaller and the next larger number of chips that a slice may have."""
    sizes = _sizes(chip.generation)
    below = max((n for n in sizes if n <= chips), default=None)
    above = min((n for n in sizes if n >= chips), default=None)
    return tuple(dict.fromkeys(n for n in (below, above) if n is not None))


def text(shape: tuple[int, ...]) -> str:
    """Returns a shape as the vendor writes it, such as ``4x8x8``."""
    return "x".join(map(str, shape))


def num_chips(shape: str) -> int:
    """Returns the number of chips of a shape such as ``4x8x8``."""
    return math.prod(int(n) for n in shape.split("x"))
