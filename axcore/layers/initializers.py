"""Initializers: frozen values with a text form, called as ``initializer(key, spec)``."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from axcore.errors import ModuleError
from axcore.module import ParameterSpec

__all__ = ["Constant", "Normal", "Ones", "VarianceScaling", "Zeros"]


@dataclasses.dataclass(frozen=True)
class Zeros:
    """All zeros."""

    def __call__(self, key: jax.Array, spec: ParameterSpec) -> jax.Array:
        """Returns zeros of the spec's shape and dtype."""
        del key
        return jnp.zeros(spec.shape, spec.dtype)


@dataclasses.dataclass(frozen=True)
class Ones:
    """All ones."""

    def __call__(self, key: jax.Array, spec: ParameterSpec) -> jax.Array:
        """Returns ones of the spec's shape and dtype."""
        del key
        return jnp.ones(spec.shape, spec.dtype)


@dataclasses.dataclass(frozen=True)
class Constant:
    """All ``value``."""

    value: float

    def __call__(self, key: jax.Array, spec: ParameterSpec) -> jax.Array:
        """Returns ``value`` in the spec's shape and dtype."""
        del key
        return jnp.full(spec.shape, self.value, spec.dtype)


@dataclasses.dataclass(frozen=True)
class Normal:
    """Normal with mean 0 and standard deviation ``stddev``, drawn in float32."""

    stddev: float = 0.02

    def __post_init__(self):
        _check_not_negative(self, "stddev")

    def __call__(self, key: jax.Array, spec: ParameterSpec) -> jax.Array:
        """Returns a draw of the spec's shape and dtype."""
        return (self.stddev * jax.random.normal(key, spec.shape)).astype(spec.dtype)


@dataclasses.dataclass(frozen=True)
class VarianceScaling:
    """Variance ``scale / n`` with n the fan-in, fan-out or their mean.

    ``scale=1, mode="fan_in"`` is LeCun's initialization (Efficient BackProp, 1998), ``scale=2``
    He's (arXiv:1502.01852), ``scale=1, mode="fan_avg"`` Glorot's (AISTATS 2010).

    Attributes:
        scale: Numerator of the variance.
        mode: What n is; fans are the products of the spec's ``fan_in_dims`` and ``fan_out_dims``.
        distribution: ``truncated_normal`` cuts at two standard deviations, variance restored.
    """

    scale: float = 1.0
    mode: Literal["fan_in", "fan_out", "fan_avg"] = "fan_in"
    distribution: Literal["truncated_normal", "normal", "uniform"] = "truncated_normal"

    def __post_init__(self):
        _check_not_negative(self, "scale")

    def __call__(self, key: jax.Array, spec: ParameterSpec) -> jax.Array:
        """Returns a draw of the spec's shape and dtype."""
        fan_in = math.prod(spec.shape[d] for d in spec.fan_in_dims)
        fan_out = math.prod(spec.shape[d] for d in spec.fan_out_dims)
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[self.mode]
        stddev = math.sqrt(self.scale / max(fan, 1))
        if self.distribution == "truncated_normal":
            # Standard deviation of a unit normal cut at +-2.
            draw = jax.random.truncated_normal(key, -2.0, 2.0, spec.shape) / 0.87962566103423978
        elif self.distribution == "normal":
            draw = jax.random.normal(key, spec.shape)
        else:
            draw = jax.random.uniform(key, spec.shape, minval=-math.sqrt(3), maxval=math.sqrt(3))
        return (stddev * draw).astype(spec.dtype)


def _check_not_negative(initializer: Normal | VarianceScaling, name: str) -> None:
    value = getattr(initializer, name)
    if not (0 <= value < math.inf):
        raise ModuleError(
            f"{type(initializer).__name__} got {name}={value}, expected a finite number >= 0",
            code="AX338",
        )
