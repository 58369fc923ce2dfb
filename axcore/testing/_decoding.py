"""The law of cached decoding: any split of a text gives what the whole text gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.collection import apply_state_updates
from axcore.context import functional
from axcore.layers import init_cache, merge_state
from axcore.module import Module

__all__ = ["check_cached_decode"]


def check_cached_decode(
    model: Module,
    state: Mapping[str, Any],
    *,
    vocab_size: int,
    length: int = 11,
    max_len: int = 16,
    num_splits: int = 12,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> None:
    """Asserts that prefill, extension and decoding agree with ``logits`` of the whole sequence.

    Texts of different lengths share a batch. Each split is one prefill and any number of pieces of
    1 to ``length`` tokens, the first two being everything at once and one token at a time; after
    each piece the scores of every row's last token are compared. Two programs are compiled, because
    pieces are padded to ``length`` with position -1.

    Args:
        model: Has ``logits(ids)``, ``prefill(ids, positions)`` and ``decode(ids, positions)``.
        state: Its parameters and state.
        vocab_size: Ids are drawn below it.
        length: Tokens of the longest row.
        max_len: Size of the caches.
        num_splits: How many splits are tried.
        tolerance: Largest difference, relative to the largest score or 1.
        seed: Seed of ids and splits.

    Raises:
        AssertionError: They differ; it names the split.
    """
    rng = np.random.default_rng(seed)
    lengths = np.array([length, max(1, length // 2), max(1, length - 1)])
    ids = rng.integers(0, vocab_size, (len(lengths), length)).astype(np.int32)

    @jax.jit
    def whole(state: Any, ids: jax.Array) -> jax.Array:
        return functional(model, state=state, inputs=(ids,), is_training=False, method="logits")[0]

    full = np.asarray(whole(state, jnp.asarray(ids)))
    scale = max(1.0, float(np.abs(full).max()))

    def program(method: str) -> Any:
        @jax.jit
        def run(state: Any, caches: Any, ids: jax.Array, positions: jax.Array) -> Any:
            logits, collection = functional(
                model,
                state=merge_state(state, caches),
                inputs=(ids, positions),
                is_training=False,
                method=method,
            )
            new = apply_state_updates(merge_state(state, caches), collection)
            return logits, _like(caches, new)

        return run

    prefill, decode = program("prefill"), program("decode")
    for split in _splits(rng, length, num_splits):
        caches, start = init_cache(model, len(lengths), max_len), 0
        for number, size in enumerate(split):
            at = start + np.arange(length)
            inside = (np.arange(length) < size) & (at < lengths[:, None])
            positions = np.where(inside, at, -1).astype(np.int32)
            piece = np.where(inside, ids[:, np.minimum(at, length - 1)], 0)
            run = decode if number else prefill
            logits, caches = run(state, caches, jnp.asarray(piece), jnp.asarray(positions))
            last = positions.max(axis=1)
            rows = np.flatnonzero(last >= 0)
            worst = np.abs(np.asarray(logits)[rows] - full[rows, last[rows]]).max(initial=0.0)
            assert worst <= tolerance * scale, (
                f"pieces {split[: number + 1]} of {list(split)}: scores differ by {worst:.3g} "
                f"(the largest is {scale:.3g}) from those of the whole text"
            )
            start += size


def _like(caches: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a state that has the caches' names."""
    return {
        name: _like(value, new[name]) if isinstance(value, Mapping) else new[name]
        for name, value in caches.items()
    }


def _splits(rng: np.random.Generator, length: int, num: int) -> Iterator[list[int]]:
    yield [length]
    yield [1] * length
    for _ in range(num - 2):
        cuts = np.flatnonzero(rng.random(length - 1) < rng.random()) + 1
        yield np.diff(np.concatenate([[0], cuts, [length]])).tolist()
