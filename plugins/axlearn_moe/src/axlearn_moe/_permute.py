"""Moving rows by a permutation, with derivatives that gather as well.

The derivative of a gather is a scatter, which accelerators do slowly and in no fixed order. Where
the indices are a permutation the inverse is known, and the derivative is a gather by it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["gather_tokens", "inverse", "permute_rows"]


def inverse(permutation: jax.Array) -> jax.Array:
    """Returns int (N,): the place of each number in a permutation of ``0 ... N - 1``."""
    numbers = jnp.arange(permutation.size, dtype=permutation.dtype)
    return jnp.zeros_like(permutation).at[permutation].set(numbers, unique_indices=True)


@jax.custom_vjp
def permute_rows(rows: jax.Array, order: jax.Array, inverse_order: jax.Array) -> jax.Array:
    """Returns ``rows[order]``.

    Args:
        rows: (N, D).
        order: int (N,), a permutation.
        inverse_order: Its inverse.
    """
    del inverse_order
    return rows[order]


def _permute_forward(
    rows: jax.Array, order: jax.Array, inverse_order: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return rows[order], inverse_order


def _permute_backward(inverse_order: jax.Array, grad: jax.Array) -> tuple[jax.Array, None, None]:
    return grad[inverse_order], None, None


permute_rows.defvjp(_permute_forward, _permute_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def gather_tokens(
    tokens: jax.Array, order: jax.Array, inverse_order: jax.Array, choices: int
) -> jax.Array:
    """Returns the token of each assignment, in the given order.

    Args:
        tokens: (T, D).
        order: int (T * choices,), a permutation of assignments; number i is of token
            ``i // choices``.
        inverse_order: Its inverse.
        choices: Assignments of each token.
    """
    del inverse_order
    return tokens[order // choices]


def _gather_forward(
    tokens: jax.Array, order: jax.Array, inverse_order: jax.Array, choices: int
) -> tuple[jax.Array, jax.Array]:
    return tokens[order // choices], inverse_order


def _gather_backward(
    choices: int, inverse_order: jax.Array, grad: jax.Array
) -> tuple[Any, None, None]:
    by_token = grad[inverse_order].reshape(-1, choices, grad.shape[1])
    return jnp.sum(by_token, axis=1, dtype=jnp.float32).astype(grad.dtype), None, None


gather_tokens.defvjp(_gather_forward, _gather_backward)
