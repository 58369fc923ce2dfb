"""Quantized products of groups of rows, each with its own matrix: those of experts.

``y_i = x_i W_e(i)``. A row has a scale of its own, and so has each group's matrix or each of its
outputs: what a device computes for a row does not depend on which rows it has besides. So results
do not depend on how groups are split over devices.

The gradient of the rows is quantized the same way. That of the matrices sums over rows, which would
have to share scales: it runs in the operands' own dtype, on the values that the forward product
saw.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from axcore import ops
from axcore.quantization._products import AT_HAND, Magnitudes, Plan
from axcore.quantization._values import Operand, Quantized, dequantize, quantize

__all__ = ["contract_groups", "quantized_grouped_product"]

_ROW, _COLUMN = 1, 2  # dims of (groups, in, out) that the two products sum over


def quantized_grouped_product(
    plan: Plan,
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    magnitudes: Magnitudes = AT_HAND,
) -> jax.Array:
    """:func:`axcore.ops.grouped_matmul` with quantized operands.

    Args:
        plan: How each operand and the gradient are quantized. ``tensor`` granularity of weights is
            one scale for each group's matrix; rows have their own in any case.
        rows: (M, K), sorted by group.
        weights: (E, K, N).
        group_sizes: (E,) int32.
        magnitudes: What scales the weights, when it is not taken from them: (E, 1, 1), or with
            channels (E, 1, N) in the forward product and (E, K, 1) in that of the gradient.

    Returns:
        (M, N) in the dtype of ``rows``; rows past the last group are zero.
    """
    call = _Call(plan, ops.ambient_target())
    return cast("jax.Array", _product(call, rows, weights, group_sizes, magnitudes))


class _Call:
    """What the rules of the derivative, which run outside of the call, know of it."""

    def __init__(self, plan: Plan, target: Any):
        self.plan = plan
        self.target = target


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    call: _Call, rows: Any, weights: Any, group_sizes: Any, magnitudes: Magnitudes
) -> jax.Array:
    return _forward(call, rows, weights, group_sizes, magnitudes)[0]


class _Saved(NamedTuple):
    rows: jax.Array
    weights: jax.Array
    group_sizes: jax.Array
    magnitudes: Magnitudes


def _forward(
    call: _Call, rows: Any, weights: Any, group_sizes: Any, magnitudes: Magnitudes
) -> tuple[jax.Array, _Saved]:
    plan, amax = call.plan, magnitudes.rhs
    with ops.on_target(call.target):
        y = _multiply(plan.lhs, rows, plan.rhs, weights, group_sizes, summed=_ROW, amax=amax)
    return y, _Saved(rows, weights, group_sizes, magnitudes)


def _backward(call: _Call, saved: _Saved, grad: jax.Array) -> tuple[Any, ...]:
    with ops.on_target(call.target):
        return _gradients(call.plan, saved, grad)


def _gradients(plan: Plan, saved: _Saved, grad: jax.Array) -> tuple[Any, ...]:
    rows, weights, sizes, magnitudes = saved
    seen_rows = _seen(rows, plan.lhs, (1,))
    seen_weights = _seen(weights, plan.rhs, _shared(plan.rhs, _ROW), magnitudes.rhs)
    _, pull = jax.vjp(lambda x, w: ops.grouped_matmul(x, w, sizes), seen_rows, seen_weights)
    d_rows, d_weights = pull(grad.astype(rows.dtype))
    if plan.grad is not None and plan.grad_lhs:
        amax = magnitudes.rhs_back
        d_rows = _multiply(plan.grad, grad, plan.rhs, weights, sizes, summed=_COLUMN, amax=amax)
    zero = np.zeros(sizes.shape, jax.dtypes.float0)
    d_magnitudes = jax.tree.map(jnp.zeros_like, magnitudes)
    return d_rows, d_weights.astype(weights.dtype), zero, d_magnitudes


_product.defvjp(_forward, _backward)


def _multiply(
    rows_how: Operand | None,
    rows: jax.Array,
    weights_how: Operand | None,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    summed: int,
    amax: jax.Array | None,
) -> jax.Array:
    """Returns the product over ``summed`` of the weights (groups, in, out), as ``rows`` are."""
    shared = _shared(weights_how, summed)
    if rows_how is None or weights_how is None:
        rows, weights = _seen(rows, rows_how, (1,)), _seen(weights, weights_how, shared, amax)
        return ops.grouped_matmul(rows, _turned(weights, summed), group_sizes)
    a = quantize(rows, rows_how, (1,))
    b = quantize(weights, weights_how, shared, amax=amax)
    values, scale = (_turned(x, summed) for x in b)
    return contract_groups(a, Quantized(values, scale), group_sizes, rows.dtype)


def contract_groups(
    rows: Quantized, weights: Quantized, group_sizes: jax.Array, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Multiplies groups of quantized rows, each with its own quantized matrix.

    Args:
        rows: (M, K), sorted by group; scales (M, 1) or (1, 1).
        weights: (E, K, N); scales (E, 1, N) or (E, 1, 1).
        group_sizes: (E,) int32.
        dtype: Of the result. Sums of floats are rounded to it before they are scaled, if it has
            float32's range: rows of a mixture in float32 are twice what it holds otherwise.

    Returns:
        (M, N); see :func:`axcore.ops.grouped_matmul`.
    """
    if jnp.issubdtype(rows.values.dtype, jnp.integer):
        sums_dtype = "int32"
    elif jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp:
        sums_dtype = jnp.dtype(dtype).name
    else:
        sums_dtype = "float32"
    sums = ops.grouped_matmul(
        rows.values, weights.values, group_sizes, preferred_element_type=sums_dtype
    )
    of_group = weights.scale[:, 0]  # (E, N or 1)
    of_row = ops.group_of_rows(group_sizes, sums.shape[0])
    return (sums.astype(jnp.float32) * rows.scale * of_group[of_row]).astype(dtype)


def _shared(how: Operand | None, summed: int) -> tuple[int, ...]:
    """Returns the dims of the weights that share a scale."""
    return (_ROW, _COLUMN) if how is not None and how.granularity == "tensor" else (summed,)


def _turned(weights: jax.Array, summed: int) -> jax.Array:
    """Returns the weights with the summed dim second."""
    return weights if summed == _ROW else jnp.swapaxes(weights, _ROW, _COLUMN)


def _seen(
    x: jax.Array, how: Operand | None, shared: tuple[int, ...], amax: jax.Array | None = None
) -> jax.Array:
    """Returns an operand as the quantized product sees it."""
    if how is None:
        return x
    q: Quantized = quantize(x, how, shared, amax=amax)
    return dequantize(q, x.dtype)
