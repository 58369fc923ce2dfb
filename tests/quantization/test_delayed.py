"""The history of delayed scaling: what it holds, who sets it, how it combines."""

import jax
import jax.numpy as jnp
import numpy as np

from axcore import functional
from axcore.layers import Layer, Linear
from axcore.module import Module
from axcore.quantization import DelayedFp8Dot
from axcore.train.accumulation import loss_and_grads

DELAYED = Linear.Config(
    input_dim=8, output_dim=8, bias=False, dot=DelayedFp8Dot.Config(history_length=3)
)


def run(module, state, x, *, is_training=True):
    y, collection = functional(module, state=state, inputs=(x,), is_training=is_training)
    return y, {p: np.asarray(e.result()) for p, e in collection.state_updates.items()}


def test_training_remembers_the_largest_and_evaluation_leaves_it():
    module = DELAYED.copy().instantiate(name="layer")
    w = jnp.eye(8)
    state = {"weight": w, "dot": {k: jnp.array([5.0, 2.0, 1.0]) for k in ("lhs_amax", "rhs_amax")}}
    _, updates = run(module, state, jnp.full((2, 8), -3.0))
    np.testing.assert_array_equal(updates["dot/lhs_amax"], [3.0, 5.0, 2.0])
    np.testing.assert_array_equal(updates["dot/rhs_amax"], [1.0, 5.0, 2.0])
    _, updates = run(module, state, jnp.full((2, 8), -3.0), is_training=False)
    assert not updates


def test_scales_come_from_the_history_and_from_the_values_while_it_is_empty():
    module = DELAYED.copy().instantiate(name="layer")
    one = jnp.ones((1, 8))
    known = {"lhs_amax": jnp.full((3,), 2.0), "rhs_amax": jnp.ones((3,))}
    y, _ = run(module, {"weight": jnp.eye(8), "dot": known}, one * 100.0)
    # It saturates at what was known; scales are float32.
    np.testing.assert_allclose(y, 2.0 * one, rtol=1e-6)
    empty = {name: jnp.zeros((3,)) for name in known}
    y, _ = run(module, {"weight": jnp.eye(8), "dot": empty}, one * 100.0)
    np.testing.assert_allclose(y, 100.0 * one, rtol=1e-6)


class _Twice(Layer):
    class Config(Layer.Config):
        inner: Linear.Config = DELAYED

    def __init__(self, cfg, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        self.inner = self._add_child("inner", cfg.inner, Linear)

    def forward(self, x):
        return self.inner(2.0 * self.inner(x))


def test_calls_of_one_layer_and_microbatches_combine_to_the_largest():
    module = _Twice.Config().instantiate(name="twice")
    state = module.initialize(jax.random.key(0))
    state["inner"]["weight"] = jnp.eye(8)
    _, updates = run(module, state, jnp.ones((1, 8)))
    np.testing.assert_allclose(updates["inner/dot/lhs_amax"], [2.0, 0.0, 0.0], rtol=1e-6)

    def losses(params, batch, key):
        del key

        def forward(rows):
            return functional(
                module,
                state={"inner": {**state["inner"], **params}},
                inputs=(rows,),
                is_training=True,
            )

        y, collection = forward(batch["x"])
        loss = _Loss.Config().instantiate(name="loss")
        _, entry = functional(loss, state={}, inputs=(y,), is_training=True)
        collection.update(entry)
        return collection

    rows = jnp.stack([jnp.full((8,), v) for v in (1.0, 4.0, 3.0, 2.0)])
    _, collection = loss_and_grads(
        losses, {"weight": jnp.eye(8)}, {"x": rows}, accumulation_steps=2
    )
    got = collection.state_updates["inner/dot/lhs_amax"].result()
    np.testing.assert_allclose(got, [8.0, 0.0, 0.0], rtol=1e-6)


class _Loss(Module):
    def forward(self, y):
        from axcore.context import current_context

        ctx = current_context()
        assert ctx is not None
        ctx.add_loss("mean", jnp.mean(y))
