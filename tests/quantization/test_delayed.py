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


def by_channel(**known):
    cfg = DELAYED.copy()
    cfg.dot.set(granularity="channel")
    names = ("lhs_amax", "rhs_out_amax", "rhs_in_amax")
    wide = {name: (3,) if name == "lhs_amax" else (3, 8) for name in names}
    empty = {name: jnp.zeros(shape) for name, shape in wide.items()}
    return cfg.instantiate(name="layer"), {**empty, **known}


def test_by_channel_each_output_and_each_input_of_the_weights_has_a_history():
    module, dot = by_channel()
    w = jax.random.normal(jax.random.key(0), (8, 8))
    _, updates = run(module, {"weight": w, "dot": dot}, jnp.ones((2, 8)))
    assert set(updates) == {"dot/lhs_amax", "dot/rhs_out_amax", "dot/rhs_in_amax"}
    np.testing.assert_array_equal(updates["dot/rhs_out_amax"][0], np.abs(w).max(0))
    np.testing.assert_array_equal(updates["dot/rhs_in_amax"][0], np.abs(w).max(1))
    specs = module.parameter_specs()["dot"]
    assert specs["rhs_out_amax"].axes == (None, "mlp")
    assert specs["rhs_in_amax"].axes == (None, "embed")


def test_by_channel_outputs_scale_the_result_and_inputs_its_gradient():
    """What is known as half of what is there saturates, in its own channel alone."""
    one = jnp.ones((3, 8))
    of_output = {"rhs_out_amax": one.at[:, 2].set(0.5), "rhs_in_amax": one}
    of_input = {"rhs_out_amax": one, "rhs_in_amax": one.at[:, 5].set(0.5)}
    for known, result, gradient in ((of_output, 2, None), (of_input, None, 5)):
        module, dot = by_channel(**known)

        def loss(x, module=module, dot=dot):
            y, _ = run(module, {"weight": jnp.ones((8, 8)), "dot": dot}, x, is_training=False)
            return jnp.sum(y), y

        grad, y = jax.grad(loss, has_aux=True)(jnp.ones((1, 8)))
        want = np.full((2, 8), 8.0)
        for row, channel in enumerate((result, gradient)):
            if channel is not None:
                want[row, channel] = 4.0
        # Every operand is a power of two; scales are float32.
        np.testing.assert_allclose(np.concatenate([y, grad]), want, rtol=1e-6)


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
