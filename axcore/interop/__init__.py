"""Layers of other libraries, and plain functions, as children of our models; see docs/interop.md.

``NNXLayer`` (Flax NNX), ``EquinoxLayer`` and ``FunctionLayer`` are layers like any other: their
parameters are described before they exist, sharded by logical axes, trained, frozen and saved.
``ForeignFeedForward`` and ``ForeignNorm`` put one into the slot of that role. Flax and Equinox are
imported when such a layer is built.

The other way round, a module of ours is a pure function:

Example:
    >>> import jax, jax.numpy as jnp
    >>> from axcore import functional
    >>> from axcore.layers import Linear
    >>> layer = Linear.Config(input_dim=3, output_dim=2).instantiate(name="linear")
    >>> params = layer.initialize(jax.random.key(0))  # a pytree for any optimizer or library
    >>> def apply(params, x):
    ...     return functional(layer, state=params, inputs=(x,), is_training=False)[0]
    >>> jax.jit(apply)(params, jnp.ones((4, 3))).shape
    (4, 2)
"""

from axcore.interop._equinox import EquinoxLayer
from axcore.interop._foreign import ForeignLayer, ForeignLeaf
from axcore.interop._function import FunctionLayer
from axcore.interop._nnx import NNXLayer
from axcore.interop._roles import ForeignFeedForward, ForeignNorm

__all__ = [
    "EquinoxLayer",
    "ForeignFeedForward",
    "ForeignLayer",
    "ForeignLeaf",
    "ForeignNorm",
    "FunctionLayer",
    "NNXLayer",
]
