"""Tile sizes of the Pallas kernels for each TPU generation; without JAX.

A tile must fit into vector memory (VMEM), with the next one on its way; larger tiles read keys
from HBM less often. libtpu 0.0.42.1 has compiled every row here, forward and backward, in float32
at head dim 256; how fast they are has not been measured. An unknown generation gets the smallest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "LANES",
    "MAX_HEAD_DIM",
    "AttentionTiles",
    "attention_tiles",
    "generation",
    "grouped_tiles",
    "tile",
]

#: Elements in the minor dim of a vector register; tiles of a sequence are multiples of it.
LANES = 128

#: Largest head dim for which the tiles of attention have been seen to fit.
MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class AttentionTiles:
    """Largest tiles of splash attention, in tokens.

    Attributes:
        q: Queries of a tile of the forward pass.
        kv: Keys of a tile of the forward pass.
        backward: Queries and keys of a tile of the backward passes, which hold more arrays.
    """

    q: int
    kv: int
    backward: int


_SMALLEST = AttentionTiles(q=512, kv=512, backward=512)
_ATTENTION: Mapping[str, AttentionTiles] = {
    "v4": _SMALLEST,  # 16 MiB of VMEM a core
    # A chip of 240 FLOP a byte of HBM: 512 queries a tile read keys often enough to keep up.
    "v5e": _SMALLEST,
    "v5p": AttentionTiles(q=512, kv=1024, backward=512),
    # 560 FLOP a byte: twice the queries for each time that the keys are read.
    "v6e": AttentionTiles(q=1024, kv=1024, backward=1024),
    "7x": AttentionTiles(q=1024, kv=1024, backward=1024),
}

# Rows, contracted dim and columns of a tile. Groups that do not fill a tile of rows waste the rest
# of it, so rows stay few; a wide tile of weights is read once for each of them.
_GROUPED_SMALLEST = (256, 512, 512)
_GROUPED: Mapping[str, tuple[int, int, int]] = {
    "v4": _GROUPED_SMALLEST,
    "v5e": _GROUPED_SMALLEST,
    "v5p": (512, 1024, 1024),
    "v6e": (512, 1024, 1024),
    "7x": (512, 1024, 1024),
}


def generation(instance: str) -> str:
    """Returns the generation in an instance's name (``tpu-v5p-512``: ``v5p``), or ``""``."""
    parts = instance.split("-")
    return parts[1] if len(parts) > 2 and parts[0] == "tpu" else ""


def attention_tiles(instance: str) -> AttentionTiles:
    """Returns the largest tiles of attention on an instance."""
    return _ATTENTION.get(generation(instance), _SMALLEST)


def grouped_tiles(instance: str, itemsize: int) -> tuple[int, int, int]:
    """Returns the largest tiles (rows, contracted, columns) of a grouped product on an instance.

    Args:
        instance: Its name.
        itemsize: Bytes of an element; those of four bytes get half of the contracted dim.
    """
    rows, inner, columns = _GROUPED.get(generation(instance), _GROUPED_SMALLEST)
    return rows, inner if itemsize < 4 else inner // 2, columns


def tile(length: int, largest: int) -> tuple[int, int]:
    """Returns what a dim is padded to and the tile that then divides it.

    Args:
        length: Of the dim.
        largest: Largest tile, a multiple of :data:`LANES`.

    Returns:
        (padded length, tile): the fewest elements of padding with which a tile of at least half
        ``largest`` divides the dim; of tiles that pad alike, the largest.
    """
    if length <= largest:
        padded = -(-length // LANES) * LANES
        return padded, padded
    sizes = range(largest, largest // 2 - 1, -LANES)
    best = min(sizes, key=lambda size: -(-length // size) * size)
    return -(-length // best) * best, best
