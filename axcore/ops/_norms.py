"""Normalization over the last dim, with float32 statistics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from axcore.errors import OpError
from axcore.ops._select import Operand, dispatch

__all__ = [
    "add_rms_norm",
    "add_rms_norm_xla",
    "layer_norm",
    "layer_norm_xla",
    "rms_norm",
    "rms_norm_xla",
]


def rms_norm(
    x: Float[Array, "... D"],
    scale: Float[Array, " D"] | None = None,
    eps: float = 1e-6,
    *,
    placed: tuple[str | None, ...] | None = None,
    implementation: str | None = None,
) -> Float[Array, "... D"]:
    r"""Root-mean-square normalization: :math:`x / \sqrt{\mathrm{mean}(x^2) + \epsilon} \cdot s`.

    Args:
        x: (..., D).
        scale: (D,) or None for 1.
        eps: Added to the mean square.
        placed: Logical axis that each dim of x lies by, where it is not ``("batch", "seq",
            "embed")`` (or heads): the positions between layers may be split further.
        implementation: Forces a kernel by name.

    Returns:
        (..., D) in x's dtype; statistics and products are float32.

    Raises:
        OpError: Shapes do not fit, or no acceptable kernel serves the call.

    References:
        arXiv:1910.07467.
    """
    _check("rms_norm", x, scale=scale)
    axes = _axes(x)
    return dispatch(
        "rms_norm",
        {"x": Operand(x, axes, placed), "scale": Operand(scale, ("embed",))},
        output_axes=axes,
        output_placed=placed,
        static={"eps": eps},
        options={"eps": eps},
        implementation=implementation,
    )


def add_rms_norm(
    x: Float[Array, "... D"],
    residual: Float[Array, "... D"],
    scale: Float[Array, " D"] | None = None,
    eps: float = 1e-6,
    *,
    placed: tuple[str | None, ...] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "... D"], Float[Array, "... D"]]:
    r"""The sum of a branch and the residual stream, and its RMS normalization, in one pass.

    :math:`h = x + r` and :math:`h / \sqrt{\mathrm{mean}(h^2) + \epsilon} \cdot s`. The sum is
    rounded to its dtype before it is normalized, as the two steps apart do.

    Args:
        x: What a branch adds, (..., D).
        residual: The stream, (..., D) in x's dtype.
        scale: (D,) or None for 1.
        eps: Added to the mean square.
        placed: As for :func:`rms_norm`.
        implementation: Forces a kernel by name.

    Returns:
        The normalized sum and the sum, both (..., D) in x's dtype.

    Raises:
        OpError: Shapes or dtypes do not fit, or no acceptable kernel serves the call.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise OpError(
            f"add_rms_norm got x {x.dtype}{x.shape} and residual {residual.dtype}{residual.shape}:"
            " expected equal shapes and dtypes",
            code="AX402",
        )
    _check("add_rms_norm", x, scale=scale)
    axes = _axes(x)
    return dispatch(
        "add_rms_norm",
        {
            "x": Operand(x, axes, placed),
            "residual": Operand(residual, axes, placed),
            "scale": Operand(scale, ("embed",)),
        },
        output_axes=(axes, axes),
        output_placed=None if placed is None else (placed, placed),
        static={"eps": eps},
        options={"eps": eps},
        implementation=implementation,
    )


def layer_norm(
    x: Float[Array, "... D"],
    scale: Float[Array, " D"] | None = None,
    bias: Float[Array, " D"] | None = None,
    eps: float = 1e-5,
    *,
    placed: tuple[str | None, ...] | None = None,
    implementation: str | None = None,
) -> Float[Array, "... D"]:
    r"""Layer normalization: :math:`(x - \mu) / \sqrt{\sigma^2 + \epsilon} \cdot s + b`.

    Args:
        x: (..., D).
        scale: (D,) or None for 1.
        bias: (D,) or None for 0.
        eps: Added to the variance (the biased estimate).
        placed: Logical axis that each dim of x lies by, where it is not ``("batch", "seq",
            "embed")`` (or heads): the positions between layers may be split further.
        implementation: Forces a kernel by name.

    Returns:
        (..., D) in x's dtype; statistics and products are float32.

    Raises:
        OpError: Shapes do not fit, or no acceptable kernel serves the call.

    References:
        arXiv:1607.06450.
    """
    _check("layer_norm", x, scale=scale, bias=bias)
    axes = _axes(x)
    return dispatch(
        "layer_norm",
        {
            "x": Operand(x, axes, placed),
            "scale": Operand(scale, ("embed",)),
            "bias": Operand(bias, ("embed",)),
        },
        output_axes=axes,
        output_placed=placed,
        static={"eps": eps},
        options={"eps": eps},
        implementation=implementation,
    )


def rms_norm_xla(x: jax.Array, scale: jax.Array | None = None, *, eps: float = 1e-6) -> jax.Array:
    """Reference of :func:`rms_norm`."""
    x_f32 = x.astype(jnp.float32)
    mean_square = jnp.mean(lax.square(x_f32), axis=-1, keepdims=True)
    out = x_f32 * lax.rsqrt(mean_square + eps)
    if scale is not None:
        out = out * scale.astype(jnp.float32)
    return out.astype(x.dtype)


def add_rms_norm_xla(
    x: jax.Array, residual: jax.Array, scale: jax.Array | None = None, *, eps: float = 1e-6
) -> tuple[jax.Array, jax.Array]:
    """Reference of :func:`add_rms_norm`."""
    total = x + residual
    return rms_norm_xla(total, scale, eps=eps), total


def layer_norm_xla(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    eps: float = 1e-5,
) -> jax.Array:
    """Reference of :func:`layer_norm`: two passes, since E[x²] - E[x]² cancels for large means."""
    x_f32 = x.astype(jnp.float32)
    centered = x_f32 - jnp.mean(x_f32, axis=-1, keepdims=True)
    variance = jnp.mean(lax.square(centered), axis=-1, keepdims=True)
    out = centered * lax.rsqrt(variance + eps)
    if scale is not None:
        out = out * scale.astype(jnp.float32)
    if bias is not None:
        out = out + bias.astype(jnp.float32)
    return out.astype(x.dtype)


def _axes(x: jax.Array) -> tuple[str | None, ...]:
    """Logical axes of (batch, seq, embed) activations, or of per-head queries and keys."""
    if x.ndim == 3:
        return ("batch", "seq", "embed")
    if x.ndim == 4:  # heads, as in query/key normalization
        return ("batch", "seq", "heads", "head_dim")
    return (*("batch",) * min(1, x.ndim - 1), *(None,) * max(0, x.ndim - 2), "embed")


def _check(op: str, x: jax.Array, **vectors: jax.Array | None) -> None:
    """Raises OpError unless the vectors have x's last dim."""
    if x.ndim < 1:
        raise OpError(f"{op} got a scalar: expected (..., D)", code="AX402")
    for name, vector in vectors.items():
        if vector is not None and vector.shape != x.shape[-1:]:
            raise OpError(
                f"{op} got x {x.shape} and {name} {vector.shape}: expected {name} {x.shape[-1:]}",
                code="AX402",
            )
