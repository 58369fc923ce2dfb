"""Key/value caches: the contiguous kind, and making the caches of a whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from axcore.layers.roles import BaseKVCache, BaseMultiToken, SequenceInfo
from axcore.module import Module, no_context
from axcore.ops import DenseKV

__all__ = ["ContiguousKVCache", "ContiguousView", "init_cache", "merge_state", "write_tokens"]

# Rows up to which one new token each is written row by row, as slices in place: XLA runs a scatter
# of few rows as a loop, which takes longer (measured on CPU).
_MAX_SLICED_ROWS = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousView:
    """View of a contiguous cache: slot number equals position.

    Attributes:
        tensors: Named tensors of (batch, ..., max_len, last dim): slots come next to last.
        lengths: (batch,) int32 number of filled slots.
    """

    tensors: Mapping[str, jax.Array]
    lengths: jax.Array

    @property
    def kind(self) -> str:
        """``contiguous``; what kernels match on."""
        return "contiguous"

    def dense(self) -> DenseKV:
        """Returns keys and values (batch, max_len, kv_heads, head_dim), filled slots marked."""
        keys, values = (jnp.moveaxis(self.tensors[name], -2, 1) for name in ("key", "value"))
        slots = jnp.arange(keys.shape[1], dtype=jnp.int32)
        valid = slots[None, :] < self.lengths[:, None]
        return DenseKV(keys, values, positions=slots, valid=valid)


class ContiguousKVCache(BaseKVCache):
    """One (batch, ..., max_len, last dim) buffer per tensor; position p of a row is slot p.

    For keys and values that is (batch, kv_heads, max_len, head_dim), the order in which attention's
    products read them: with slots before heads, every token's step copies the whole cache.
    """

    class Config(BaseKVCache.Config):
        """``dtype`` of the buffers; None is the compute dtype."""

        dtype: str | None = None

    @no_context
    def init(self, batch: int, max_len: int) -> dict[str, Any]:
        """Returns zeroed buffers and lengths of 0."""
        dtype = jnp.dtype(self.cfg.dtype or self.compute_dtype)
        buffers = {
            name: jnp.zeros((batch, *shape[:-1], max_len, *shape[-1:]), dtype)
            for name, shape in self.cfg.tensors.items()
        }
        return {**buffers, "lengths": jnp.zeros((batch,), jnp.int32)}

    def extend(self, values: Mapping[str, jax.Array], info: SequenceInfo) -> ContiguousView:
        """Writes (batch, seq, ...) tensors at their positions; negative positions are not stored.

        The driver makes sure that positions stay below ``max_len``: a traced position cannot raise.
        """
        ctx, positions = self._context, info.positions
        new: dict[str, jax.Array] = {}
        for name, value in values.items():
            buffer = ctx.state[name]
            axes = self.cfg.axes[name]
            made = write_tokens(buffer, value.astype(buffer.dtype), positions, ctx.target.mesh)
            new[name] = self._constrain(made, "batch", *axes[:-1], None, *axes[-1:])
            ctx.set_state(name, new[name])
        lengths = jnp.maximum(ctx.state["lengths"], jnp.max(positions, axis=1) + 1)
        ctx.set_state("lengths", lengths)
        return ContiguousView(new, lengths)

    def rollback(self, lengths: jax.Array) -> None:
        """Forgets all but the first ``lengths`` (batch,) tokens of each row."""
        ctx = self._context
        ctx.set_state("lengths", jnp.minimum(ctx.state["lengths"], lengths))


def write_tokens(
    buffer: jax.Array, value: jax.Array, positions: jax.Array, mesh: jax.sharding.Mesh | None
) -> jax.Array:
    """Returns a buffer with tokens written at their positions, for caches to share.

    Args:
        buffer: (batch, ..., max_len, last).
        value: (batch, seq, ..., last), of the buffer's dtype.
        positions: int (batch, seq); negative ones are not stored.
        mesh: The mesh of the target, or None.
    """
    sliced = positions.shape[1] == 1 and positions.shape[0] <= _MAX_SLICED_ROWS
    write = _write_slices if sliced and (mesh is None or mesh.size == 1) else _scatter
    return write(buffer, value, positions)


def _scatter(buffer: jax.Array, value: jax.Array, positions: jax.Array) -> jax.Array:
    """Writes (batch, seq, ..., last) into (batch, ..., max_len, last) at (batch, seq) slots."""
    rows = jnp.arange(positions.shape[0])[:, None]
    # Out-of-bounds slots are dropped; a negative index would count from the end.
    slots = jnp.where(positions < 0, buffer.shape[-2], positions)
    between = [slice(None)] * (buffer.ndim - 3)
    return buffer.at[(rows, *between, slots)].set(value, mode="drop")


def _write_slices(buffer: jax.Array, value: jax.Array, positions: jax.Array) -> jax.Array:
    """The same for one token a row."""
    tokens = jnp.moveaxis(value, 1, -2)  # (batch, ..., 1, last)
    max_len, none = buffer.shape[-2], [0] * (buffer.ndim - 3)
    for row in range(buffer.shape[0]):
        position = positions[row, 0]
        start = (row, *none, jnp.clip(position, 0, max_len - 1), 0)
        token = tokens[row : row + 1]
        inside = (position >= 0) & (position < max_len)
        old = jax.lax.dynamic_slice(buffer, start, token.shape)
        buffer = jax.lax.dynamic_update_slice(buffer, jnp.where(inside, token, old), start)
    return buffer


def init_cache(
    module: Module, batch: int, max_len: int, *, memory_len: int | None = None
) -> dict[str, Any]:
    """Returns the empty caches of all cache modules below, nested as the state is.

    Args:
        module: Any module; stacks give stacked caches.
        batch: Rows.
        max_len: Most tokens a row can hold.
        memory_len: Longest source that cross attention can hold, in tokens; default ``max_len``.
    """
    if isinstance(module, BaseKVCache):
        room = memory_len if module.cfg.memory and memory_len is not None else max_len
        return module.init(batch, room)
    caches: dict[str, Any] = {}
    for name, child in module.children.items():
        if isinstance(child, BaseMultiToken):  # runs in training only
            continue
        cache = init_cache(child, batch, max_len, memory_len=memory_len)
        if cache and isinstance(child.layers, range):
            num = len(child.layers)
            cache = jax.tree.map(lambda x, n=num: jnp.broadcast_to(x, (n, *x.shape)), cache)
        if cache:
            caches[name] = cache
    return caches


def merge_state(state: Mapping[str, Any], caches: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``state`` with the nested ``caches`` put beside the parameters."""
    merged = dict(state)
    for name, value in caches.items():
        old: Any = merged.get(name)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[name] = merge_state(old, value) if both else value
    return merged
