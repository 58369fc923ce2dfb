"""A KV cache in few bits: less memory, and less of it to read for every token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from axcore.layers.kv_cache import ContiguousView, write_tokens
from axcore.layers.roles import BaseKVCache, SequenceInfo
from axcore.module import no_context
from axcore.quantization._values import Operand, Quantized, dequantize, quantize

__all__ = ["QuantizedKVCache"]

_SCALE = "_scale"


class QuantizedKVCache(BaseKVCache):
    """Slots as in :class:`axcore.layers.ContiguousKVCache`, with a scale for each token and head.

    Every tensor has a buffer (batch, ..., max_len, last dim) of few bits and one of float32 scales
    (batch, ..., max_len, 1). Kernels get them widened: what they read from memory is the few bits
    as long as the compiler fuses that, which XLA does with its reference attention.
    """

    class Config(BaseKVCache.Config):
        """``dtype`` of the buffers."""

        dtype: Literal["int8", "float8_e4m3fn"] = "int8"

    @no_context
    def init(self, batch: int, max_len: int) -> dict[str, Any]:
        """Returns zeroed buffers and lengths of 0."""
        caches: dict[str, Any] = {"lengths": jnp.zeros((batch,), jnp.int32)}
        for name, shape in self.cfg.tensors.items():
            slots = (batch, *shape[:-1], max_len)
            caches[name] = jnp.zeros((*slots, shape[-1]), self.cfg.dtype)
            caches[name + _SCALE] = jnp.zeros((*slots, 1), jnp.float32)
        return caches

    def extend(self, values: Mapping[str, jax.Array], info: SequenceInfo) -> ContiguousView:
        """Quantizes and writes (batch, seq, ...) tensors at their positions."""
        ctx, positions = self._context, info.positions
        how = Operand(self.cfg.dtype)
        wide: dict[str, jax.Array] = {}
        for name, value in values.items():
            axes = self.cfg.axes[name]
            made = []
            q = quantize(value, how, (value.ndim - 1,))
            for key, part, last in ((name, q.values, axes[-1]), (name + _SCALE, q.scale, None)):
                buffer = write_tokens(ctx.state[key], part, positions, ctx.target.mesh)
                buffer = self._constrain(buffer, "batch", *axes[:-1], None, last)
                ctx.set_state(key, buffer)
                made.append(buffer)
            wide[name] = dequantize(Quantized(*made), value.dtype)
        lengths = jnp.maximum(ctx.state["lengths"], jnp.max(positions, axis=1) + 1)
        ctx.set_state("lengths", lengths)
        return ContiguousView(wide, lengths)

    def rollback(self, lengths: jax.Array) -> None:
        """Forgets all but the first ``lengths`` (batch,) tokens of each row."""
        ctx = self._context
        ctx.set_state("lengths", jnp.minimum(ctx.state["lengths"], lengths))
