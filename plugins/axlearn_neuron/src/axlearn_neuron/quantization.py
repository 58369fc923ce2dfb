"""Training recipes with a selectable bit width, for what the tensor engine multiplies.

The products are those of :mod:`axcore.quantization` in the formats of these machines; the 16-bit
recipe is :class:`StochasticDot`. Functions return a recipe's config, as the hook's targets.

The tensor engine can round at random itself: ``NEURON_RT_STOCHASTIC_ROUNDING_EN=1`` in the
environment of the job makes the runtime do so for every conversion to fewer bits. The recipe here
is the same in software, for gradients alone, from the run's own key: it repeats to the bit.

References:
    Stochastic rounding: arXiv:1502.02551; float8: arXiv:2209.05433.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axcore.config import REQUIRED, Config, Required
from axcore.context import current_context
from axcore.module import Module
from axcore.ops.dot_general import DimensionNumbers
from axcore.quantization import (
    Fp8Dot,
    Int8Dot,
    Plan,
    Quantized,
    QuantizedDot,
    Recipe,
    Site,
    contract,
    labels,
)

__all__ = [
    "NeuronRecipe",
    "StochasticDot",
    "bf16_stochastic",
    "fp8_e3m4",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "round_stochastically",
]

Format = Literal["e4m3", "e5m2", "e3m4", "int8", "bf16_stochastic"]
_GRADIENTS = "float8_e5m2"


class NeuronRecipe(Recipe):
    """One recipe for all widths; the format says which."""

    class Config(Recipe.Config):
        """What products multiply."""

        format: Required[Format] = REQUIRED
        # Of float8: what shares a scale. Three exponent bits hold a channel, not a tensor.
        granularity: Literal["tensor", "channel"] = "tensor"

    def product(self, site: Site) -> Config:
        """Returns the product of the format."""
        del site
        own = self.cfg
        if own.format == "int8":
            return Int8Dot.Config(stochastic_rounding=True)
        if own.format == "bf16_stochastic":
            return StochasticDot.Config()
        return Fp8Dot.Config(
            dtype=f"float8_{own.format}", grad_dtype=_GRADIENTS, granularity=own.granularity
        )


def fp8_e4m3() -> Config:
    """Returns the recipe that multiplies e4m3, gradients e5m2."""
    return NeuronRecipe.Config(format="e4m3")


def fp8_e5m2() -> Config:
    """Returns the recipe that multiplies e5m2 throughout."""
    return NeuronRecipe.Config(format="e5m2")


def fp8_e3m4() -> Config:
    """Returns the recipe that multiplies e3m4 with a scale per channel, gradients e5m2."""
    return NeuronRecipe.Config(format="e3m4", granularity="channel")


def int8() -> Config:
    """Returns the recipe that multiplies int8 with gradients rounded at random.

    Groups of rows, of experts for example, are left: their product runs where there is no key.
    """
    return NeuronRecipe.Config(format="int8", grouped=False)


def bf16_stochastic() -> Config:
    """Returns the recipe that multiplies bfloat16 with gradients rounded at random.

    Groups of rows are left, as by :func:`int8`.
    """
    return NeuronRecipe.Config(format="bf16_stochastic", grouped=False)


class StochasticDot(QuantizedDot):
    """bfloat16 whose gradients are rounded up or down at random, so that their mean is kept.

    Operands are rounded to the nearest. Backward, the result's gradient and both operands'
    gradients are sums in float32 that :func:`round_stochastically` rounds.
    """

    class Config(QuantizedDot.Config):
        """Nothing of its own."""

    needs_context = True
    in_groups = False
    #: Of operands half a step of bfloat16; of gradients a step of theirs, and one of the result's.
    rounding_errors = (2.0**-8, 2.0**-8, 2.0**-6)

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        self.plan = Plan(lhs=None, rhs=None)

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        """All dtypes that hardware must multiply, forward and backward."""
        return (self.operand_dtype,)

    def forward(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        *,
        preferred_element_type: str | jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Contracts two arrays; see :meth:`axcore.ops.DotGeneral.forward`."""
        ctx = current_context()
        key = ctx.key() if ctx is not None and ctx.is_training else None
        dtype = preferred_element_type or jnp.result_type(lhs, rhs)
        dims = labels(dimension_numbers, lhs.ndim, rhs.ndim)
        return cast("jax.Array", _product(dims, lhs, rhs, key)).astype(dtype)


class _Saved(NamedTuple):
    """What the backward products need; the last two carry dtypes."""

    lhs: jax.Array
    rhs: jax.Array
    key: jax.Array | None
    lhs_like: jax.Array
    rhs_like: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dims: tuple[str, str, str], lhs: Any, rhs: Any, key: Any) -> jax.Array:
    return _forward(dims, lhs, rhs, key)[0]


def _forward(dims: tuple[str, str, str], lhs: Any, rhs: Any, key: Any) -> tuple[jax.Array, _Saved]:
    lhs_dims, rhs_dims, out = dims
    likes = jnp.empty((0,), lhs.dtype), jnp.empty((0,), rhs.dtype)
    lhs, rhs = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
    return _contract(lhs, lhs_dims, rhs, rhs_dims, out), _Saved(lhs, rhs, key, *likes)


def _backward(dims: tuple[str, str, str], saved: _Saved, grad: jax.Array) -> tuple[Any, Any, Any]:
    lhs_dims, rhs_dims, out = dims
    key = saved.key
    keys = (None, None, None) if key is None else tuple(jax.random.split(key, 3))
    grad = round_stochastically(grad, keys[0])
    lhs_grad = _contract(grad, out, saved.rhs, rhs_dims, lhs_dims)
    rhs_grad = _contract(saved.lhs, lhs_dims, grad, out, rhs_dims)
    return (
        round_stochastically(lhs_grad, keys[1]).astype(saved.lhs_like.dtype),
        round_stochastically(rhs_grad, keys[2]).astype(saved.rhs_like.dtype),
        None if key is None else np.zeros(key.shape, jax.dtypes.float0),
    )


_product.defvjp(_forward, _backward)


def _contract(a: jax.Array, a_dims: str, b: jax.Array, b_dims: str, out: str) -> jax.Array:
    """Returns the product of bfloat16 arrays, summed and returned in float32."""
    whole_a, whole_b = (Quantized(x, jnp.ones((1,) * x.ndim, jnp.float32)) for x in (a, b))
    return contract(whole_a, a_dims, whole_b, b_dims, out)


def round_stochastically(x: jax.Array, key: jax.Array | None) -> jax.Array:
    """Returns x in bfloat16, up or down at random with the mean kept.

    A float32 is a bfloat16 and 16 more bits: noise below the last kept bit is added, then the 16
    are dropped.

    Args:
        x: Float array of any shape.
        key: PRNG key; None rounds to the nearest.

    Returns:
        bfloat16 of x's shape. What is not finite stays as it is.
    """
    if key is None:
        return x.astype(jnp.bfloat16)
    wide = x.astype(jnp.float32)
    bits = lax.bitcast_convert_type(wide, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    kept = (bits + noise) & jnp.uint32(0xFFFF0000)
    rounded = lax.bitcast_convert_type(kept, jnp.float32)
    return jnp.where(jnp.isfinite(wide), rounded, wide).astype(jnp.bfloat16)
