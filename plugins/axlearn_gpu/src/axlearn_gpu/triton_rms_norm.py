"""RMSNorm in one pass over memory, with or without the addition of a residual: Triton kernels.

A program keeps a row in registers. Backward, a program walks over many rows and keeps its share of
the scale's gradient; XLA adds the shares.

References:
    arXiv:1910.07467.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from axlearn_gpu._capability import current_capability
from axlearn_gpu._triton import power_of_two, triton_call

__all__ = ["add_rms_norm_triton", "rms_norm_triton"]

# Programs of the backward pass: two for each multiprocessor of the largest GPUs here. Each writes
# one float32 row of the scale's gradient.
_BACKWARD_PROGRAMS = 264


@triton.jit
def _forward_kernel(
    x_ptr,
    residual_ptr,
    scale_ptr,
    out_ptr,
    total_ptr,
    rstd_ptr,
    dim: tl.constexpr,
    eps: tl.constexpr,
    block: tl.constexpr,
    has_residual: tl.constexpr,
    has_scale: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < dim
    x = tl.load(x_ptr + row * dim + columns, mask=inside, other=0.0)
    if has_residual:
        residual = tl.load(residual_ptr + row * dim + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * dim + columns, x, mask=inside)
    wide = x.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / dim + eps)
    out = wide * rstd
    if has_scale:
        out = out * tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * dim + columns, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward_kernel(
    x_ptr,
    scale_ptr,
    rstd_ptr,
    grad_ptr,
    grad_total_ptr,
    grad_x_ptr,
    grad_scale_ptr,
    rows: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
    has_residual: tl.constexpr,
    has_scale: tl.constexpr,
    programs: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < dim
    share = tl.zeros((block,), dtype=tl.float32)
    scale = tl.full((block,), 1.0, dtype=tl.float32)
    if has_scale:
        scale = tl.load(scale_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, rows, programs):
        row = program + first
        at = row * dim + columns
        here = inside & (row + tl.zeros_like(columns) < rows)
        x = tl.load(x_ptr + at, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=here, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + tl.minimum(row, rows - 1))
        normal = x * rstd
        scaled = grad * scale
        grad_x = rstd * (scaled - normal * (tl.sum(scaled * normal, axis=0) / dim))
        if has_residual:
            grad_x += tl.load(grad_total_ptr + at, mask=here, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=here)
        share += grad * normal
    tl.store(grad_scale_ptr + program * dim + columns, share, mask=inside)


class _Static(NamedTuple):
    """Hashable facts of a call."""

    eps: float
    has_residual: bool
    has_scale: bool
    capability: int


def rms_norm_triton(
    x: jax.Array, scale: jax.Array | None = None, *, eps: float = 1e-6
) -> jax.Array:
    """RMSNorm over the last dim; arguments as for :func:`axcore.ops.rms_norm`.

    Args:
        x: (..., D) float.
        scale: (D,) or None.
        eps: Added to the mean square.

    Returns:
        (..., D) in x's dtype; statistics and products are float32.
    """
    static = _Static(eps, False, scale is not None, current_capability())
    rows = x.reshape(-1, x.shape[-1])
    out: Any = _norm(static, rows, None, scale)
    return out[0].reshape(x.shape)


def add_rms_norm_triton(
    x: jax.Array, residual: jax.Array, scale: jax.Array | None = None, *, eps: float = 1e-6
) -> tuple[jax.Array, jax.Array]:
    """Sum and its RMSNorm; arguments as for :func:`axcore.ops.add_rms_norm`.

    Args:
        x: (..., D) float.
        residual: (..., D) in x's dtype.
        scale: (D,) or None.
        eps: Added to the mean square.

    Returns:
        The normalized sum and the sum, (..., D) in x's dtype.
    """
    static = _Static(eps, True, scale is not None, current_capability())
    dim = x.shape[-1]
    out: Any = _norm(static, x.reshape(-1, dim), residual.reshape(-1, dim), scale)
    return out[0].reshape(x.shape), out[1].reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(
    static: _Static, x: jax.Array, residual: jax.Array | None, scale: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The norm and what was normalized, both (rows, dim)."""
    return _norm_fwd(static, x, residual, scale)[0]


def _norm_fwd(
    static: _Static, x: jax.Array, residual: jax.Array | None, scale: jax.Array | None
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    rows, dim = x.shape
    block = power_of_two(dim)
    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    # The sum's pointer needs something to point at where there is none.
    none = jax.ShapeDtypeStruct((1, 1), x.dtype)
    out, total, rstd = triton_call(
        _forward_kernel,
        x,
        x if residual is None else residual,
        x if scale is None else scale,
        out_shape=(
            like,
            like if static.has_residual else none,
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(rows,),
        capability=static.capability,
        num_warps=_warps(block),
        dim=dim,
        eps=static.eps,
        block=block,
        has_residual=static.has_residual,
        has_scale=static.has_scale,
    )
    total = total if static.has_residual else x
    return (out, total), (total, scale, rstd)


def _norm_bwd(
    static: _Static, saved: tuple[Any, ...], grads: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    x, scale, rstd = saved
    grad, grad_total = grads
    rows, dim = x.shape
    block = power_of_two(dim)
    programs = min(rows, _BACKWARD_PROGRAMS)
    grad_x, shares = triton_call(
        _backward_kernel,
        x,
        x if scale is None else scale,
        rstd,
        grad,
        grad_total,
        out_shape=(
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((programs, dim), jnp.float32),
        ),
        grid=(programs,),
        capability=static.capability,
        num_warps=_warps(block),
        rows=rows,
        dim=dim,
        block=block,
        has_residual=static.has_residual,
        has_scale=static.has_scale,
        programs=programs,
    )
    grad_scale = None if scale is None else jnp.sum(shares, axis=0).astype(scale.dtype)
    return grad_x, grad_x if static.has_residual else None, grad_scale


_norm.defvjp(_norm_fwd, _norm_bwd)


def _warps(block: int) -> int:
    """Eight values a lane and more, up to sixteen warps."""
    return min(16, max(1, block // 256))
