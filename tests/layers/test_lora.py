"""Low-rank adapters against closed forms in numpy and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.errors import ModuleError
from axcore.layers import DoRA, Dropout, Linear, LoRA, LowRankAdapter
from axcore.module import flatten_specs
from axcore.ops import DotGeneral

KEY = jax.random.key(0)
IN, OUT, RANK, ALPHA = (3, 4), (2, 5), 2, 6.0


def layer(adapter, **fields):
    return (
        Linear.Config(
            input_dim=IN, output_dim=OUT, axes=("heads", "head_dim", "embed", None), dot=adapter
        )
        .set(**fields)
        .instantiate(name="m")
    )


def trained(module):
    """A state whose adapter does something: everything drawn anew, nothing zero."""
    state = module.initialize(KEY)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [0.3 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, drawn)


def call(module, state, x, **kwargs):
    kwargs.setdefault("is_training", False)
    return functional(module, state=state, inputs=(x,), **kwargs)[0]


def in_numpy(state):
    """(W, A, B) as float64 matrices over flattened dims."""
    dot = state["dot"]
    w, a, b = (np.asarray(v, np.float64) for v in (state["weight"], dot["lora_a"], dot["lora_b"]))
    return w.reshape(12, 10), a.reshape(12, RANK), b.reshape(RANK, 10)


X = jax.random.normal(jax.random.key(2), (7, *IN))


@pytest.mark.parametrize("stabilized", [False, True], ids=["plain", "rank-stabilized"])
def test_lora_adds_the_scaled_product_of_its_factors(stabilized):
    module = layer(LoRA.Config(rank=RANK, alpha=ALPHA, rank_stabilized=stabilized))
    state = trained(module)
    w, a, b = in_numpy(state)
    scale = ALPHA / (np.sqrt(RANK) if stabilized else RANK)
    x = np.asarray(X, np.float64).reshape(7, 12)
    expected = (x @ w + scale * (x @ a @ b)).reshape(7, *OUT) + np.asarray(state["bias"])
    np.testing.assert_allclose(call(module, state, X), expected, rtol=1e-5, atol=1e-5)


def test_dora_scales_each_output_to_its_magnitude():
    module = layer(DoRA.Config(rank=RANK, alpha=ALPHA))
    state = trained(module)
    w, a, b = in_numpy(state)
    v = w + ALPHA / RANK * a @ b
    magnitude = np.linalg.norm(w, axis=0) + np.asarray(state["dot"]["lora_magnitude"]).reshape(10)
    expected = np.asarray(X).reshape(7, 12) @ (magnitude * v / np.linalg.norm(v, axis=0))
    expected = expected.reshape(7, *OUT) + np.asarray(state["bias"])
    np.testing.assert_allclose(call(module, state, X), expected, rtol=1e-5, atol=1e-5)


def _dora_loss(w, a, b, delta, target, norm=None):
    """Half the squared error in numpy; ``norm`` takes the place of ``||V||`` when given."""
    v = w + ALPHA / RANK * a @ b
    norm = np.linalg.norm(v, axis=0) if norm is None else norm
    y = np.asarray(X, np.float64).reshape(7, 12) @ (v * (np.linalg.norm(w, axis=0) + delta) / norm)
    return 0.5 * np.sum((y - target) ** 2)


@pytest.mark.parametrize("norm_gradient", [False, True], ids=["cut", "whole"])
def test_gradients_of_dora_match_finite_differences(norm_gradient):
    module = layer(DoRA.Config(rank=RANK, alpha=ALPHA, norm_gradient=norm_gradient), bias=False)
    state = trained(module)
    target = jax.random.normal(jax.random.key(3), (7, *OUT))

    def loss(dot):
        y = call(module, {**state, "dot": dot}, X)
        return 0.5 * jnp.sum(jnp.square(y - target))

    grads = jax.grad(loss)(state["dot"])
    w, a, b = in_numpy(state)
    delta = np.asarray(state["dot"]["lora_magnitude"], np.float64).reshape(10)
    goal = np.asarray(target, np.float64).reshape(7, 10)
    # The paper treats ||V|| as a constant of the step.
    norm = None if norm_gradient else np.linalg.norm(w + ALPHA / RANK * a @ b, axis=0)
    values = {"lora_a": a, "lora_b": b, "lora_magnitude": delta}
    for name, value in values.items():
        got = np.asarray(grads[name]).reshape(value.shape)
        for index in [(0,) * value.ndim, tuple(n - 1 for n in value.shape)]:
            step = np.zeros_like(value)
            step[index] = 1e-5
            up, down = (
                _dora_loss(w, *({**values, name: value + s * step}.values()), goal, norm)
                for s in (1, -1)
            )
            np.testing.assert_allclose(got[index], (up - down) / 2e-5, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("adapter", [LoRA, DoRA])
def test_an_untrained_adapter_changes_nothing_and_the_base_keeps_its_paths(adapter):
    plain, adapted = layer(DotGeneral.Config()), layer(adapter.Config(rank=RANK))
    base, state = plain.initialize(KEY), adapted.initialize(KEY)
    for name in base:  # the same key gives the same base weights, bit for bit
        np.testing.assert_array_equal(base[name], state[name])
    np.testing.assert_allclose(call(adapted, state, X), call(plain, base, X), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("adapter", [LoRA, DoRA])
def test_a_merged_weight_computes_the_same(adapter):
    module = layer(adapter.Config(rank=RANK, alpha=ALPHA))
    state = trained(module)
    merged, _ = functional(
        module.dot,
        state=state["dot"],
        inputs=(state["weight"],),
        is_training=False,
        method="merge",
    )
    plain = layer(DotGeneral.Config())
    expected = call(plain, {"weight": merged, "bias": state["bias"]}, X)
    np.testing.assert_allclose(call(module, state, X), expected, rtol=1e-5, atol=1e-5)


def test_specs_carry_the_weights_axes_and_an_axis_of_their_own():
    specs = flatten_specs(layer(DoRA.Config(rank=RANK)).parameter_specs())
    assert specs["dot/lora_a"].axes == ("heads", "head_dim", "lora_rank")
    assert specs["dot/lora_b"].axes == ("lora_rank", "embed", None)
    assert specs["dot/lora_magnitude"].axes == ("embed", None)
    assert not specs["dot/lora_magnitude"].weight_decay and specs["dot/lora_a"].weight_decay


def test_dropout_acts_on_the_correction_in_training_only():
    module = layer(LoRA.Config(rank=RANK, dropout=Dropout.Config(rate=0.5)))
    state = trained(module)
    evaluated = call(module, state, X)
    noisy = [call(module, state, X, is_training=True, key=jax.random.key(k)) for k in (0, 1)]
    assert np.abs(noisy[0] - noisy[1]).max() > 1e-3
    # Without the correction there is nothing to drop.
    bare = {**state, "dot": jax.tree.map(jnp.zeros_like, state["dot"])}
    without = call(module, bare, X, is_training=True, key=KEY)
    np.testing.assert_array_equal(without, call(module, bare, X))
    assert np.isfinite(evaluated).all()


class TripledDot(DotGeneral):
    """A stand-in for a quantized product: visible in the result."""

    def forward(self, lhs, rhs, dimension_numbers, *, preferred_element_type=None):
        return 3 * jax.lax.dot_general(lhs, rhs, dimension_numbers)


class Shifted(Linear):
    """A third party's linear layer, with a forward of its own."""

    class Config(Linear.Config):
        shift: float = 1.0

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)

    def forward(self, x):
        dims = (((1, 2), (0, 1)), ((), ()))
        return self.dot(x, self._param("weight"), dims) + self.cfg.shift


