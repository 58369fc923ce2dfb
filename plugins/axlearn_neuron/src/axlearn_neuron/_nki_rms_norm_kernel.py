"""RMSNorm in NKI: a tile of 128 rows at a time, one pass over memory.

Names follow the language: a tile's first dim is the partition of the on-chip memory that holds a
row. Importing this module needs neuronx-cc.
"""

from __future__ import annotations

from typing import Any

import neuronxcc.nki as nki  # pyright: ignore[reportMissingImports]
import neuronxcc.nki.language as nl  # pyright: ignore[reportMissingImports]

__all__ = ["rms_norm_kernel"]


@nki.jit
def rms_norm_kernel(x: Any, scale: Any, eps: float):
    """Returns normalized rows in x's dtype, and the factors of the rows before the scale.

    Args:
        x: (rows, dim).
        scale: (1, dim) float32.
        eps: Added to the mean square.

    Returns:
        (rows, dim) and (rows, 1) float32.
    """
    rows, dim = x.shape
    out = nl.ndarray((rows, dim), dtype=x.dtype, buffer=nl.shared_hbm)
    factors = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    partition = nl.arange(128)[:, None]
    first = nl.arange(1)[:, None]
    one = nl.arange(1)[None, :]
    columns = nl.arange(dim)[None, :]
    weight = nl.load(scale[first, columns], dtype=nl.float32)
    programs = nl.num_programs(0)
    tiles = (rows + 128 * programs - 1) // (128 * programs)  # of each program
    start = nl.program_id(0) * tiles
    for tile in nl.affine_range(tiles):
        row = (start + tile) * 128 + partition
        wide = nl.load(x[row, columns], mask=(row < rows), dtype=nl.float32)
        mean_square = nl.sum(nl.square(wide), axis=[1], keepdims=True) / dim
        factor = nl.rsqrt(mean_square + eps)
        normalized = nl.multiply(nl.multiply(wide, factor), weight.broadcast_to((128, dim)))
        nl.store(out[row, columns], value=normalized, mask=(row < rows))
        nl.store(factors[row, one], value=factor, mask=(row < rows))
    return out, factors
