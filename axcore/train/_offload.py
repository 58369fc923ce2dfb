"""Optimizer state in host memory: where it lies between updates, and moving it for one.

Arrays that belong to parameters move, scalars (counters) stay. The update itself runs on the
device: the compiler brings each piece when it is needed and takes it away after.
"""

from __future__ import annotations

from typing import Any

import jax

__all__ = ["in_host_memory", "moved"]


def in_host_memory(shardings: Any, abstract: Any, kind: str) -> Any:
    """Returns the learner's shardings with what moves in memory of this kind.

    Args:
        shardings: A LearnerState of shardings.
        abstract: The same of shapes.
        kind: Memory kind of the platform's host memory.
    """

    def place(sharding: jax.sharding.Sharding, array: Any) -> jax.sharding.Sharding:
        return sharding.with_memory_kind(kind) if array.shape else sharding

    return shardings._replace(
        optimizer=jax.tree.map(place, shardings.optimizer, abstract.optimizer),
        ema=jax.tree.map(place, shardings.ema, abstract.ema),
    )


def moved(state: Any, space: Any) -> Any:
    """Returns a LearnerState with the arrays that move in another memory space.

    Args:
        state: Traced or real arrays.
        space: Member of ``jax.memory.Space``.
    """

    def move(x: Any) -> Any:
        return jax.device_put(x, space) if x.ndim else x

    return state._replace(
        optimizer=jax.tree.map(move, state.optimizer), ema=jax.tree.map(move, state.ema)
    )
