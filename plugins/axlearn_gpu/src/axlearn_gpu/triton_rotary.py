"""Rotary positions in one pass: a Triton kernel that turns all heads of a position.

The gradient is the turn by the opposite angle. Gradients of the angles are left to XLA, which drops
them where nobody asks.

References:
    arXiv:2104.09864.
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

__all__ = ["rotary_triton"]


@triton.jit
def _turn_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    length: tl.constexpr,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    pairs: tl.constexpr,
    angle_rows: tl.constexpr,
    block_heads: tl.constexpr,
    block_pairs: tl.constexpr,
    block_rest: tl.constexpr,
    interleaved: tl.constexpr,
    sign: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # batch * length + position
    angle_row = row if angle_rows > 1 else row % length
    pair = tl.arange(0, block_pairs)
    known = pair < pairs
    cos = tl.load(cos_ptr + angle_row * pairs + pair, mask=known, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle_row * pairs + pair, mask=known, other=0.0).to(tl.float32) * sign
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    base = (row * heads + head)[:, None] * head_dim
    inside = (head < heads)[:, None] & known[None, :]
    first = base + (2 * pair if interleaved else pair)[None, :]
    second = first + (1 if interleaved else pairs)
    a = tl.load(x_ptr + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + second, mask=inside, other=0.0).to(tl.float32)
    kept = out_ptr.dtype.element_ty
    tl.store(out_ptr + first, (a * cos[None, :] - b * sin[None, :]).to(kept), mask=inside)
    tl.store(out_ptr + second, (b * cos[None, :] + a * sin[None, :]).to(kept), mask=inside)
    if 2 * pairs < head_dim:
        rest = 2 * pairs + tl.arange(0, block_rest)
        passing = (head < heads)[:, None] & (rest < head_dim)[None, :]
        at = base + rest[None, :]
        tl.store(out_ptr + at, tl.load(x_ptr + at, mask=passing, other=0.0), mask=passing)


class _Static(NamedTuple):
    """Hashable facts of a call."""

    interleaved: bool
    capability: int


def rotary_triton(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, pairing: str = "half"
) -> tuple[jax.Array, jax.Array]:
    """Turned queries and keys; arguments as for :func:`axcore.ops.rotary`.

    Args:
        q: (B, T, N, H) float.
        k: (B, T, K, H) float.
        cos: (B or 1, T, P), P at most H / 2.
        sin: The same shape.
        pairing: ``half`` or ``interleaved``.

    Returns:
        q and k, turned, in their dtype.
    """
    static = _Static(pairing == "interleaved", current_capability())
    turned: tuple[Any, Any] = (_turned(static, q, cos, sin), _turned(static, k, cos, sin))
    return turned


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turned(static: _Static, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return _turn(static, x, cos, sin, 1)


def _turned_fwd(
    static: _Static, x: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _turn(static, x, cos, sin, 1), (x, cos, sin)


def _turned_bwd(
    static: _Static, saved: tuple[jax.Array, ...], grad: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, cos, sin = saved
    grad_x = _turn(static, grad, cos, sin, -1)
    (a, b), (grad_a, grad_b) = (_pairs(static, y, cos.shape[-1]) for y in (x, grad))
    # Angles are the same for all heads, and perhaps for all rows.
    over = (2,) if cos.shape[0] == x.shape[0] else (0, 2)
    shape = cos.shape
    grad_cos = jnp.sum(grad_a * a + grad_b * b, axis=over).reshape(shape).astype(cos.dtype)
    grad_sin = jnp.sum(grad_b * a - grad_a * b, axis=over).reshape(shape).astype(sin.dtype)
    return grad_x, grad_cos, grad_sin


_turned.defvjp(_turned_fwd, _turned_bwd)


def _pairs(static: _Static, x: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    wide = x[..., : 2 * num].astype(jnp.float32)
    if static.interleaved:
        return wide[..., 0::2], wide[..., 1::2]
    return wide[..., :num], wide[..., num:]


def _turn(static: _Static, x: jax.Array, cos: jax.Array, sin: jax.Array, sign: int) -> jax.Array:
    b, t, heads, head_dim = x.shape
    pairs = cos.shape[-1]
    block_heads = min(power_of_two(heads), 16)
    (out,) = triton_call(
        _turn_kernel,
        x,
        cos,
        sin,
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype),),
        grid=(b * t, -(-heads // block_heads)),
        capability=static.capability,
        num_warps=4,
        length=t,
        heads=heads,
        head_dim=head_dim,
        pairs=pairs,
        angle_rows=cos.shape[0],
        block_heads=block_heads,
        block_pairs=power_of_two(pairs),
        block_rest=power_of_two(max(1, head_dim - 2 * pairs)),
        interleaved=static.interleaved,
        sign=sign,
    )
    return out
