"""The kernel: the reference's maths under a name that programs show."""

import jax
import jax.numpy as jnp


def rms_norm(x, scale=None, *, eps=1e-6):
    """Divides by the root of the mean square."""

    @jax.jit
    def _fake_root(x):
        wide = x.astype(jnp.float32)
        return wide / jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)

    y = _fake_root(x)
    return (y if scale is None else y * scale.astype(jnp.float32)).astype(x.dtype)
