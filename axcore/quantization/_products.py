"""Products of quantized operands, forward and backward.

The three products of training are ``y = lhs rhs``, ``d lhs = g rhs`` and ``d rhs = lhs g``. Each is
quantized along the dims that it sums over, so scales can be taken out of the sum: integers add up
in int32, float8 in float32, and compilers map both to the units that the hardware has for them.
What is not quantized runs in the operands' own dtype, on the values that the forward product saw:
the exact derivative of it, where rounding counts as the identity (straight through; Bengio et al.,
arXiv:1308.3432).
"""

from __future__ import annotations

import string
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axcore.quantization._values import (
    Operand,
    Quantized,
    dequantize,
    quantize,
    quantize_blocks,
)

__all__ = [
    "AT_HAND",
    "Magnitudes",
    "Plan",
    "contract",
    "contract_blocks",
    "labels",
    "quantized_product",
]


class Plan(NamedTuple):
    """How one product and its gradients run; hashable.

    Attributes:
        lhs: How the activations are quantized; None leaves them.
        rhs: How the weights are quantized; None leaves them.
        grad: How the result's gradient is quantized; None leaves both backward products in the
            operands' own dtype.
        grad_lhs: Whether the product that gives the gradient of ``lhs`` is quantized.
        grad_rhs: The same for ``rhs``.
        precision: Of the products that are not quantized; see ``jax.lax.dot_general``.
    """

    lhs: Operand | None
    rhs: Operand | None
    grad: Operand | None = None
    grad_lhs: bool = True
    grad_rhs: bool = True
    precision: Any = None


class Magnitudes(NamedTuple):
    """What the largest values of operands stand for, float32; None takes it from the values.

    Attributes:
        lhs: Of the activations.
        rhs: Of the weights, in the forward product.
        rhs_back: Of the weights in the product that gives the gradient of the activations, which
            sums over other dims.
    """

    lhs: Any = None
    rhs: Any = None
    rhs_back: Any = None


#: All operands are scaled by the values at hand.
AT_HAND = Magnitudes()


class _Static(NamedTuple):
    plan: Plan
    lhs: str
    rhs: str
    out: str
    dtype: Any  # of the result
    compute: Any  # of products that are not quantized


def labels(dimension_numbers: Any, lhs_ndim: int, rhs_ndim: int) -> tuple[str, str, str]:
    """Returns a letter for each dim of both operands and of the result, as ``einsum`` writes them.

    Example:
        >>> labels((((1,), (0,)), ((), ())), 2, 2)
        ('ab', 'bc', 'ac')
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    letters = string.ascii_letters
    lhs = letters[:lhs_ndim]
    shared = dict(zip((*rhs_contract, *rhs_batch), (*lhs_contract, *lhs_batch), strict=True))
    rest = iter(letters[lhs_ndim:])
    rhs = "".join(lhs[shared[d]] if d in shared else next(rest) for d in range(rhs_ndim))
    batch = "".join(lhs[d] for d in lhs_batch)
    out = batch + "".join(c for c in lhs + rhs if c not in batch and (c in lhs) != (c in rhs))
    return lhs, rhs, out


def _dims(a: str, b: str, out: str) -> tuple[Any, str]:
    """Returns dimension numbers for ``a,b->out`` and the order in which the result's dims come."""
    batch = [c for c in a if c in b and c in out]
    summed = [c for c in a if c in b and c not in out]
    order = "".join([*batch, *(c for c in a if c not in b), *(c for c in b if c not in a)])
    contract = ([a.index(c) for c in summed], [b.index(c) for c in summed])
    return (contract, ([a.index(c) for c in batch], [b.index(c) for c in batch])), order


def _direct(a: str, b: str, out: str) -> bool:
    return _dims(a, b, out)[1] == out


def _moved(x: jax.Array, order: str, out: str) -> jax.Array:
    """Returns ``x`` with dims ``order`` as ``out``; dims that it lacks have size 1."""
    kept = [c for c in out if c in order]
    x = jnp.transpose(x, [order.index(c) for c in kept])
    return jnp.expand_dims(x, [i for i, c in enumerate(out) if c not in order])


