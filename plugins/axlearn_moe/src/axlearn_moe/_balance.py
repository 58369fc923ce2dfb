"""Losses that keep a router's choices spread and its logits small. The learner only sums them."""

from __future__ import annotations

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp

from axcore.errors import ModuleError
from axlearn_moe._routing import Routing

__all__ = ["LoadBalanceLoss", "RouterLoss", "RouterZLoss", "SequenceBalanceLoss"]


@dataclasses.dataclass(frozen=True)
class RouterLoss(abc.ABC):
    """Base of losses on a routing.

    Attributes:
        weight: What it counts in the total loss.
    """

    weight: float

    name = "router_loss"
    """Its name in the collection; each subclass has one of its own."""

    def __post_init__(self):
        if not 0 <= self.weight < math.inf:
            raise ModuleError(
                f"{type(self).__name__} got weight={self.weight}, expected a finite number >= 0",
                code="AX918",
                hint="0.01 is common for balance; without the loss, leave it out of losses",
            )

    @abc.abstractmethod
    def __call__(self, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """Returns the mean, a float32 scalar, and the number of things that it is over."""


@dataclasses.dataclass(frozen=True)
class LoadBalanceLoss(RouterLoss):
    r""":math:`E \sum_e f_e P_e` over the batch; 1 when balanced.

    With :math:`f_e` the share of the assignments that go to expert e (of those asked for, before
    any is dropped) and :math:`P_e` the mean of its probability, both over the tokens that are no
    padding. Switch Transformer, arXiv:2101.03961, equations 4 to 6, where the weight is 0.01.
    """

    weight: float = 0.01

    name = "load_balance"

    def __call__(self, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """Returns the loss and the number of tokens."""
        num_tokens = routing.num_real()
        loads = routing.loads()
        share = loads / jnp.maximum(jnp.sum(loads), 1.0)
        total = jnp.sum(jnp.where(routing.real[..., None], routing.probs, 0.0), axis=(0, 1))
        mean = total / jnp.maximum(num_tokens, 1.0)
        return routing.num_experts * jnp.sum(share * mean), num_tokens


@dataclasses.dataclass(frozen=True)
class SequenceBalanceLoss(RouterLoss):
    """The balance loss of each row by itself, averaged over rows.

    DeepSeek-V3, arXiv:2412.19437, equations 17 to 20, where the weight is 0.0001. Rows of padding
    alone do not count.
    """

    weight: float = 0.0001

    name = "sequence_balance"

    def __call__(self, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """Returns the loss and the number of rows."""
        num_tokens = jnp.sum(routing.real, axis=1, dtype=jnp.float32)
        loads = routing.row_loads()
        share = loads / jnp.maximum(jnp.sum(loads, axis=1, keepdims=True), 1.0)
        total = jnp.sum(jnp.where(routing.real[..., None], routing.probs, 0.0), axis=1)
        mean = total / jnp.maximum(num_tokens, 1.0)[:, None]
        by_row = routing.num_experts * jnp.sum(share * mean, axis=1)
        num_rows = jnp.sum(num_tokens > 0, dtype=jnp.float32)
        return jnp.sum(by_row) / jnp.maximum(num_rows, 1.0), num_rows


@dataclasses.dataclass(frozen=True)
class RouterZLoss(RouterLoss):
    """The mean over tokens of ``logsumexp(logits) ** 2``.

    ST-MoE, arXiv:2202.08906, equation 5, where the weight is 0.001.
    """

    weight: float = 0.001

    name = "router_z"

    def __call__(self, routing: Routing) -> tuple[jax.Array, jax.Array]:
        """Returns the loss and the number of tokens."""
        num_tokens = routing.num_real()
        squares = jnp.square(jax.nn.logsumexp(routing.logits, axis=-1))
        total = jnp.sum(jnp.where(routing.real, squares, 0.0))
        return total / jnp.maximum(num_tokens, 1.0), num_tokens
