"""Kernels: the reference's maths, written so that a program shows which one it has."""

import jax
import jax.numpy as jnp


def seam_cpu_rms_norm(x, scale=None, *, eps=1e-6):
    """Divides by a root; marked by a call of ``_seam_cpu``."""

    @jax.jit
    def _seam_cpu(x):
        wide = x.astype(jnp.float32)
        return wide / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)

    return _scaled(_seam_cpu(x), scale, x.dtype)


def seam_npu_rms_norm(x, scale=None, *, eps=1e-6):
    """Multiplies by a power; marked by a call of ``_seam_npu``."""

    @jax.jit
    def _seam_npu(x):
        wide = x.astype(jnp.float32)
        return wide * (jnp.mean(wide * wide, axis=-1, keepdims=True) + eps) ** -0.5

    return _scaled(_seam_npu(x), scale, x.dtype)


def _scaled(y, scale, dtype):
    return (y if scale is None else y * scale.astype(jnp.float32)).astype(dtype)
