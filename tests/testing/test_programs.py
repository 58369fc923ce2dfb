"""Equations of a traced program, inner programs included."""

import collections

import jax
import jax.numpy as jnp

from axcore.testing import equations


def test_programs_inside_of_loops_branches_and_calls_are_looked_into():
    def program(x):
        def step(carry, _):
            return jax.lax.cond(carry[0] > 0, jnp.sin, lambda x: jax.jit(jnp.cos)(x), carry), None

        return jax.lax.scan(step, x, length=3)[0] @ x

    traced = jax.make_jaxpr(program)(jnp.ones(4))
    names = [equation.primitive.name for equation in equations(traced)]
    counts = collections.Counter(names)
    assert {n: counts[n] for n in ("scan", "cond", "sin", "cos", "dot_general")} == dict.fromkeys(
        ("scan", "cond", "sin", "cos", "dot_general"), 1
    )
    assert names == [equation.primitive.name for equation in equations(traced.jaxpr)]
