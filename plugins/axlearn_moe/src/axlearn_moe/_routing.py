"""What a router decides, as one record, and what follows from it: loads, capacity, dropping."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from axcore.layers import SequenceInfo

__all__ = ["Routing", "best", "chosen", "drop_over_capacity", "expert_capacity", "real_tokens"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Assignments of tokens to experts, in the order of their priority along each row.

    When tokens choose, A is ``seq`` and K the choices of each, and ``tokens`` is None. When experts
    choose, A is the number of experts and K how many tokens each takes.

    Attributes:
        experts: int32 (batch, A, K), which expert.
        gates: float32 (batch, A, K), what its result is multiplied by.
        valid: bool (batch, A, K), False where there is no assignment: padding, or dropped.
        logits: float32 (batch, seq, experts), the router's output.
        probs: float32 (batch, seq, experts), non-negative and of sum 1 over experts.
        real: bool (batch, seq), False for padding.
        tokens: int32 (batch, A, K), the place in the row of each assignment's token, or None.
    """

    experts: jax.Array
    gates: jax.Array
    valid: jax.Array
    logits: jax.Array
    probs: jax.Array
    real: jax.Array
    tokens: jax.Array | None = None

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return self.logits.shape[-1]

    def row_loads(self) -> jax.Array:
        """Returns float32 (batch, experts): assignments to each expert by row."""
        which = self.experts[..., None] == jnp.arange(self.num_experts)
        chosen = which & self.valid[..., None]
        return jnp.sum(chosen, axis=(1, 2), dtype=jnp.float32)

    def loads(self) -> jax.Array:
        """Returns float32 (experts,): assignments to each expert."""
        return jnp.sum(self.row_loads(), axis=0)

    def num_real(self) -> jax.Array:
        """Returns the float32 number of tokens that are no padding."""
        return jnp.sum(self.real, dtype=jnp.float32)


def best(scores: jax.Array, num: int) -> jax.Array:
    """Returns int32 (..., num): where each row's largest scores are, the largest first.

    Of equal scores the first counts, as in ``jax.lax.top_k``, which is not used: compilers do not
    split it over devices, so that each would choose for the tokens of all. It takes ``num`` passes
    over dims of experts, which are short. ``argmax`` would be one pass over pairs instead of two
    over numbers, which XLA's CPU backend does not vectorize: 3.6 times as long for 128 experts.
    Rows with a NaN give the last place.
    """
    places = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    where = []
    for _ in range(num):
        is_best = scores == jnp.max(scores, axis=-1, keepdims=True)
        at = jnp.min(jnp.where(is_best, places, places[-1]), axis=-1)
        where.append(at)
        scores = jnp.where(_is_at(at, scores.shape[-1]), -jnp.inf, scores)
    return jnp.stack(where, axis=-1)


def chosen(values: jax.Array, where: jax.Array) -> jax.Array:
    """Returns (..., num): the values (..., experts) at the places ``where``, as sums.

    The derivative of an indexed read is an indexed sum, which compilers do not split either.
    """
    at = _is_at(where, values.shape[-1])  # (..., num, experts)
    return jnp.sum(jnp.where(at, values[..., None, :], 0), axis=-1)


def _is_at(where: jax.Array, num: int) -> jax.Array:
    return where[..., None] == jnp.arange(num, dtype=where.dtype)


def real_tokens(info: SequenceInfo) -> jax.Array:
    """Returns bool (batch, seq): False for padding (segment 0, or a negative position)."""
    real = info.positions >= 0
    return real if info.segment_ids is None else real & (info.segment_ids > 0)


def expert_capacity(seq: int, top_k: int, num_experts: int, factor: float) -> int:
    """Returns how many tokens of a row an expert takes: its equal share times ``factor``.

    At least 1 and at most ``seq``.
    """
    return min(seq, max(1, math.ceil(seq * top_k / num_experts * factor)))


def drop_over_capacity(routing: Routing, capacity: int) -> Routing:
    """Returns the routing without what exceeds each expert's capacity in its row.

    First choices come before second ones, then earlier tokens before later ones (GShard,
    arXiv:2006.16668, algorithm 1). A row is a group of its own, so that the result does not depend
    on how rows are spread over devices.
    """
    ranks = _ranks(routing)
    return dataclasses.replace(routing, valid=routing.valid & (ranks < capacity))


def _ranks(routing: Routing) -> jax.Array:
    """Returns int32 (batch, A, K): how many valid assignments to the same expert come before.

    By sorting: no array with a dim of experts beside one of assignments.
    """
    num = routing.num_experts
    batch, choosers, choices = routing.experts.shape
    by_priority = jnp.swapaxes(jnp.where(routing.valid, routing.experts, num), 1, 2)
    flat = by_priority.reshape(batch, choosers * choices)

    def row(experts: jax.Array) -> jax.Array:
        order = jnp.argsort(experts, stable=True)
        in_order = experts[order]
        starts = jnp.searchsorted(in_order, jnp.arange(num + 1))
        ranks = jnp.arange(experts.size) - starts[in_order]
        return jnp.zeros_like(ranks).at[order].set(ranks, unique_indices=True)

    ranks = jax.vmap(row)(flat).reshape(batch, choices, choosers)
    return jnp.swapaxes(ranks, 1, 2).astype(jnp.int32)
