"""Every decoder family decodes through its caches, whatever kind they are."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axcore import experiments, functional
from axcore.collection import apply_state_updates
from axcore.layers import BaseKVCache, SequenceInfo, init_cache, merge_state
from axcore.module import Module, no_context
from axcore.ops import DenseKV

FAMILIES = ["fuji-test-v3", "smollm2-test", "qwen2.5-test", "qwen3-test"]
TOKENS = 10
IDS = np.random.default_rng(0).integers(0, 256, (2, TOKENS)).astype(np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BackwardView:
    key: jax.Array
    value: jax.Array
    slots: jax.Array

    @property
    def kind(self) -> str:
        return "backward"

    def dense(self) -> DenseKV:
        return DenseKV(self.key, self.value, positions=self.slots, valid=self.slots >= 0)


class BackwardKVCache(BaseKVCache):
    """A kind that core has never seen: the last position stands first."""

    class Config(BaseKVCache.Config):
        pass

    @no_context
    def init(self, batch: int, max_len: int) -> dict[str, Any]:
        shapes = self.cfg.tensors.items()
        buffers = {name: jnp.zeros((batch, max_len, *shape)) for name, shape in shapes}
        return {**buffers, "slots": jnp.full((batch, max_len), -1, jnp.int32)}

    def extend(self, values: Mapping[str, jax.Array], info: SequenceInfo) -> BackwardView:
        new: dict[str, jax.Array] = {}
        rows = jnp.arange(info.positions.shape[0])[:, None]
        for name, value in {**values, "slots": info.positions}.items():
            buffer = self._context.state[name]
            last = buffer.shape[1] - 1
            place = jnp.where(info.positions < 0, last + 1, last - info.positions)
            new[name] = buffer.at[rows, place].set(value.astype(buffer.dtype), mode="drop")
            self._context.set_state(name, new[name])
        return BackwardView(**new)

    def rollback(self, lengths: jax.Array) -> None:
        slots = self._context.state["slots"]
        self._context.set_state("slots", jnp.where(slots < lengths[:, None], slots, -1))


@functools.cache
def model_of(name: str, cache: type[BaseKVCache] | None = None) -> tuple[Module, Any, np.ndarray]:
    """A model, random parameters, and the logits of its full forward pass."""
    cfg = experiments.get(name)
    if cache is not None:
        cfg.replace(BaseKVCache.Config, cache.Config())
    model = cfg.instantiate(name="trainer").model
    params = jax.jit(model.initialize)(jax.random.key(0))

    @jax.jit
    def run(params: Any) -> Any:
        return functional(model, state=params, inputs=(IDS,), method="logits", is_training=False)[0]

    return model, params, np.asarray(run(params))


@functools.cache
def compiled(name: str, method: str, cache: type[BaseKVCache] | None) -> Any:
    model, _, _ = model_of(name, cache)

    @jax.jit
    def run(params: Any, caches: Any, ids: Any, positions: Any) -> Any:
        state = merge_state(params, caches)
        logits, found = functional(
            model, state=state, inputs=(ids, positions), method=method, is_training=False
        )
        return logits, apply_state_updates(caches, found)

    return run


def check_split(name: str, cuts: list[list[int]], cache: type[BaseKVCache] | None = None) -> None:
    """Feeds rows in parts that end at ``cuts[part][row]``: each part's scores are the forward's."""
    model, params, expected = model_of(name, cache)
    caches = init_cache(model, 2, TOKENS)
    start = np.zeros(2, int)
    for part, ends in enumerate(cuts):
        ids, positions = np.zeros_like(IDS), np.full_like(IDS, -1)
        for row, end in enumerate(ends):
            count = end - start[row]
            ids[row, :count] = IDS[row, start[row] : end]
            positions[row, :count] = np.arange(start[row], end)
        run = compiled(name, "prefill" if part == 0 else "decode", cache)
        logits, caches = run(params, caches, ids, positions)
        for row, end in enumerate(ends):
            if end > start[row]:
                np.testing.assert_allclose(logits[row], expected[row, end - 1], rtol=0, atol=1e-4)
        start = np.asarray(ends)


splits = st.lists(st.integers(1, TOKENS), max_size=4, unique=True).map(
    lambda cuts: sorted({*cuts, TOKENS})
)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15)
@given(first=splits, second=splits)
def test_cached_decode_equals_the_full_forward_for_any_split(name, first, second):
    parts = max(len(first), len(second))
    rows = [cuts + [TOKENS] * (parts - len(cuts)) for cuts in (first, second)]
    check_split(name, [list(ends) for ends in zip(*rows, strict=True)])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cache_kind_of_a_third_party_decodes(name):
    cuts = [[4, 7], [5, 10], [10, 10]]
    check_split(name, cuts, BackwardKVCache)
