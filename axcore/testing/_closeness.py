"""How suites compare what two ways to compute give: results, and gradients of a fixed weighting."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["assert_close", "gradients", "weighted_sum"]

# Below it a magnitude is none to measure errors against.
_LEAST = 1e-3


def assert_close(got: Any, expected: Any, tolerance: float, what: str = "result") -> None:
    """Asserts that two trees of arrays are alike, each array against its largest magnitude.

    Args:
        got: The tree in question.
        expected: What it should be.
        tolerance: Largest error, relative to the largest magnitude of the expected array.
        what: Name of it, for the message.
    """
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(a).all() or not np.isfinite(b).all(), f"{what} is not finite"
        scale = max(float(np.max(np.abs(b), initial=0.0)), _LEAST)
        error = float(np.max(np.abs(a - b), initial=0.0)) / scale
        assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"


def weighted_sum(outputs: Any) -> jax.Array:
    """Returns one float32 of all floating-point results, weighted so that no two errors cancel."""
    total = jnp.zeros(())
    for x in jax.tree.leaves(outputs):
        if jnp.issubdtype(x.dtype, jnp.floating):
            weights = jnp.cos(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape)
            total += jnp.sum(x.astype(jnp.float32) * weights)
    return total


def gradients(function: Callable[[Mapping[str, Any]], Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Gradients, by the floating-point arguments, of a fixed weighting of all results."""

    def weighted(floats: dict[str, Any], others: dict[str, Any]) -> jax.Array:
        return weighted_sum(function({**floats, **others}))

    def gradient(arrays: Mapping[str, Any]) -> dict[str, Any]:
        floats = {n: a for n, a in arrays.items() if jnp.issubdtype(a.dtype, jnp.floating)}
        others = {n: a for n, a in arrays.items() if n not in floats}
        return jax.grad(weighted)(floats, others)

    return gradient
