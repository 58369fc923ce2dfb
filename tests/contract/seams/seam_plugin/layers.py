"""Layers for the seams: a contraction, a query/key transform, caches, an axis and a remat site."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from axcore import current_context
from axcore.layers import BaseFeedForward, BaseKVCache, BaseQueryKeyTransform, Linear
from axcore.module import no_context
from axcore.ops import DenseKV, DotGeneral
from axcore.parallel import Axis
from axcore.remat import declare_site, site

WIDE_MLP = Axis("wide_mlp", like="mlp", description="hidden units of the seam plugin's layer")
WIDE_HIDDEN = declare_site("wide_hidden", "activation of the seam plugin's layer")


def quantize(x, bits):
    """Returns integers of ``bits`` bits in int8 and the float32 scale of the whole array."""
    top = 2.0 ** (bits - 1) - 1
    scale = jnp.maximum(jnp.max(jnp.abs(x)), 1e-30) / top
    return jnp.round(x / scale).astype(jnp.int8), scale


class Int8Dot(DotGeneral):
    """Quantizes both operands per tensor; gradients are those of the plain product."""

    class Config(DotGeneral.Config):
        bits: int = 8

    def forward(self, lhs, rhs, dimension_numbers, *, preferred_element_type=None):
        plain = lax.dot_general(
            lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type
        )
        (lhs_int, lhs_scale), (rhs_int, rhs_scale) = (
            quantize(lax.stop_gradient(x.astype(jnp.float32)), self.cfg.bits) for x in (lhs, rhs)
        )
        sums = lax.dot_general(
            lhs_int, rhs_int, dimension_numbers, preferred_element_type=jnp.int32
        )
        quantized = (sums * (lhs_scale * rhs_scale)).astype(plain.dtype)
        return plain + lax.stop_gradient(quantized - plain)


class Rotary(BaseQueryKeyTransform):
    """Rotates pairs (i, i + head_dim / 2) by position * base ** (-2 i / head_dim)."""

    class Config(BaseQueryKeyTransform.Config):
        base: float = 100.0

    def forward(self, q, k, info):
        half = self.cfg.head_dim // 2
        rates = self.cfg.base ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angles = info.positions[..., None, None] * rates  # (batch, seq, 1, half)
        cos, sin = jnp.cos(angles), jnp.sin(angles)

        def rotate(x):
            a, b = x[..., :half], x[..., half:]
            return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)

        return rotate(q), rotate(k)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RingView:
    """What the ring held before the call, and the call's own tokens behind it."""

    key: jax.Array
    value: jax.Array
    positions: jax.Array

    @property
    def kind(self):
        return "ring"

    def dense(self):
        return DenseKV(self.key, self.value, positions=self.positions, valid=self.positions >= 0)


class RingCache(BaseKVCache):
    """Keeps the last ``window`` tokens: position p of a row is in slot p mod window."""

    class Config(BaseKVCache.Config):
        window: int = 4

    @no_context
    def init(self, batch, max_len):
        del max_len  # memory does not grow with the length: that is what a ring is for
        lead = (batch, self.cfg.window)
        buffers = {
            name: jnp.zeros((*lead, *shape), self.compute_dtype)
            for name, shape in self.cfg.tensors.items()
        }
        return {**buffers, "positions": jnp.full(lead, -1, jnp.int32)}

    def extend(self, values: Mapping[str, jax.Array], info):
        ctx, window, positions = current_context(), self.cfg.window, info.positions
        rows = jnp.arange(positions.shape[0])[:, None]
        newest = jnp.max(positions, axis=1, keepdims=True)
        kept = (positions >= 0) & (positions > newest - window)
        slots = jnp.where(kept, positions % window, window)  # out of bounds: dropped
        new = {**values, "positions": positions}
        old = {name: ctx.state[name] for name in new}
        for name, value in new.items():
            ring = old[name].at[rows, slots].set(value.astype(old[name].dtype), mode="drop")
            ctx.set_state(name, ring)
        both = {n: jnp.concatenate([old[n], new[n].astype(old[n].dtype)], axis=1) for n in new}
        return RingView(**both)

    def rollback(self, lengths):
        ctx = current_context()
        positions = ctx.state["positions"]
        ctx.set_state("positions", jnp.where(positions < lengths[:, None], positions, -1))


class Wide(BaseFeedForward):
    """A plain feed-forward layer whose hidden dim has its own axis and its own remat site."""

    class Config(BaseFeedForward.Config):
        hidden_dim: int = 32
        up: Linear.Config = Linear.Config()
        down: Linear.Config = Linear.Config()

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)
        into, out = ("embed", WIDE_MLP.name), (WIDE_MLP.name, "embed")
        dims = dict(input_dim=cfg.input_dim, output_dim=cfg.hidden_dim)
        self.up = self._add_child("up", cfg.up, Linear, axes=into, **dims)
        dims = dict(input_dim=cfg.hidden_dim, output_dim=cfg.input_dim)
        self.down = self._add_child("down", cfg.down, Linear, axes=out, **dims)

    def forward(self, x, info):
        del info
        hidden = jnp.tanh(self.up(x))
        hidden = current_context().constrain(hidden, ("batch", "seq", WIDE_MLP.name))
        return self.down(jnp.sin(site(hidden, WIDE_HIDDEN)))
