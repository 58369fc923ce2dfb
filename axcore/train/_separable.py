"""Does an optax transformation treat each parameter on its own? A data-flow check of its jaxpr.

Needed for scanned stacks: a transformation that treats parameters separately may be mapped over the
layer axis; one that mixes them (a global norm, random noise) may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core

__all__ = ["is_separable"]

_Deps = frozenset[int]
_NONE: _Deps = frozenset()
# Their operands feed each other across iterations or branches: every output needs every input.
_OPAQUE = frozenset({"scan", "while", "cond"})
_RANDOM = ("random", "threefry", "rng")


class _UsesRandomness(Exception):
    pass


def is_separable(update: Any, params: Any, state: Any, shared_state: Sequence[bool]) -> bool:
    """Tells whether each parameter's update depends on that parameter alone.

    Args:
        update: ``update(grads, state, params) -> (updates, state)``.
        params: Tree of shapes.
        state: Tree of the state's shapes.
        shared_state: For each leaf of the state whether all parameters share it (such as a count);
            a shared leaf must depend on no gradient or parameter.

    Returns:
        False also when the transformation draws random numbers (mapped layers would share them) or
        when its data flow cannot be followed.
    """
    num, num_state = len(jax.tree.leaves(params)), len(jax.tree.leaves(state))
    jaxpr, shapes = jax.make_jaxpr(update, return_shape=True)(params, state, params)
    updates_shape, new_state_shape = shapes
    if jax.tree.structure(updates_shape) != jax.tree.structure(params):
        return False
    if jax.tree.structure(new_state_shape) != jax.tree.structure(state):
        return False
    # Dependencies are numbered: parameter j (and its gradient) is j, state leaf i is num + i.
    of_state = [frozenset({num + i}) for i in range(num_state)]
    of_params = [frozenset({j}) for j in range(num)]
    try:
        outs = _flow(jaxpr.jaxpr, [*of_params, *of_state, *of_params])
    except _UsesRandomness:
        return False
    new_state = outs[num:]
    # What a state leaf has seen of parameters over all steps: a fixed point.
    seen: list[_Deps] = [frozenset(d for d in deps if d < num) for deps in new_state]
    while True:
        grown = [
            own.union(*(seen[d - num] for d in deps if d >= num), _NONE)
            for own, deps in zip(seen, new_state, strict=True)
        ]
        if grown == seen:
            break
        seen = grown
    for own, shared in zip(seen, shared_state, strict=True):
        if len(own) > (0 if shared else 1):
            return False
    for j, deps in enumerate(outs[:num]):
        total = frozenset(d for d in deps if d < num)
        total = total.union(*(seen[d - num] for d in deps if d >= num), _NONE)
        if not total <= {j}:
            return False
    return True


def _flow(jaxpr: core.Jaxpr, inputs: Sequence[_Deps]) -> list[_Deps]:
    """Returns the inputs that each output of a jaxpr depends on (at most)."""
    env: dict[Any, _Deps] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> _Deps:
        return _NONE if isinstance(atom, core.Literal) else env.get(atom, _NONE)

    for eqn in jaxpr.eqns:
        if any(word in eqn.primitive.name for word in _RANDOM):
            raise _UsesRandomness
        deps = [read(v) for v in eqn.invars]
        inner = _called(eqn)
        if inner is not None:
            outs = _flow(inner, deps)
        else:
            for nested in core.jaxprs_in_params(eqn.params):
                _flow(nested, [_NONE] * len(nested.invars))  # only to find random draws
            outs = [_NONE.union(*deps)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _called(eqn: Any) -> core.Jaxpr | None:
    """Returns the jaxpr that an equation merely calls (jit, remat, custom derivatives)."""
    if eqn.primitive.name in _OPAQUE:
        return None
    nested = list(core.jaxprs_in_params(eqn.params))
    if len(nested) != 1 or len(nested[0].invars) != len(eqn.invars):
        return None
    return nested[0] if len(nested[0].outvars) == len(eqn.outvars) else None
