import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import REQUIRED, Module, Required, functional
from axcore.ops import DotGeneral
from axcore.ops._dot import dot_general

MATMUL = (((1,), (0,)), ((), ()))


class Halved(DotGeneral):
    class Config(DotGeneral.Config):
        factor: float = 0.5

    def forward(self, lhs, rhs, dimension_numbers, *, preferred_element_type=None):
        out = jax.lax.dot_general(
            lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type
        )
        return self.cfg.factor * out


class Layer(Module):
    class Config(Module.Config):
        dot: DotGeneral.Config = DotGeneral.Config()
        size: Required[int] = REQUIRED

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)
        self.dot = self._add_child("dot", cfg.dot, DotGeneral)

    def forward(self, x, w):
        return self.dot(x, w, MATMUL, preferred_element_type=jnp.float32)


def run(cfg, *inputs):
    module = cfg.instantiate(name="m")
    return functional(module, state={}, inputs=inputs, is_training=False)[0]


def test_is_lax_dot_general():
    x, w = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4)
    got = run(DotGeneral.Config(), x, w, MATMUL)
    np.testing.assert_array_equal(got, np.asarray(x) @ np.asarray(w))


def test_sums_in_the_preferred_dtype():
    x, w = jnp.ones((1, 512), jnp.bfloat16), jnp.ones((512, 1), jnp.bfloat16)
    got = run(Layer.Config(size=1), x, w)
    assert got.dtype == jnp.float32 and got[0, 0] == 512


def test_configuration_replaces_it_without_touching_the_layer():
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    cfg = Layer.Config(size=1).replace(DotGeneral.Config, Halved.Config())
    np.testing.assert_array_equal(run(cfg, x, w), 1.5)


def test_precision_is_a_field():
    text = jax.make_jaxpr(lambda x: run(DotGeneral.Config(precision="highest"), x, x, MATMUL))(
        jnp.ones((2, 2))
    )
    assert "HIGHEST" in str(text)


CONTRACTIONS = {
    "matmul": ((3, 4), (4, 5), (((1,), (0,)), ((), ()))),
    "projection": ((2, 3, 4), (4, 5, 6), (((2,), (0,)), ((), ()))),
    "output of heads": ((2, 3, 4, 5), (4, 5, 6), (((2, 3), (0, 1)), ((), ()))),
    "embedding table": ((2, 3, 4), (6, 4), (((2,), (1,)), ((), ()))),
    "crossed dims": ((4, 3, 5), (5, 6, 4), (((0, 2), (2, 0)), ((), ()))),
    "no contraction": ((3,), (4,), (((), ()), ((), ()))),
    "batched": ((2, 3, 4), (2, 4, 5), (((2,), (1,)), ((0,), (0,)))),
}


@pytest.mark.parametrize(("lhs", "rhs", "dims"), CONTRACTIONS.values(), ids=CONTRACTIONS)
def test_values_and_gradients_are_those_of_lax(lhs, rhs, dims):
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate((lhs, rhs)))

    def loss(dot):
        return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(dot(*a, dims))), (0, 1)))

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        loss(dot_general)(x, w),
        loss(jax.lax.dot_general)(x, w),
    )


@pytest.mark.parametrize("name", ["matmul", "projection", "output of heads", "embedding table"])
def test_gradients_need_no_transposes(name):
    lhs, rhs, dims = CONTRACTIONS[name]

    def transposes(dot):
        loss = lambda x, w: jnp.sum(jnp.sin(dot(x, w, dims)))  # noqa: E731
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(jnp.ones(lhs), jnp.ones(rhs))
        return str(jaxpr).count("transpose[")

    assert transposes(dot_general) == 0


def test_gradients_have_the_operands_dtypes():
    x, w = jnp.ones((3, 4), jnp.bfloat16), jnp.ones((4, 5), jnp.float32)
    dot = lambda x, w: dot_general(  # noqa: E731
        x, w.astype(x.dtype), MATMUL, preferred_element_type="float32"
    )
    out = jax.eval_shape(dot, x, w)
    grads = jax.eval_shape(jax.grad(lambda *a: jnp.sum(dot(*a)), (0, 1)), x, w)
    assert (out.dtype, grads[0].dtype, grads[1].dtype) == ("float32", "bfloat16", "float32")


def test_second_order_reverse_mode_works():
    x, w = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 4) / 10

    def penalty(dot):
        loss = lambda w: jnp.sum(jnp.sin(dot(x, w, MATMUL)))  # noqa: E731
        return jax.grad(lambda w: jnp.sum(jax.grad(loss)(w) ** 2))(w)

    np.testing.assert_allclose(
        penalty(dot_general), penalty(jax.lax.dot_general), rtol=1e-5, atol=1e-5
    )
