"""Gathers and sums over devices as a ring of shifts, each hidden behind a part of the product.

A device holds one of p chunks of the positions and one of p shards of the weight. Gathering: what
it holds travels on while it multiplies it; after p products every device has seen all chunks.
Summing: the partial sum of a chunk travels and every device adds its own product; after p products
the chunk's owner has the total. The two are each other's transpose, so the backward pass of either
is the other, and a ring of the same kind for the weight's gradient: nothing gathered is kept.

Sums travel in the operands' dtype, as those of XLA's own reduce-scatter do; each product sums in
float32. Loops over devices are unrolled, so that the scheduler can start a shift early.

Shape legend, of one device: b batch, t positions of one chunk, k model dim, n hidden units of one
shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["all_gather_matmul_ring", "matmul_reduce_scatter_ring"]

Axes = tuple[str, ...]


def all_gather_matmul_ring(
    x: jax.Array, weight: jax.Array, *, over: Axes, mesh_axes: Mapping[str, Axes]
) -> jax.Array:
    """(b, t, k) of this device's chunk by (k, n) -> (b, p t, n)."""
    del mesh_axes  # of which `over` are those that split positions only between branches
    return cast("jax.Array", _gathered_product(over, x, weight))


def matmul_reduce_scatter_ring(
    x: jax.Array, weight: jax.Array, *, over: Axes, mesh_axes: Mapping[str, Axes]
) -> jax.Array:
    """(b, p t, n) by (n, k) -> (b, t, k), the sum over devices of this device's chunk."""
    del mesh_axes
    return cast("jax.Array", _scattered_product(over, x, weight))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered_product(over: Axes, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _all_gather(over, x, lambda chunk: _rows_by(chunk, weight))


def _gathered_forward(
    over: Axes, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _gathered_product(over, x, weight), (x, weight)


def _gathered_backward(
    over: Axes, saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    grad_x = _reduce_scatter(over, grad, lambda chunk: _rows_by(chunk, weight.T))
    grad_weight = _sum_of_outer(over, x, grad, travels_left=True)
    return grad_x, grad_weight.astype(weight.dtype)


_gathered_product.defvjp(_gathered_forward, _gathered_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered_product(over: Axes, x: jax.Array, weight: jax.Array) -> jax.Array:
    return _reduce_scatter(over, x, lambda chunk: _rows_by(chunk, weight))


def _scattered_forward(
    over: Axes, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _scattered_product(over, x, weight), (x, weight)


def _scattered_backward(
    over: Axes, saved: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    grad_x = _all_gather(over, grad, lambda chunk: _rows_by(chunk, weight.T))
    grad_weight = _sum_of_outer(over, grad, x, travels_left=False)
    return grad_x, grad_weight.astype(weight.dtype)


_scattered_product.defvjp(_scattered_forward, _scattered_backward)


def _rows_by(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """(b, t, k) by (k, n) in the operands' dtype."""
    return lax.dot_general(rows, weight, (((2,), (0,)), ((), ())))


def _travelling(over: Axes, x: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yields every device's chunk once and whose it is, this device's first."""
    num, me = lax.axis_size(over), lax.axis_index(over)
    back = [(i, (i - 1) % num) for i in range(num)]
    for i in range(num):
        # The shift does not wait for the product of what is shifted.
        following = lax.ppermute(x, over, back) if i + 1 < num else x
        yield x, (me + i) % num
        x = following


def _all_gather(over: Axes, x: jax.Array, product: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The products of all chunks, in order of position."""
    t, num = x.shape[1], lax.axis_size(over)
    out: jax.Array | None = None
    for chunk, owner in _travelling(over, x):
        part = product(chunk)
        if out is None:
            out = jnp.zeros((part.shape[0], num * t, part.shape[2]), part.dtype)
        out = lax.dynamic_update_slice_in_dim(out, part, owner * t, axis=1)
    assert out is not None
    return out


def _reduce_scatter(
    over: Axes, x: jax.Array, product: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """This device's chunk of the sum over devices of the products."""
    num, me = lax.axis_size(over), lax.axis_index(over)
    t = x.shape[1] // num
    forth = [(i, (i + 1) % num) for i in range(num)]
    total: jax.Array | None = None
    for i in range(num):
        # The chunk that arrives here after the remaining shifts is that of the device ahead.
        owner = (me - 1 - i) % num
        part = product(lax.dynamic_slice_in_dim(x, owner * t, t, axis=1))
        total = part if total is None else part + lax.ppermute(total, over, forth)
    assert total is not None
    return total


def _sum_of_outer(
    over: Axes, chunk: jax.Array, whole: jax.Array, *, travels_left: bool
) -> jax.Array:
    """The weight's gradient: (k, n), or (n, k) unless the chunk is the left factor; float32."""
    t = chunk.shape[1]
    total: jax.Array | None = None
    for travelling, owner in _travelling(over, chunk):
        local = lax.dynamic_slice_in_dim(whole, owner * t, t, axis=1)
        pair = (travelling, local) if travels_left else (local, travelling)
        part = lax.dot_general(
            *pair, (((0, 1), (0, 1)), ((), ())), preferred_element_type=jnp.float32
        )
        total = part if total is None else total + part
    assert total is not None
    return total
