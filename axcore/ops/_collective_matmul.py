"""Products at the border of a sharded layer, where a gather or a sum over devices meets a matmul.

With sequence parallelism (arXiv:2205.05198) positions between branches are split over the devices
that split the hidden dim inside. The product into the branch gathers them, the product out of it
sums and scatters them. The references leave both to XLA; kernels overlap the transfers with the
product.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from axcore.errors import OpError
from axcore.ops._dot import dot_general
from axcore.ops._select import Operand, ambient_target, dispatch, sharded_axes

__all__ = [
    "all_gather_matmul",
    "all_gather_matmul_xla",
    "matmul_reduce_scatter",
    "matmul_reduce_scatter_xla",
]

_DIMS = (((2,), (0,)), ((), ()))


def all_gather_matmul(
    x: Float[Array, "B T K"],
    weight: Float[Array, "K N"],
    *,
    axis: str = "mlp",
    implementation: str | None = None,
) -> Float[Array, "B T N"]:
    """``x @ weight`` with positions by ``residual_seq`` in x and by ``seq`` in the result.

    Args:
        x: (B, T, K), positions split as between branches.
        weight: (K, N) in x's dtype, N split by ``axis``.
        axis: Logical axis of N, such as ``mlp`` or ``heads``.
        implementation: Forces a kernel by name.

    Returns:
        (B, T, N) in x's dtype: all positions of a ``seq`` shard, N split.

    Raises:
        OpError: Shapes or dtypes do not fit, or no acceptable kernel serves the call.

    References:
        Overlap by decomposition: Wang et al., ASPLOS 2023, doi:10.1145/3567955.3567959.
    """
    _check("all_gather_matmul", x, weight)
    over = _further()
    return dispatch(
        "all_gather_matmul",
        {
            "x": Operand(x, ("batch", "residual_seq", "embed")),
            "weight": Operand(weight, ("embed", axis)),
        },
        output_axes=("batch", "seq", axis),
        static={"over": over},
        options={"axis": axis, "over": over},
        implementation=implementation,
    )


def matmul_reduce_scatter(
    x: Float[Array, "B T N"],
    weight: Float[Array, "N K"],
    *,
    axis: str = "mlp",
    implementation: str | None = None,
) -> Float[Array, "B T K"]:
    """``x @ weight`` with positions by ``seq`` in x and by ``residual_seq`` in the result.

    Args:
        x: (B, T, N), N split by ``axis``.
        weight: (N, K) in x's dtype.
        axis: Logical axis of N, which is summed over.
        implementation: Forces a kernel by name.

    Returns:
        (B, T, K) in x's dtype, positions split as between branches.

    Raises:
        OpError: Shapes or dtypes do not fit, or no acceptable kernel serves the call.

    References:
        As for :func:`all_gather_matmul`.
    """
    _check("matmul_reduce_scatter", x, weight)
    over = _further()
    return dispatch(
        "matmul_reduce_scatter",
        {
            "x": Operand(x, ("batch", "seq", axis)),
            "weight": Operand(weight, (axis, "embed")),
        },
        output_axes=("batch", "residual_seq", "embed"),
        communicated=("residual_seq",),
        static={"over": over},
        options={"axis": axis, "over": over},
        implementation=implementation,
    )


def all_gather_matmul_xla(
    x: jax.Array, weight: jax.Array, *, over: tuple[str, ...] = ()
) -> jax.Array:
    """Reference of :func:`all_gather_matmul`; ``over`` are the mesh axes of the gather."""
    del over
    return dot_general(x, weight, _DIMS)


def matmul_reduce_scatter_xla(
    x: jax.Array, weight: jax.Array, *, over: tuple[str, ...] = ()
) -> jax.Array:
    """Reference of :func:`matmul_reduce_scatter`; ``over`` are the mesh axes of the sum."""
    del over
    return dot_general(x, weight, _DIMS)


def _further() -> tuple[str, ...]:
    """Mesh axes that split positions between branches and not inside of them, outermost first."""
    target = ambient_target()
    if target is None:
        return ()
    inside = sharded_axes(target, "seq")
    between = sharded_axes(target, "residual_seq")
    return between[len(inside) :] if between[: len(inside)] == inside else ()


def _check(op: str, x: jax.Array, weight: jax.Array) -> None:
    """Raises OpError unless (b, t, k) goes with (k, n)."""
    if x.ndim != 3 or weight.ndim != 2 or x.shape[2] != weight.shape[0] or x.dtype != weight.dtype:
        raise OpError(
            f"{op} got x {x.dtype}{x.shape} and weight {weight.dtype}{weight.shape}: expected"
            " (B, T, K) and (K, N) of one dtype",
            code="AX414",
        )
