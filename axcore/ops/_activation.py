"""Activations by name, and the gated product of SwiGLU-like feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from axcore.errors import OpError, did_you_mean
from axcore.ops._select import Operand, dispatch

__all__ = ["ACTIVATIONS", "activation", "gated_activation", "gated_activation_xla"]

ActivationFn = Callable[[jax.Array], jax.Array]


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _squared_relu(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def _identity(x: jax.Array) -> jax.Array:
    return x


#: Names that configurations may use.
ACTIVATIONS: Mapping[str, ActivationFn] = {
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "identity": _identity,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "squared_relu": _squared_relu,
    "tanh": jnp.tanh,
}


def activation(name: str | ActivationFn) -> ActivationFn:
    """The activation called ``name``; a callable is returned as it is.

    ``gelu`` is the exact form (erf), ``gelu_tanh`` the approximation that GPT-2 uses.

    Raises:
        OpError: There is no such activation.
    """
    if callable(name):
        return name
    if name not in ACTIVATIONS:
        raise OpError(
            f"no activation named {name!r}; known: {', '.join(ACTIVATIONS)}",
            code="AX405",
            hint=did_you_mean(name, ACTIVATIONS) or "give a function of one array instead",
        )
    return ACTIVATIONS[name]


_BY_NAME = activation  # where an argument has the same name


def gated_activation(
    gate: Float[Array, "... F"],
    up: Float[Array, "... F"],
    activation: str | ActivationFn = "silu",
    *,
    implementation: str | None = None,
) -> Float[Array, "... F"]:
    r"""The gated product :math:`f(\mathrm{gate}) \cdot \mathrm{up}` (SwiGLU for ``silu``).

    Args:
        gate: (..., F).
        up: (..., F), same dtype.
        activation: Name in ``ACTIVATIONS`` or a function of one array.
        implementation: Forces a kernel by name.

    Returns:
        (..., F) in gate's dtype.

    Raises:
        OpError: Shapes or dtypes differ, the name is unknown, or no kernel serves the call.

    References:
        arXiv:2002.05202.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise OpError(
            f"gated_activation got gate {gate.dtype}{gate.shape} and up {up.dtype}{up.shape}:"
            " expected equal shapes and dtypes",
            code="AX402",
        )
    middle = ("seq",) if gate.ndim == 3 else (None,) * max(0, gate.ndim - 2)
    axes = (*("batch",) * min(1, gate.ndim - 1), *middle, "mlp")
    return dispatch(
        "gated_activation",
        {"gate": Operand(gate, axes), "up": Operand(up, axes)},
        output_axes=axes,
        static={"activation": activation},
        options={"activation": activation if isinstance(activation, str) else "callable"},
        implementation=implementation,
    )


def gated_activation_xla(
    gate: jax.Array, up: jax.Array, *, activation: str | ActivationFn
) -> jax.Array:
    """Reference of :func:`gated_activation`."""
    return _BY_NAME(activation)(gate) * up
