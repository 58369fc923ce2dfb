"""Quantized values: numbers of a few bits and the scales that give them back their size.

``x ~ values * scale``. A scale is float32 and has the rank of ``x``, with size 1 along every dim
that shares it, or is a power of two per block of one dim (microscaling formats).
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from axcore.errors import ConfigError

__all__ = [
    "Operand",
    "Quantized",
    "dequantize",
    "largest",
    "quantize",
    "quantize_blocks",
]

Granularity = Literal["tensor", "channel", "block"]

# Integers are symmetric: of -128 and -8 no use is made, so that a product cannot be biased.
_LARGEST = {
    "int8": 127.0,
    "int4": 7.0,
    "float8_e4m3fn": 448.0,
    "float8_e4m3": 240.0,  # with infinities
    "float8_e3m4": 15.5,
    "float8_e5m2": 57344.0,
}
_MIN_EXPONENT, _MAX_EXPONENT = -127, 127  # of float8_e8m0fnu


def largest(dtype: str) -> float:
    """Returns the largest magnitude that a quantized dtype holds.

    Raises:
        ConfigError: It is no dtype that values are quantized to.
    """
    if dtype not in _LARGEST:
        raise ConfigError(
            f"values cannot be quantized to {dtype!r}",
            code="AX433",
            hint=f"expected one of {', '.join(_LARGEST)}",
        )
    return _LARGEST[dtype]


@dataclasses.dataclass(frozen=True)
class Operand:
    """How one operand of a product is quantized.

    Attributes:
        dtype: ``int8``, ``int4``, or a float8: ``float8_e4m3fn``, ``float8_e4m3``,
            ``float8_e3m4``, ``float8_e5m2``. Values of int4 are held in int8, since products take
            no int4.
        granularity: What shares a scale: the whole ``tensor``; a ``channel``, that is everything
            that one sum of the product runs over; or a ``block`` of consecutive elements of that.
        block: Elements of a block.
        clip: The largest magnitude that is kept, as a share of the channel's; what is beyond
            saturates. Below 1 the many small values get finer steps.
        stochastic: Whether integers are rounded up or down at random, unbiased.

    Raises:
        ConfigError: A dtype or number that cannot be.
    """

    dtype: str
    granularity: Granularity = "channel"
    block: int = 32
    clip: float = 1.0
    stochastic: bool = False

    def __post_init__(self) -> None:
        largest(self.dtype)
        if not 0.0 < self.clip <= 1.0:
            raise ConfigError(f"clip is {self.clip}, expected a share in (0, 1]", code="AX433")
        if self.block < 2:
            raise ConfigError(f"block is {self.block}, expected at least 2", code="AX433")
        if self.stochastic and not self.dtype.startswith("int"):
            raise ConfigError(
                f"stochastic rounding is for integers, the dtype is {self.dtype}", code="AX433"
            )


class Quantized(NamedTuple):
    """Quantized values.

    Attributes:
        values: The array of few bits, of the original's shape.
        scale: float32, broadcastable to it.
    """

    values: jax.Array
    scale: jax.Array


def quantize(
    x: jax.Array,
    operand: Operand,
    shared: tuple[int, ...],
    *,
    amax: jax.Array | None = None,
    key: jax.Array | None = None,
) -> Quantized:
    """Quantizes an array with one scale for each of its channels, or for all of it.

    Args:
        x: Float array.
        operand: How; its granularity is what ``shared`` says.
        shared: Dims that share a scale.
        amax: Magnitude that the largest value stands for, instead of that of ``x``; broadcastable.
        key: PRNG key, for stochastic rounding.

    Returns:
        Values and scale. Where all is zero the scale is 1. A scale is NaN where a value is.

    Example:
        >>> x = jnp.array([[1.0, -2.0], [0.5, 0.25]])
        >>> q = quantize(x, Operand("int8"), (1,))
        >>> q.values.tolist()
        [[64, -127], [127, 64]]
    """
    x = x.astype(jnp.float32)
    if amax is None:
        amax = jnp.max(jnp.abs(x), axis=shared, keepdims=True)
    limit = largest(operand.dtype)
    scale = amax * (operand.clip / limit)
    # A subnormal scale would make its inverse infinite. Integers have no NaN: their scale has.
    scale = jnp.where(scale <= jnp.finfo(jnp.float32).tiny, 1.0, scale)
    scale = jnp.reshape(scale, (1,) * x.ndim) if scale.ndim == 0 else scale
    return Quantized(_rounded(x / scale, operand, key), scale)


def _rounded(x: jax.Array, operand: Operand, key: jax.Array | None) -> jax.Array:
    """Returns float32 values of the dtype's range in the dtype that holds them."""
    limit = largest(operand.dtype)
    if not operand.dtype.startswith("int"):
        # A cast alone makes NaN of what is out of range.
        return jnp.clip(x, -limit, limit).astype(operand.dtype)
    if operand.stochastic:
        if key is None:
            raise ConfigError("stochastic rounding needs a PRNG key", code="AX433")
        x = jnp.floor(x + jax.random.uniform(key, x.shape, jnp.float32))
    else:
        x = jnp.round(x)
    return jnp.clip(x, -limit, limit).astype(jnp.int8)


def quantize_blocks(x: jax.Array, operand: Operand) -> tuple[jax.Array, jax.Array]:
    """Quantizes blocks of the last dim, each with a power of two as its scale (OCP MX formats).

    The exponent is rounded up, so that no value saturates: Mishra et al., arXiv:2506.08027.

    Args:
        x: (..., n); n is a multiple of the block.
        operand: How.

    Returns:
        Values (..., n) and scales (..., n / block) of ``float8_e8m0fnu``.
    """
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, operand.block)
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    fraction, exponent = jnp.frexp(amax / largest(operand.dtype))  # fraction in [1/2, 1)
    exponent = jnp.where(fraction == 0.5, exponent - 1, exponent)
    exponent = jnp.clip(jnp.where(amax > 0, exponent, 0), _MIN_EXPONENT, _MAX_EXPONENT)
    scale = jnp.ldexp(jnp.ones((), jnp.float32), exponent)
    values = _rounded(blocks / scale, operand, None).reshape(x.shape)
    return values, scale[..., 0].astype(jnp.float8_e8m0fnu)


def dequantize(x: Quantized, dtype: jax.typing.DTypeLike = jnp.float32) -> jax.Array:
    """Returns ``values * scale``."""
    return (x.values.astype(jnp.float32) * x.scale).astype(dtype)
