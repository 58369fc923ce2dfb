"""Looking into traced programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

__all__ = ["equations"]


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a traced program, those of the programs inside of it included.

    Args:
        jaxpr: What ``jax.make_jaxpr(...)(...)`` returns, or the ``jaxpr`` of it.

    Example:
        ```python
        traced = jax.make_jaxpr(jax.grad(loss))(params)
        assert all(v.aval.size < seq * seq for e in equations(traced) for v in e.outvars)
        ```
    """
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_program):
            if _is_program(value):
                yield from equations(value)


def _is_program(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")