def test_a_replaced_product_is_adapted_and_adapters_survive_the_replacement():
    cfg = Linear.Config(input_dim=IN, output_dim=OUT, axes=(None,) * 4, bias=False)
    cfg.dot = LoRA.Config(rank=RANK)
    cfg.replace(DotGeneral.Config, TripledDot.Config())
    assert isinstance(cfg.dot, LoRA.Config) and isinstance(cfg.dot.base, TripledDot.Config)
    module = cfg.instantiate(name="m")
    state = trained(module)
    w, a, b = in_numpy(state)
    x = np.asarray(X).reshape(7, 12)
    expected = (3 * x @ w + 8 * x @ a @ b).reshape(7, *OUT)
    np.testing.assert_allclose(call(module, state, X), expected, rtol=1e-5, atol=1e-5)


def test_a_third_partys_linear_layer_keeps_its_own_forward():
    module = Shifted.Config(
        input_dim=IN, output_dim=OUT, axes=(None,) * 4, bias=False, dot=LoRA.Config(rank=RANK)
    ).instantiate(name="m")
    state = trained(module)
    w, a, b = in_numpy(state)
    x = np.asarray(X).reshape(7, 12)
    expected = (x @ w + 8 * x @ a @ b).reshape(7, *OUT) + 1.0
    np.testing.assert_allclose(call(module, state, X), expected, rtol=1e-5, atol=1e-5)


def test_what_an_adapter_cannot_be_is_refused():
    with pytest.raises(ModuleError, match="rank is 0"):
        layer(LoRA.Config(rank=0))
    with pytest.raises(ModuleError, match="alpha is nan"):
        layer(LoRA.Config(rank=2, alpha=float("nan")))
    with pytest.raises(ModuleError, match="there is none"):
        LoRA.Config().instantiate(name="m")
    with pytest.raises(ModuleError, match="LowRankAdapter does not define forward, merge"):
        layer(LowRankAdapter.Config())
    module = layer(LoRA.Config(rank=RANK))
    other = jnp.zeros((12, 10))
    with pytest.raises(ModuleError, match="adapter of a weight"):
        functional(
            module.dot,
            state=module.initialize(KEY)["dot"],
            inputs=(jnp.zeros((7, 12)), other, (((1,), (0,)), ((), ()))),
            is_training=False,
        )