def contract(
    a: Quantized, a_dims: str, b: Quantized, b_dims: str, out: str, *, precision: Any = None
) -> jax.Array:
    """Contracts quantized operands; scales are constant along the dims that are summed.

    Args:
        a: Operand.
        a_dims: A letter for each of its dims.
        b: Operand.
        b_dims: A letter for each of its dims; shared ones that ``out`` lacks are summed.
        out: The result's dims.
        precision: Of values that are wider floats; see ``jax.lax.dot_general``.

    Returns:
        The product, float32.
    """
    if not _direct(a_dims, b_dims, out) and _direct(b_dims, a_dims, out):
        a, a_dims, b, b_dims = b, b_dims, a, a_dims
    dims, order = _dims(a_dims, b_dims, out)
    integers = jnp.issubdtype(a.values.dtype, jnp.integer)
    sums = lax.dot_general(
        a.values,
        b.values,
        dims,
        precision=precision,
        preferred_element_type=jnp.int32 if integers else jnp.float32,
    )
    result = _moved(sums, order, out).astype(jnp.float32)
    for operand, names in ((a, a_dims), (b, b_dims)):
        summed = tuple(i for i, c in enumerate(names) if c not in out)
        kept = "".join(c for c in names if c in out)
        result = result * _moved(jnp.squeeze(operand.scale, summed), kept, out)
    return result


