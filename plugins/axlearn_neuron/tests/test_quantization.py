"""Recipes of axlearn-neuron: error bounds, unbiased rounding, and which machines refuse them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import experiments
from axcore.config import apply_modifier
from axcore.context import functional
from axcore.errors import ConfigError
from axcore.layers import FeedForward, Linear
from axcore.parallel import resolve_instance
from axcore.quantization import QuantizedDot, QuantizeModifier, check_instance, find_sites
from axcore.testing import QuantizationConformance
from axlearn_neuron.quantization import round_stochastically


@pytest.mark.slow
class TestFp8E4M3(QuantizationConformance):
    recipe = "neuron-fp8-e4m3"


@pytest.mark.slow
class TestFp8E3M4(QuantizationConformance):
    recipe = "neuron-fp8-e3m4"


@pytest.mark.slow
class TestFp8E5M2(QuantizationConformance):
    recipe = "neuron-fp8-e5m2"


@pytest.mark.slow
class TestInt8(QuantizationConformance):
    recipe = "neuron-int8"


@pytest.mark.slow
class TestBfloat16(QuantizationConformance):
    recipe = "neuron-bf16-stochastic"


def layer(recipe, **fields):
    cfg = Linear.Config(input_dim=64, output_dim=32, bias=False, compute_dtype="bfloat16")
    return apply_modifier(cfg, QuantizeModifier.Config(recipe=recipe, **fields))


# -- rounding -------------------------------------------------------------------------------------


def test_rounding_at_random_keeps_the_mean_and_goes_to_a_neighbour():
    step = 2.0**-7  # of bfloat16 between 1 and 2
    values = jnp.array([1 + step / 8, -(1 + step / 2), 1 + 7 * step / 8], jnp.float32)
    x = jnp.tile(values[:, None], (1, 4096))
    got = np.asarray(round_stochastically(x, jax.random.key(0)), np.float64)
    for row, value in zip(got, np.asarray(values, np.float64), strict=True):
        assert set(np.abs(row)) == {1.0, 1.0 + step}
        # Five standard deviations of a mean of 4096 draws, half a step wide at most.
        assert abs(row.mean() - value) < 5 * step / 2 / 64
    nearest = round_stochastically(x, None)
    assert set(np.abs(np.asarray(nearest[0], np.float64))) == {1.0}


def test_what_bfloat16_holds_and_what_is_not_finite_stays():
    # The second NaN has its payload in the bits that are dropped.
    bits = jnp.array([0x7FC00000, 0x7F800001], jnp.uint32)
    nans = jax.lax.bitcast_convert_type(bits, jnp.float32)
    exact = jnp.array([0.0, -1.5, jnp.inf, -jnp.inf, 3e38], jnp.bfloat16).astype(jnp.float32)
    for seed in range(3):
        got = round_stochastically(jnp.concatenate([exact, nans]), jax.random.key(seed))
        np.testing.assert_array_equal(got[:5].astype(jnp.float32), exact)
        assert bool(jnp.isnan(got[5:]).all())


def test_gradients_of_a_product_are_unbiased_over_keys():
    module = layer("neuron-bf16-stochastic").set(compute_dtype="float32").instantiate(name="layer")
    x, c = (jax.random.normal(jax.random.key(i), (4, n)) for i, n in enumerate((64, 32)))
    w = jax.random.normal(jax.random.key(2), (64, 32))
    x, w = (v.astype(jnp.bfloat16).astype(jnp.float32) for v in (x, w))  # exact forward

    def grads(key):
        def loss(x, w):
            state = {"weight": w}
            y, _ = functional(module, state=state, inputs=(x,), is_training=True, key=key)
            return jnp.sum(y * c)

        return jax.grad(loss, (0, 1))(x, w)

    dx, dw = jax.jit(jax.vmap(grads))(jax.random.split(jax.random.key(3), 256))
    for got, want in ((dx, c @ w.T), (dw, x.T @ c)):
        # Single draws err by up to 2**-7 of each rounded number; their mean by a sixteenth of it.
        error = np.max(np.abs(np.asarray(got, np.float64) - want), axis=(1, 2))
        mean_error = np.max(np.abs(np.mean(np.asarray(got, np.float64), axis=0) - want))
        assert error.min() > 1e-3 * np.max(np.abs(want))
        assert mean_error < error.mean() / 4


# -- experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "kinds"),
    [
        ("neuron-fp8-e4m3", {"linear", "grouped"}),
        ("neuron-int8", {"linear"}),
        ("neuron-bf16-stochastic", {"linear"}),
    ],
)
def test_experts_are_left_to_recipes_that_draw_no_random_numbers(recipe, kinds):
    moe = pytest.importorskip("axlearn_moe", reason="experts come from axlearn-moe")
    cfg = experiments.get("tiny-lm")
    cfg.replace(FeedForward.Config, moe.MoE.Config(num_experts=2, top_k=1))
    cfg = apply_modifier(cfg, QuantizeModifier.Config(recipe=recipe))
    sites = find_sites(cfg.instantiate(name="trainer").model).values()
    assert {site.kind for site in sites if isinstance(site.module, QuantizedDot)} == kinds


# -- machines -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "recipe", "refused"),
    [
        ("trn1.32xlarge", "neuron-int8", None),
        ("trn1.32xlarge", "neuron-fp8-e3m4", None),
        ("trn1.32xlarge", "fp8", "float8_e4m3fn"),
        ("trn2.48xlarge", "neuron-fp8-e4m3", None),
        ("trn2.48xlarge", "neuron-bf16-stochastic", None),
        ("trn2.48xlarge", "fp8", "float8_e4m3fn"),  # of Trainium3 and later
        ("trn2.48xlarge", "neuron-int8", "int8"),
        ("trn3.48xlarge", "mxfp8", None),
    ],
)
def test_a_machine_refuses_what_it_does_not_multiply(machine, recipe, refused):
    instance = resolve_instance(f"neuron-{machine}-1")
    if refused is None:
        check_instance(layer(recipe), instance)
        return
    with pytest.raises(ConfigError) as caught:
        check_instance(layer(recipe), instance)
    assert caught.value.code == "AX435"
    assert f"does not multiply {refused}" in caught.value.message
    assert "neuron-fp8-e4m3" in (caught.value.hint or "")


def test_a_machine_with_another_float8_refuses_these_formats():
    other = dataclasses.replace(
        resolve_instance("neuron-trn2.48xlarge-1"), peak_flops={"float8_e4m3fn": 1e12}
    )
    with pytest.raises(ConfigError, match="does not multiply float8_e4m3, "):
        check_instance(layer("neuron-fp8-e4m3"), other)
    check_instance(layer("fp8"), other)


def test_a_field_of_the_recipe_can_be_chosen():
    plan = layer("neuron-fp8-e4m3", options={"granularity": "channel"}).instantiate(name="layer")
    (dot,) = [m for _, m in plan.walk() if hasattr(m, "plan")]
    assert (dot.plan.lhs.dtype, dot.plan.lhs.granularity) == ("float8_e4m3", "channel")
    assert dot.plan.grad.dtype == "float8_e5m2"
