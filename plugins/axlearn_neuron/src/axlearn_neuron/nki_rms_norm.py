"""RMSNorm by a NKI kernel of this package; the backward pass is XLA's, from the kept factors.

Importing this module needs the vendor's packages.

References:
    arXiv:1910.07467.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp

from axlearn_neuron._presence import nki_call, vendor_module
from axlearn_neuron._target import cores_per_device

__all__ = ["rms_norm_nki"]

nki_call()  # the bridge: without it the kernel below is no part of a JAX program
_nl: Any = vendor_module("neuronxcc.nki.language", "neuronx-cc")
_kernel: Any = vendor_module("axlearn_neuron._nki_rms_norm_kernel", "neuronx-cc").rms_norm_kernel


def rms_norm_nki(x: jax.Array, scale: jax.Array | None = None, *, eps: float = 1e-6) -> jax.Array:
    """RMSNorm over the last dim; see :func:`axcore.ops.rms_norm`.

    Args:
        x: (..., D) bfloat16 or float32.
        scale: (D,) or None for 1.
        eps: Added to the mean square.

    Returns:
        (..., D) in x's dtype.
    """
    if scale is None:
        scale = jnp.ones(x.shape[-1:], jnp.float32)
    rows = x.reshape(-1, x.shape[-1])
    out = cast("jax.Array", _rms_norm(rows, scale, eps, cores_per_device()))
    return out.reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x: jax.Array, scale: jax.Array, eps: float, cores: int) -> jax.Array:
    return _forward(x, scale, eps, cores)[0]


def _forward(x: jax.Array, scale: jax.Array, eps: float, cores: int) -> tuple[jax.Array, Any]:
    grid = _nl.nc(cores) if cores > 1 else 1
    out, factors = _kernel[(grid,)](x, scale.astype(jnp.float32)[None], eps)
    return out, (x, scale, factors)


def _backward(eps: float, cores: int, saved: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    del eps, cores
    x, scale, factors = saved  # (rows, D), (D,), (rows, 1)
    normalized = x.astype(jnp.float32) * factors
    wide = grad.astype(jnp.float32)
    inner = wide * scale.astype(jnp.float32)
    along = jnp.mean(inner * normalized, axis=-1, keepdims=True)
    x_grad = factors * (inner - normalized * along)
    return x_grad.astype(x.dtype), jnp.sum(wide * normalized, axis=0).astype(scale.dtype)


_rms_norm.defvjp(_forward, _backward)
