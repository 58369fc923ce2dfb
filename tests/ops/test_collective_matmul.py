"""Products around a ring equal plain products on one device, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import Module, functional, ops
from axcore.errors import OpError
from axcore.parallel import MeshShape, ProgramTarget, ShardingRules, build_mesh

RING = {"all_gather_matmul": ("ring",), "matmul_reduce_scatter": ("ring",)}
RULES = ShardingRules(activation_rules={"residual_seq": ("seq", "model")})


class Branch(Module):
    """Into the hidden dim and out of it again."""

    def forward(self, x, up, down):
        hidden = ops.all_gather_matmul(x, up)
        return ops.matmul_reduce_scatter(jnp.sin(hidden), down)


def run(target, arrays):
    m = Branch.Config().instantiate(name="m")

    def loss(*arrays):
        out, _ = functional(m, state={}, inputs=arrays, is_training=True, target=target)
        if target is not None:
            out = target.constrain(out, ("batch", "residual_seq", "embed"))
        return jnp.sum(jnp.sin(out)), out

    if target is not None:
        axes = ("batch", "residual_seq", "embed"), ("embed", "mlp"), ("mlp", "embed")
        arrays = [
            jax.device_put(x, jax.sharding.NamedSharding(target.mesh, target.spec(x.shape, a)))
            for x, a in zip(arrays, axes, strict=True)
        ]
    with ops.record_choices() as choices:
        step = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True)).trace(*arrays)
    gradients, out = step.lower().compile()(*arrays)
    return (out, gradients), choices, step


def target(kernels=RING, rules=RULES, **sizes):
    num = int(np.prod(list(sizes.values())))
    mesh = build_mesh(MeshShape(**sizes), jax.devices()[:num])
    return ProgramTarget("cpu-8", "cpu", mesh, rules, kernels=kernels)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    shapes = (2, 16, 6), (6, 8), (8, 6)
    return [jnp.asarray(0.4 * rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.fixture(scope="module")
def expected(arrays):
    return run(None, arrays)[0]


@pytest.mark.parametrize(
    "sizes", [{"model": 4}, {"data": 2, "seq": 2, "model": 2}, {"model": 8}], ids=str
)
def test_a_ring_equals_plain_products(arrays, expected, sizes):
    got, choices, _ = run(target(**sizes), arrays)
    assert [(c.op, c.chosen) for c in choices] == [
        ("all_gather_matmul", "ring"),
        ("matmul_reduce_scatter", "ring"),
    ]
    # float32 sums in another order
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, expected)


def test_nothing_but_shifts_crosses_devices(arrays):
    step = run(target(model=4), arrays)[2]
    text = step.lower().compile().as_text()
    assert "collective-permute" in text
    assert not [kind for kind in ("all-gather(", "reduce-scatter(", "all-to-all(") if kind in text]


def test_without_sequence_parallelism_there_is_nothing_to_overlap(arrays):
    _, choices, _ = run(target(rules=ShardingRules(), model=4), arrays)
    assert {c.chosen for c in choices} == {"xla"}
    assert all("nothing to overlap" in c.refused[0].reason for c in choices)


def test_a_hidden_dim_that_is_whole_is_refused(arrays):
    rules = ShardingRules(activation_rules={**RULES.activation_rules, "mlp": ()})
    _, choices, _ = run(target(rules=rules, model=4), arrays)
    assert "mlp is split over nothing and positions" in choices[0].refused[0].reason


def test_outside_of_a_program_they_are_products(arrays):
    x, up, _ = arrays
    np.testing.assert_array_equal(ops.all_gather_matmul(x, up), x @ up)


def test_shapes_are_checked(arrays):
    with pytest.raises(OpError, match=r"weight float32\(8, 6\).*AX414"):
        ops.all_gather_matmul(arrays[0], arrays[2])
