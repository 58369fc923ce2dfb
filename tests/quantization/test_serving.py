"""Stored weights against the plain model with the same rounded weights; calibration; adapters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.config import apply_modifier
from axcore.errors import ConfigError, ModuleError
from axcore.inference import quantize_state
from axcore.layers import Attention, CausalLM, Decoder, DoRA, Linear, LoRA, TransformerLayer
from axcore.module import flatten_specs
from axcore.quantization import (
    QuantizeModifier,
    StoredDot,
    calibrate,
    find_sites,
    is_recipe_state,
    quantize_weight,
)
from axcore.quantization._stored import unpack_int4

pytestmark = pytest.mark.xdist_group("quantization-serving")
IDS = jnp.arange(24, dtype=jnp.int32).reshape(2, 12) * 7 % 32


def config() -> CausalLM.Config:
    attention = Attention.Config(num_heads=2)
    return CausalLM.Config(
        vocab_size=32,
        model_dim=16,
        max_seq_len=16,
        decoder=Decoder.Config(num_layers=2, layer=TransformerLayer.Config(attention=attention)),
    )


def applied(cfg, recipe: str):
    made = QuantizeModifier.Config(recipe=recipe).instantiate().recipe_config()
    return apply_modifier(cfg, made)


def some_state(model):
    """Weights of a usual size, without compiling an initialization."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: jnp.asarray(rng.normal(0, 0.2, spec.shape), spec.dtype),
        model.parameter_specs(),
    )


@pytest.fixture(scope="module")
def plain():
    """The plain model, a state of it, and its compiled logits."""
    model = config().instantiate(name="model")
    return model, some_state(model), logits_of(model)


def logits_of(model):
    def call(state):
        return functional(model, state=state, inputs=(IDS,), is_training=False, method="logits")[0]

    return jax.jit(call)


def rounded(state, recipe):
    """The plain state with every linear weight rounded to the recipe's numbers and back."""
    made = jax.tree.map(lambda x: x, state)
    layers = made["decoder"]["layer"]["0:2:1"]
    owners = [
        *((layers["attention"]["qkv"][n], 1) for n in ("query", "key", "value")),
        (layers["attention"]["output"], 2),
        *((layers["feed_forward"][n], 1) for n in ("up", "down")),
    ]
    for owner, num_in in owners:
        both = []
        for w in np.asarray(owner["weight"]):
            if recipe == "int8-weights":
                q = quantize_weight(jnp.asarray(w), num_in, "int8")
                both.append(np.asarray(q.values, np.float32) * np.asarray(q.scale))
                continue
            q = quantize_weight(jnp.asarray(w), num_in, "int4", group=32)
            values = np.asarray(unpack_int4(q.values, num_in - 1), np.float32)
            size = w.shape[num_in - 1] // q.scale.shape[num_in - 1]
            both.append(values * np.repeat(np.asarray(q.scale), size, axis=num_in - 1))
        owner["weight"] = jnp.asarray(np.stack(both))
    return made


@pytest.mark.parametrize("recipe", ["int8-weights", "int4-weights"])
def test_stored_weights_give_what_the_rounded_model_gives(plain, recipe):
    model, state, logits = plain
    new = applied(config(), recipe).instantiate(name="model")
    stored, dropped = quantize_state(model, state, new)
    assert not dropped
    specs = flatten_specs(new.parameter_specs())
    assert specs["decoder/layer/0:2:1/feed_forward/up/weight"].kind == "state"
    size = {p: x.nbytes for p, x in flatten_specs_like(stored).items() if p.endswith("up/weight")}
    bits = 8 if recipe == "int8-weights" else 4
    assert sum(size.values()) == 2 * 16 * 64 * bits // 8
    want = logits(rounded(state, recipe))
    # The same numbers; the scale is applied after the sum instead of before.
    np.testing.assert_allclose(logits_of(new)(stored), want, rtol=1e-3, atol=1e-4)


def flatten_specs_like(state, prefix=""):
    flat = {}
    for name, value in state.items():
        path = f"{prefix}/{name}" if prefix else name
        flat.update(flatten_specs_like(value, path) if isinstance(value, dict) else {path: value})
    return flat


