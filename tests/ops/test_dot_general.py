import jax
import jax.numpy as jnp
import numpy as np

from axcore import REQUIRED, Module, Required, functional
from axcore.ops import DotGeneral

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
