"""Cached decode equals the full forward for every family, through a cache that none of them knows.

The cache is of a kind of this file's own: a log of tokens in the order in which they arrive, their
positions beside them, keys and values in one array. Sequences are longer than any window.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import experiments
from axcore.context import current_context
from axcore.layers import BaseKVCache, CausalLM, ContiguousKVCache, SequenceInfo
from axcore.module import no_context
from axcore.ops import DenseKV
from axcore.plugins import host
from axcore.testing import check_cached_decode

LENGTH = 24
# It has a window of 16; the others run in the full run.
EVERYDAY = ("mistral-test",)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LogView:
    """Keys and values of (batch, max_len, 2, ...) and the position in each slot, -1 for none."""

    both: jax.Array
    positions: jax.Array

    @property
    def kind(self) -> str:
        return "log"

    def dense(self) -> DenseKV:
        valid = self.positions >= 0
        return DenseKV(self.both[:, :, 0], self.both[:, :, 1], self.positions, valid)


class LogKVCache(BaseKVCache):
    """Tokens in the order in which they arrive."""

    class Config(BaseKVCache.Config):
        pass

    @no_context
    def init(self, batch: int, max_len: int) -> dict[str, Any]:
        shape = self.cfg.tensors["key"]
        return {
            "both": jnp.zeros((batch, max_len, 2, *shape), self.compute_dtype),
            "positions": jnp.full((batch, max_len), -1, jnp.int32),
            "count": jnp.zeros((batch,), jnp.int32),
        }

    def extend(self, values: Mapping[str, jax.Array], info: SequenceInfo) -> LogView:
        ctx = current_context()
        state: Any = ctx.state
        real = info.positions >= 0
        room = state["both"].shape[1]
        arrival = state["count"][:, None] + jnp.cumsum(real, axis=1) - 1
        slots = jnp.where(real, arrival, room)
        rows = jnp.arange(real.shape[0])[:, None]
        both = jnp.stack([values["key"], values["value"]], axis=2)
        view = LogView(
            state["both"].at[rows, slots].set(both, mode="drop"),
            state["positions"].at[rows, slots].set(info.positions, mode="drop"),
        )
        ctx.set_state("both", view.both)
        ctx.set_state("positions", view.positions)
        ctx.set_state("count", state["count"] + jnp.sum(real, axis=1, dtype=jnp.int32))
        return view

    def rollback(self, lengths: jax.Array) -> None:
        raise NotImplementedError


def members() -> list[str]:
    catalog = host().experiments
    names = [name for name in catalog.names() if catalog.owner(name) == "axlearn-models"]
    tests = [name for name in names if "-test" in name]
    decoders = [n for n in tests if isinstance(experiments.get(n).model, CausalLM.Config)]
    # Latents are neither keys nor values: see test_latent_attention.py.
    return [n for n in decoders if not n.startswith("deepseek")]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.slow) for name in members()],
)
def test_cached_decode_is_the_full_forward_for_any_split(name):
    cfg = experiments.get(name)
    cfg.model.replace(ContiguousKVCache.Config, LogKVCache.Config())
    model = cfg.instantiate(name="trainer").model
    generator = np.random.default_rng(0)
    state = jax.tree.map(
        # Large enough that attention, its caps and its windows decide.
        lambda x: x + jnp.asarray(generator.normal(0.0, 0.2, x.shape), x.dtype),
        model.initialize(jax.random.key(0)),
    )
    check_cached_decode(
        model, state, vocab_size=264, length=LENGTH, max_len=LENGTH + 4, num_splits=6
    )
