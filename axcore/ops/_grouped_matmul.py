"""Grouped matmul: consecutive groups of rows, each with its own matrix (mixture of experts)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from axcore.errors import OpError
from axcore.ops._grouped_blocks import blocked_grouped_matmul, widened
from axcore.ops._select import Operand, ambient_target, dispatch

__all__ = ["group_of_rows", "grouped_matmul", "grouped_matmul_xla"]

# Where XLA makes a ragged product of one dense product with all groups' matrices: E times the work
# and the memory. Compiled for 512 GPUs, 128 experts took 416 GiB a device instead of 33.
_EXPANDED = frozenset({"cpu", "gpu", "cuda"})


def grouped_matmul(
    rows: Float[Array, "M K"],
    weights: Float[Array, "E K N"],
    group_sizes: Int[Array, " E"],
    *,
    preferred_element_type: str | None = None,
    implementation: str | None = None,
) -> Float[Array, "M N"]:
    r"""Multiplies each group of rows with its own matrix.

    With group e covering rows :math:`s_e \le i < s_{e+1}`, where :math:`s` is the running sum of
    sizes, :math:`o_i = r_i W_e`. Rows past the last group give zeros.

    Args:
        rows: (M, K), sorted by group.
        weights: (E, K, N). Those of fewer bits than the rows are widened: of one group at a time
            where the product goes group by group.
        group_sizes: (E,) int32, rows in each group; their sum is at most M.
        preferred_element_type: Dtype of the result; by default that of ``rows``.
        implementation: Forces a kernel by name.

    Returns:
        (M, N); sums of narrower floats are float32 inside, those of integers int32.

    Raises:
        OpError: Shapes do not fit, or no acceptable kernel serves the call.

    References:
        MegaBlocks, arXiv:2211.15841.
    """
    m_k, e_k_n, e = rows.shape, weights.shape, group_sizes.shape
    if len(m_k) != 2 or len(e_k_n) != 3 or m_k[1] != e_k_n[1] or e != e_k_n[:1]:
        raise OpError(
            f"grouped_matmul got rows {m_k}, weights {e_k_n}, group_sizes {e}:"
            " expected (M, K), (E, K, N), (E,)",
            code="AX402",
        )
    if not _goes_by_group():
        weights = widened(weights, rows)
    return dispatch(
        "grouped_matmul",
        {
            "rows": Operand(rows, ("batch", "embed")),
            "weights": Operand(weights, ("experts", "embed", "mlp")),
            "group_sizes": Operand(group_sizes, ("experts",)),
        },
        output_axes=("batch", "mlp"),
        static={"preferred_element_type": preferred_element_type},
        options={"preferred_element_type": preferred_element_type},
        implementation=implementation,
    )


def group_of_rows(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Returns int32 (rows,): the group of each row; the last one for rows past all groups.

    Args:
        group_sizes: (E,) int32.
        num_rows: At least the sum of the sizes.
    """
    of_row = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(num_rows), side="right")
    return jnp.minimum(of_row, group_sizes.size - 1)


def grouped_matmul_xla(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    preferred_element_type: str | None = None,
) -> jax.Array:
    """Reference of :func:`grouped_matmul`."""
    if jnp.issubdtype(rows.dtype, jnp.integer):
        sums = jnp.dtype(jnp.int32)
    else:
        sums = jnp.dtype(jnp.float32 if rows.dtype.itemsize < 4 else rows.dtype)
    result = jnp.dtype(preferred_element_type or rows.dtype)
    if _goes_by_group():
        return blocked_grouped_matmul(rows, weights, group_sizes, sums.name, result.name)
    out = lax.ragged_dot(rows, weights, group_sizes, preferred_element_type=sums)
    return out.astype(result)


def _goes_by_group() -> bool:
    """Whether this module's own loop over tiles multiplies here."""
    target = ambient_target()
    return target is None or target.platform in _EXPANDED
