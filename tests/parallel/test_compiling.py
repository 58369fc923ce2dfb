import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from axcore.parallel import MeshShape, build_mesh, compile_step, lower_step


def _step(state, x):
    return state + x @ x, jnp.sum(x)


def test_a_step_compiles_from_shapes_alone_and_runs():
    struct = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    step = compile_step(_step, struct, struct, donate=(0,))
    x = jnp.eye(8)
    state, total = step(jnp.zeros((8, 8)), x)
    np.testing.assert_array_equal(state, x)
    assert total == 8
    assert step.lower_seconds > 0 and step.compile_seconds > 0


def test_the_compilers_account_is_that_of_the_shapes():
    struct = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    step = compile_step(_step, struct, struct, donate=(0,))
    assert step.memory is not None and step.flops is not None
    assert step.memory.arguments == 2 * 8 * 8 * 4
    assert step.memory.aliased == 8 * 8 * 4
    assert step.memory.peak >= 2 * 8 * 8 * 4
    assert step.flops >= 2 * 8**3


def test_donated_arguments_are_gone():
    step = compile_step(_step, jnp.zeros((8, 8)), jnp.eye(8), donate=(0,))
    state = jnp.zeros((8, 8))
    step.call(state, jnp.eye(8))
    assert state.is_deleted()


def test_shardings_are_those_asked_for():
    mesh = build_mesh(MeshShape(data=-1), jax.devices())
    rows = jax.sharding.NamedSharding(mesh, P("data"))
    struct = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    step = compile_step(lambda x: 2 * x, struct, in_shardings=(rows,), out_shardings=rows)
    assert step(jax.device_put(jnp.ones((8, 8)), rows)).sharding == rows


def test_one_function_is_traced_anew_for_each_program():
    factor = [2]

    def fn(x):
        return factor[0] * x

    first = compile_step(fn, jnp.ones(3))
    factor[0] = 3
    second = compile_step(fn, jnp.ones(3))
    assert (first(jnp.ones(3))[0], second(jnp.ones(3))[0]) == (2, 3)


def test_compiler_options_reach_the_compiler():
    option = {"xla_cpu_enable_fast_math": False}
    assert compile_step(lambda x: x, jnp.ones(3), compiler_options=option).options == option


def test_arguments_keep_their_names_in_the_program():
    struct = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    text = lower_step(_step, struct, struct).compile().call.as_text()
    assert 'op_name="state"' in text and 'op_name="x"' in text
