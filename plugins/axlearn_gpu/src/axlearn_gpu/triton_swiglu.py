"""The gated product of feed-forward layers in one pass, forward and backward: Triton kernels.

Computed in float32 and rounded once. Backward needs only the two inputs: nothing is kept.

References:
    GLU variants, arXiv:2002.05202; GELU, arXiv:1606.08415.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from axlearn_gpu._capability import current_capability
from axlearn_gpu._triton import inlined, triton_call

__all__ = ["gated_activation_triton"]

_BLOCK = 1024


@inlined
def _gate(x, kind: tl.constexpr):
    """The activation's value and derivative."""
    if kind == "relu":
        return tl.maximum(x, 0.0), tl.where(x > 0.0, 1.0, 0.0)
    if kind == "silu":
        share = tl.sigmoid(x)
        return x * share, share * (1.0 + x * (1.0 - share))
    # gelu_tanh: (1 + tanh(z)) / 2 is the sigmoid of 2z.
    share = tl.sigmoid(2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x))
    slope = 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * x * x)
    return x * share, share + x * share * (1.0 - share) * slope


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, out_ptr, size: tl.constexpr, block: tl.constexpr, kind: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    value, _ = _gate(gate, kind)
    tl.store(out_ptr + at, (value * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    gate_ptr,
    up_ptr,
    grad_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    size: tl.constexpr,
    block: tl.constexpr,
    kind: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < size
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    value, slope = _gate(gate, kind)
    kept = grad_gate_ptr.dtype.element_ty
    tl.store(grad_gate_ptr + at, (grad * up * slope).to(kept), mask=inside)
    tl.store(grad_up_ptr + at, (grad * value).to(kept), mask=inside)


def gated_activation_triton(gate: jax.Array, up: jax.Array, *, activation: str) -> jax.Array:
    """``activation(gate) * up``; arguments as for :func:`axcore.ops.gated_activation`.

    Args:
        gate: (..., F) float.
        up: (..., F) in gate's dtype.
        activation: ``silu``, ``gelu_tanh`` or ``relu``.

    Returns:
        (..., F) in gate's dtype.
    """
    out: Any = _gated((activation, current_capability()), gate, up)
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(static: tuple[str, int], gate: jax.Array, up: jax.Array) -> jax.Array:
    kind, capability = static
    (out,) = triton_call(
        _forward_kernel,
        gate,
        up,
        out_shape=(jax.ShapeDtypeStruct(gate.shape, gate.dtype),),
        grid=(-(-gate.size // _BLOCK),),
        capability=capability,
        size=gate.size,
        block=_BLOCK,
        kind=kind,
    )
    return out


def _gated_fwd(
    static: tuple[str, int], gate: jax.Array, up: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    out: Any = _gated(static, gate, up)
    return out, (gate, up)


def _gated_bwd(
    static: tuple[str, int], saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    gate, up = saved
    kind, capability = static
    like = jax.ShapeDtypeStruct(gate.shape, gate.dtype)
    return triton_call(
        _backward_kernel,
        gate,
        up,
        grad,
        out_shape=(like, like),
        grid=(-(-gate.size // _BLOCK),),
        capability=capability,
        size=gate.size,
        block=_BLOCK,
        kind=kind,
    )


_gated.defvjp(_gated_fwd, _gated_bwd)
