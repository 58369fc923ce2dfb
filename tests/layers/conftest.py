"""A kind of KV cache that core does not know, for every model that decodes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from axcore.context import current_context
from axcore.layers import BaseKVCache
from axcore.module import no_context
from axcore.ops import DenseKV


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BackwardsView:
    """Position p is in slot max_len - 1 - p."""

    key: jax.Array
    value: jax.Array
    lengths: jax.Array

    @property
    def kind(self):
        return "backwards"

    def dense(self):
        positions = jnp.arange(self.key.shape[1])[::-1]
        valid = positions[None] < self.lengths[:, None]
        return DenseKV(self.key, self.value, positions=positions, valid=valid)


class BackwardsKVCache(BaseKVCache):
    """A kind of cache that core does not know: filled from the end, keys and values negated."""

    class Config(BaseKVCache.Config):
        pass

    @no_context
    def init(self, batch, max_len):
        shapes = self.cfg.tensors
        buffers = {n: jnp.zeros((batch, max_len, *s)) for n, s in shapes.items()}
        return {**buffers, "lengths": jnp.zeros((batch,), jnp.int32)}

    def extend(self, values, info):
        ctx = current_context()
        at = info.positions
        rows = jnp.arange(at.shape[0])[:, None]
        lengths = jnp.maximum(ctx.state["lengths"], jnp.max(at, axis=1) + 1)
        new = {"lengths": lengths}
        for name, value in values.items():
            last = ctx.state[name].shape[1] - 1
            slots = jnp.where(at < 0, last + 1, last - at)
            new[name] = ctx.state[name].at[rows, slots].set(-value, mode="drop")
        for name, value in new.items():
            ctx.set_state(name, value)
        return BackwardsView(-new["key"], -new["value"], lengths)

    def rollback(self, lengths):
        ctx = current_context()
        ctx.set_state("lengths", jnp.minimum(ctx.state["lengths"], lengths))


@pytest.fixture(scope="session")
def toy_cache():
    """The config of the toy cache."""
    return BackwardsKVCache.Config()