def contract_blocks(
    a: jax.Array, a_dims: str, a_how: Operand, b: jax.Array, b_dims: str, b_how: Operand, out: str
) -> jax.Array:
    """Quantizes blocks along the sum and contracts, by ``jax.lax.scaled_dot``; float32.

    Hardware without such products multiplies in bfloat16, which holds the scaled values exactly.
    """
    if not _direct(a_dims, b_dims, out) and _direct(b_dims, a_dims, out):
        a, a_dims, a_how, b, b_dims, b_how = b, b_dims, b_how, a, a_dims, a_how
    _, order = _dims(a_dims, b_dims, out)
    batch = "".join(c for c in a_dims if c in b_dims and c in out)
    summed = "".join(c for c in a_dims if c in b_dims and c not in out)

    def blocked(x: jax.Array, dims: str, how: Operand) -> tuple[jax.Array, jax.Array, list[int]]:
        free = "".join(c for c in dims if c not in batch and c not in summed)
        x = jnp.transpose(x, [dims.index(c) for c in batch + free + summed])
        lead, sizes = x.shape[: len(batch)], x.shape[len(batch) : len(batch) + len(free)]
        x = x.reshape(*lead, int(np.prod(sizes)), -1)
        # Two blocks at least: a scale for one sum alone is no block scale to the compiler.
        size = max(-(-x.shape[-1] // how.block), 2) * how.block
        pad = [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]
        return *quantize_blocks(jnp.pad(x, pad), how), list(sizes)

    a_values, a_scale, a_sizes = blocked(a, a_dims, a_how)
    b_values, b_scale, b_sizes = blocked(b, b_dims, b_how)
    batch_dims, last = tuple(range(len(batch))), (len(batch) + 1,)
    sums = lax.scaled_dot(
        a_values,
        b_values,
        lhs_scale=a_scale,
        rhs_scale=b_scale,
        dimension_numbers=((last, last), (batch_dims, batch_dims)),
        preferred_element_type=jnp.float32,
    )
    sums = sums.reshape(*sums.shape[: len(batch)], *a_sizes, *b_sizes)
    return _moved(sums, order, out)


def quantized_product(
    plan: Plan,
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    *,
    preferred_element_type: Any = None,
    magnitudes: Magnitudes = AT_HAND,
    key: jax.Array | None = None,
) -> jax.Array:
    """``jax.lax.dot_general`` with quantized operands, forward and backward.

    Args:
        plan: How each operand and the gradient are quantized.
        lhs: Activations, by convention.
        rhs: Weights, by convention.
        dimension_numbers: As for ``jax.lax.dot_general``.
        preferred_element_type: Dtype of the result; default that of the operands.
        magnitudes: What scales operands that are not scaled by the values at hand: each a scalar,
            or of the operand's rank with size 1 along the dims that share a scale.
        key: PRNG key, for stochastic rounding of the gradient.

    Returns:
        The product.
    """
    lhs_dims, rhs_dims, out = labels(dimension_numbers, lhs.ndim, rhs.ndim)
    compute = jnp.dtype(jnp.result_type(lhs, rhs))
    dtype = compute if preferred_element_type is None else jnp.dtype(preferred_element_type)
    static = _Static(plan, lhs_dims, rhs_dims, out, dtype, compute)
    return cast("jax.Array", _product(static, lhs, rhs, magnitudes, key))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(static: _Static, lhs: Any, rhs: Any, magnitudes: Magnitudes, key: Any) -> jax.Array:
    return _forward(static, lhs, rhs, magnitudes, key)[0]


def _forward(
    static: _Static, lhs: Any, rhs: Any, magnitudes: Magnitudes, key: Any
) -> tuple[jax.Array, Any]:
    plan = static.plan
    a = _Side(lhs, static.lhs, plan.lhs, magnitudes.lhs)
    b = _Side(rhs, static.rhs, plan.rhs, magnitudes.rhs)
    y = _multiply(static, a, b, static.out, quantized=True)
    saved = (a.saved(), b.saved(), magnitudes, key, _empty(lhs), _empty(rhs))
    return y.astype(static.dtype), saved


def _backward(static: _Static, saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, magnitudes, key, lhs_like, rhs_like = saved
    plan = static.plan
    has_grad = plan.grad is not None
    few_bits = has_grad and plan.grad_lhs
    b_amax = magnitudes.rhs_back if few_bits else magnitudes.rhs
    a = _Side(lhs, static.lhs, plan.lhs, magnitudes.lhs, out=static.out)
    b = _Side(rhs, static.rhs, plan.rhs, b_amax, out=static.out)
    keys = (None, None) if key is None else tuple(jax.random.split(key))
    g = _Side(grad, static.out, plan.grad, key=keys[0])
    lhs_grad = _multiply(static, g, b, static.lhs, quantized=few_bits)
    g = _Side(grad, static.out, plan.grad, key=keys[1])
    rhs_grad = _multiply(static, a, g, static.rhs, quantized=has_grad and plan.grad_rhs)
    return (
        lhs_grad.astype(lhs_like.dtype),
        rhs_grad.astype(rhs_like.dtype),
        jax.tree.map(jnp.zeros_like, magnitudes),
        None if key is None else np.zeros(key.shape, jax.dtypes.float0),
    )


_product.defvjp(_forward, _backward)


class _Side(NamedTuple):
    """One operand of a product: an array, or what was quantized of it before."""

    value: Any
    dims: str
    how: Operand | None
    amax: Any = None
    key: Any = None
    out: str = ""  # dims of the forward product, of whose values the backward ones are

    def quantized(self, out: str) -> Quantized:
        """Returns it quantized for a product whose result has the dims ``out``."""
        if isinstance(self.value, Quantized):
            return self.value
        assert self.how is not None
        shared = tuple(
            i for i, c in enumerate(self.dims) if self.how.granularity == "tensor" or c not in out
        )
        return quantize(self.value, self.how, shared, amax=self.amax, key=self.key)

    def plain(self, dtype: Any) -> jax.Array:
        """Returns it as the forward product saw it."""
        if isinstance(self.value, Quantized):
            return dequantize(self.value, dtype)
        if self.how is None or not self.out:
            return self.value.astype(dtype)
        if self.how.granularity == "block":
            return _through_blocks(self.value, self.dims, self.how, self.out).astype(dtype)
        return dequantize(self.quantized(self.out), dtype)

    def saved(self) -> Any:
        """Returns what the backward products need: of one scale for all, the few bits suffice."""
        if self.how is not None and self.how.granularity == "tensor":
            return self.quantized("")
        return self.value


def _through_blocks(x: jax.Array, dims: str, how: Operand, out: str) -> jax.Array:
    summed = "".join(c for c in dims if c not in out)
    order = "".join(c for c in dims if c in out) + summed
    moved = jnp.transpose(x, [dims.index(c) for c in order])
    kept = moved.shape[: len(dims) - len(summed)]
    flat = moved.reshape(*kept, -1)
    pad = -flat.shape[-1] % how.block
    padded = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, pad)])
    values, scale = quantize_blocks(padded, how)
    wide = jnp.repeat(scale.astype(jnp.float32), how.block, axis=-1)
    back = (values.astype(jnp.float32) * wide)[..., : flat.shape[-1]].reshape(moved.shape)
    return jnp.transpose(back, [order.index(c) for c in dims])


def _multiply(static: _Static, a: _Side, b: _Side, out: str, *, quantized: bool) -> jax.Array:
    if quantized and a.how is not None and b.how is not None:
        if "block" in (a.how.granularity, b.how.granularity):
            return contract_blocks(a.value, a.dims, a.how, b.value, b.dims, b.how, out)
        return contract(a.quantized(out), a.dims, b.quantized(out), b.dims, out)
    forward = out == static.out and not a.out
    if forward:  # one of the two is quantized alone
        a, b = (side._replace(out=out) for side in (a, b))
    x, y = a.plain(static.compute), b.plain(static.compute)
    x_dims, y_dims = a.dims, b.dims
    if not _direct(x_dims, y_dims, out) and _direct(y_dims, x_dims, out):
        x, x_dims, y, y_dims = y, y_dims, x, x_dims
    dims, order = _dims(x_dims, y_dims, out)
    sums = lax.dot_general(
        x, y, dims, precision=static.plan.precision, preferred_element_type=jnp.float32
    )
    return _moved(sums, order, out)


def _empty(x: jax.Array) -> jax.Array:
    """Carries a dtype through the residuals."""
    return jnp.empty((0,), x.dtype)
