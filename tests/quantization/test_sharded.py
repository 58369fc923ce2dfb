"""Operands split over devices give the scales, and so the results, of whole ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from axcore import functional
from axcore.layers import Linear
from axcore.quantization import DelayedFp8Dot, Int8Dot

DOTS = {
    "int8": Int8Dot.Config(),
    "fp8": DelayedFp8Dot.Config(),
    "channels": DelayedFp8Dot.Config(granularity="channel"),
}


@pytest.mark.parametrize("dot", DOTS.values(), ids=DOTS)
def test_a_split_sum_has_one_scale(dot):
    layer = Linear.Config(input_dim=32, output_dim=16, bias=False, dot=dot)
    module = layer.instantiate(name="layer")
    specs = module.parameter_specs()
    state = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)
    x = jax.random.normal(jax.random.key(0), (8, 32))
    w = jax.random.normal(jax.random.key(1), (32, 16))

    def step(x, w):
        def loss(x, w):
            y, collection = functional(
                module, state={**state, "weight": w}, inputs=(x,), is_training=True
            )
            updates = {p: e.result() for p, e in collection.state_updates.items()}
            return jnp.sum(jnp.cos(y)), (y, updates)

        return jax.grad(loss, (0, 1), has_aux=True)(x, w)

    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = [NamedSharding(mesh, PartitionSpec(*p)) for p in (("data", "fsdp"), ("fsdp", "data"))]
    whole = jax.jit(step)(x, w)
    parts = jax.jit(step, in_shardings=tuple(split))(x, w)
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        # Integer sums are exact; those of floats are added up in another order.
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