@pytest.mark.slow
def test_calibrated_activations_stay_near_and_need_data(plain):
    model, state, logits = plain
    cfg = applied(config(), "int8-static")
    new = cfg.instantiate(name="model")
    paths = list(find_sites(new))
    linear = [p for p in paths if isinstance(find_sites(new)[p].module, StoredDot)]
    amax = calibrate(config(), state, [(IDS,)], linear, method="logits")
    assert set(amax) == set(linear) and min(amax.values()) > 0
    lower = calibrate(config(), state, [(IDS,)], linear[:1], percentile=90.0, method="logits")
    assert 0 < lower[linear[0]] < amax[linear[0]]
    stored, _ = quantize_state(model, state, new, amax)
    before, after = np.asarray(logits(state)), np.asarray(logits_of(new)(stored))
    # A static scale has coarser steps for small tokens than half a step in 127.
    assert np.linalg.norm(after - before) < 0.05 * np.linalg.norm(before)
    with pytest.raises(ConfigError, match="no data"):
        calibrate(config(), state, [], linear, method="logits")


def test_state_of_a_training_recipe_is_dropped_and_named():
    trained = apply_modifier(config(), QuantizeModifier.Config(recipe="fp8-delayed"))
    model = trained.instantiate(name="model")
    new = applied(trained, "int8-weights").instantiate(name="model")
    made, dropped = quantize_state(model, some_state(model), new)
    assert len(dropped) == 2 * 2 * 6 and all(is_recipe_state(p) for p in dropped)
    assert set(flatten_specs_like(made)) == set(flatten_specs(new.parameter_specs()))


def test_an_adapter_trains_beside_a_stored_weight():
    dot = LoRA.Config(rank=2, base=StoredDot.Config(dtype="int4", group=8))
    cfg = Linear.Config(input_dim=16, output_dim=4, bias=False, dot=dot)
    layer = cfg.instantiate(name="layer")
    w = jax.random.normal(jax.random.key(0), (16, 4))
    q = quantize_weight(w, 1, "int4", group=8)
    state = some_state(layer)
    state["weight"], state["dot"]["base"]["scale"] = q.values, q.scale
    x = jax.random.normal(jax.random.key(2), (3, 16))

    def loss(b):
        params = {**state, "dot": {**state["dot"], "lora_b": b}}
        y, _ = functional(layer, state=params, inputs=(x,), is_training=True)
        return jnp.sum(y**2)

    grad = jax.jit(jax.grad(loss))(jnp.zeros((2, 4)))
    assert np.abs(np.asarray(grad)).min() > 0


def test_what_stored_weights_cannot_do_is_refused():
    def layer(dot, **dims):
        dims = {"input_dim": 16, "output_dim": 4, **dims}
        return Linear.Config(bias=False, dot=dot, **dims).instantiate(name="layer")

    with pytest.raises(ConfigError, match="do not go with"):
        layer(StoredDot.Config(dtype="int8", activations="float8_e4m3fn"))
    with pytest.raises(ConfigError, match="cannot run on integers"):
        layer(StoredDot.Config(group=8, activations="int8"))
    with pytest.raises(ConfigError, match="odd number"):
        layer(StoredDot.Config(dtype="int4"), input_dim=15)
    module = layer(StoredDot.Config(activations="int8"))
    state = some_state(module)
    with pytest.raises(ModuleError, match="no gradient"):
        functional(module, state=state, inputs=(jnp.ones((1, 16)),), is_training=True)
    wrong = {**state, "weight": jnp.ones((16, 4))}
    with pytest.raises(ModuleError, match="expected one stored as int8"):
        functional(
            layer(StoredDot.Config(activations="int8")),
            state={**wrong, "weight": wrong["weight"].astype(jnp.float8_e4m3fn)},
            inputs=(jnp.ones((1, 16)),),
            is_training=False,
        )
    module = layer(DoRA.Config(base=StoredDot.Config()))
    with pytest.raises(ModuleError, match="stored as int8"):
        functional(
            module,
            state=some_state(module),
            inputs=(jnp.ones((1, 16)),),
            is_training=False,
        )
