"""Layers that know nothing of us: one in Flax NNX, one in Equinox, one plain function."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def nnx_mlp():
    """Returns the NNX class; flax is imported by who uses it."""
    from flax import nnx

    class MLP(nnx.Module):
        def __init__(self, features, hidden=8, rate=0.0, *, rngs):
            self.up = nnx.Linear(features, hidden, rngs=rngs)
            self.norm = nnx.BatchNorm(hidden, momentum=0.5, rngs=rngs)
            self.drop = nnx.Dropout(rate, rngs=rngs)
            self.down = nnx.Linear(hidden, features, rngs=rngs)

        def __call__(self, x):
            return self.down(self.drop(jax.nn.gelu(self.norm(self.up(x)))))

    return MLP


def make_nnx_mlp(features, hidden=8, rate=0.0, *, rngs):
    return nnx_mlp()(features, hidden, rate, rngs=rngs)


def make_nnx_linear(features, *, rngs):
    from flax import nnx

    names = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", None))
    return nnx.Linear(features, features, kernel_init=names, rngs=rngs)


def make_nnx_writer(*, rngs):
    """A module that sets its own parameter."""
    from flax import nnx

    class Writer(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.ones(3))

        def __call__(self, x):
            self.w[...] = self.w[...] + 1.0
            return x * self.w[...]

    return Writer(rngs)


def make_nnx_noise(*, rngs):
    """A module that draws in evaluation too, and sows."""
    from flax import nnx

    class Noise(nnx.Module):
        def __init__(self, rngs):
            self.rngs = rngs

        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x.sum())
            return x + jax.random.normal(self.rngs(), x.shape)

    return Noise(rngs)


def init_mlp(key, features, hidden=8):
    one, two = jax.random.split(key)
    return {
        "layers": [
            jax.random.normal(one, (features, hidden)) / features**0.5,
            jax.random.normal(two, (hidden, features)) / hidden**0.5,
        ],
        "bias": jnp.zeros(features),
        "steps": jnp.zeros((), jnp.int32),
    }


def apply_mlp(params, x):
    up, down = params["layers"]
    return jnp.tanh(x @ up) @ down + params["bias"]


def apply_noisy(params, x, *, key, is_training):
    noise = jax.random.normal(key, x.shape) if is_training else 0.0
    return apply_mlp(params, x) + noise
