"""Foreign layers alone: described, made, called, with state and randomness, and refused."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interop_foreign import (
    apply_mlp,
    apply_noisy,
    init_mlp,
    make_nnx_linear,
    make_nnx_mlp,
    make_nnx_noise,
    make_nnx_writer,
)

from axcore import functional
from axcore.config import Config, partial_for
from axcore.errors import ModuleError
from axcore.interop import EquinoxLayer, FunctionLayer, NNXLayer
from axcore.module import flatten_specs

KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (2, 5, 4))
PLAIN = FunctionLayer.Config(init=partial_for(init_mlp, features=4), apply=apply_mlp)


def nnx_mlp(**kwargs):
    pytest.importorskip("flax", reason="needs flax")
    return NNXLayer.Config(module=partial_for(make_nnx_mlp, features=4, **kwargs))


def eqx_mlp(**fields):
    eqx = pytest.importorskip("equinox", reason="needs equinox")
    module = partial_for(eqx.nn.MLP, in_size=4, out_size=4, width_size=8, depth=1)
    return EquinoxLayer.Config(module=module, batch_dims=2).set(**fields)


def built(cfg):
    module = cfg.instantiate(name="m")
    return module, module.initialize(KEY)


def call(module, state, *inputs, is_training=False, **kwargs):
    return functional(module, state=state, inputs=inputs, is_training=is_training, **kwargs)


def tree_specs(state):
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {"/".join(k.key for k in path): (x.shape, x.dtype.name) for path, x in flat}


@pytest.mark.parametrize("kind", ["function", "nnx", "equinox"])
def test_parameters_are_described_before_they_exist(kind):
    cfg = {"function": lambda: PLAIN, "nnx": nnx_mlp, "equinox": eqx_mlp}[kind]()
    module, state = built(cfg)
    specs = flatten_specs(module.parameter_specs())
    assert {p: (s.shape, s.dtype) for p, s in specs.items()} == tree_specs(state)
    expected = {
        "function": {"layers/0", "layers/1", "bias", "steps"},
        "nnx": {
            *(f"{n}/{w}" for n in ("up", "down") for w in ("kernel", "bias")),
            *(f"norm/{w}" for w in ("scale", "bias", "mean", "var")),
        },
        "equinox": {f"layers/{n}/{w}" for n in (0, 1) for w in ("weight", "bias")},
    }[kind]
    assert set(specs) == expected
    states = {p for p, s in specs.items() if s.kind == "state"}
    assert states == {"function": {"steps"}, "nnx": {"norm/mean", "norm/var"}}.get(kind, set())
    assert {p for p, s in specs.items() if s.weight_decay} == {
        p for p, s in specs.items() if len(s.shape) > 1
    }
    again = module.initialize(KEY)
    jax.tree.map(np.testing.assert_array_equal, state, again)
    assert Config.from_text(cfg.to_text(), trusted=("interop_foreign", "equinox")) == cfg


def test_a_functions_layer_computes_the_function():
    module, state = built(PLAIN)
    expected = apply_mlp(state | {"layers": [state["layers"]["0"], state["layers"]["1"]]}, X)
    np.testing.assert_array_equal(call(module, state, X)[0], expected)


def test_a_function_gets_the_key_and_the_mode_it_asks_for():
    module, state = built(PLAIN.copy().set(apply=apply_noisy, passes=("key", "is_training")))
    calm, _ = call(module, state, X)
    noisy = [call(module, state, X, is_training=True, key=jax.random.key(k))[0] for k in (0, 0, 1)]
    np.testing.assert_array_equal(noisy[0], noisy[1])
    assert np.abs(noisy[0] - noisy[2]).max() > 0.1 and np.abs(noisy[0] - calm).max() > 0.1


@pytest.mark.oracle
def test_equinox_values_and_gradients_equal_the_librarys_own():
    eqx = pytest.importorskip("equinox", reason="needs equinox")
    module, state = built(eqx_mlp())
    theirs = eqx.nn.MLP(4, 4, 8, 1, key=KEY)

    def place(m):
        return [w for layer in m.layers for w in (layer.weight, layer.bias)]

    ours = [state["layers"][str(n)][w] for n in (0, 1) for w in ("weight", "bias")]
    theirs = eqx.tree_at(place, theirs, ours)

    def their_loss(m):
        return jnp.sum(jnp.sin(jax.vmap(jax.vmap(m))(X)))

    value, grads = jax.value_and_grad(
        lambda s: jnp.sum(jnp.sin(call(module, s, X, is_training=True, key=KEY)[0]))
    )(state)
    their_value, their_grads = eqx.filter_value_and_grad(their_loss)(theirs)
    np.testing.assert_allclose(value, their_value, rtol=1e-6)
    got = [grads["layers"][str(n)][w] for n in (0, 1) for w in ("weight", "bias")]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        got,
        place(their_grads),
    )


@pytest.mark.oracle
def test_nnx_values_gradients_and_statistics_equal_the_librarys_own():
    nnx = pytest.importorskip("flax.nnx", reason="needs flax")
    module, state = built(nnx_mlp())
    theirs = make_nnx_mlp(4, rngs=nnx.Rngs(0))
    nnx.update(theirs, nnx.State(jax.tree.map(jnp.copy, state)))

    def their_loss(m):
        return jnp.sum(jnp.sin(m(X)))

    def our_loss(state):
        y, collection = call(module, state, X, is_training=True, key=KEY)
        return jnp.sum(jnp.sin(y)), collection

    (value, collection), grads = jax.value_and_grad(our_loss, has_aux=True)(state)
    theirs.train()
    their_value, their_grads = nnx.value_and_grad(their_loss)(theirs)
    np.testing.assert_allclose(value, their_value, rtol=1e-6)
    for layer, name in (("up", "kernel"), ("down", "bias"), ("norm", "scale")):
        expected = their_grads[layer][name][...]
        np.testing.assert_allclose(grads[layer][name], expected, rtol=1e-5, atol=1e-6)
    assert set(collection.state_updates) == {"norm/mean", "norm/var"}
    for name in ("mean", "var"):
        got = collection.state_updates[f"norm/{name}"].result()
        np.testing.assert_allclose(got, getattr(theirs.norm, name)[...], rtol=1e-6)
    theirs.eval()
    from axcore.collection import apply_state_updates

    evaluated, unchanged = call(module, apply_state_updates(state, collection), X)
    np.testing.assert_allclose(evaluated, theirs(X), rtol=1e-5, atol=1e-6)
    assert not unchanged.state_updates


def test_nnx_dropout_draws_from_our_key_in_training_only():
    module, state = built(nnx_mlp(rate=0.5))
    one, same, other = (
        call(module, state, X, is_training=True, key=jax.random.key(k))[0] for k in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 1e-3
    np.testing.assert_array_equal(call(module, state, X)[0], call(module, state, X, key=KEY)[0])
    with pytest.raises(ModuleError, match="no"):
        call(module, state, X, is_training=True)


def test_an_nnx_module_that_draws_in_evaluation_needs_a_key_and_what_it_sows_is_an_output():
    pytest.importorskip("flax", reason="needs flax")
    module, state = built(NNXLayer.Config(module=partial_for(make_nnx_noise)))
    assert state == {}
    with pytest.raises(ModuleError, match="draws a random number but no key"):
        call(module, state, X)
    noisy, collection = call(module, state, X, key=KEY)
    assert np.abs(noisy - X).max() > 0.1
    assert [path.split("/")[0] for path in collection.outputs] == ["seen"]


def test_equinox_dropout_differs_by_example_and_is_off_in_evaluation():
    eqx = pytest.importorskip("equinox", reason="needs equinox")
    module, state = built(
        EquinoxLayer.Config(module=partial_for(eqx.nn.Dropout, p=0.5), batch_dims=2)
    )
    ones = jnp.ones((3, 4, 16))
    np.testing.assert_array_equal(call(module, state, ones)[0], ones)
    dropped, _ = call(module, state, ones, is_training=True, key=KEY)
    assert len({np.asarray(row).tobytes() for row in dropped.reshape(12, 16)}) > 6


def test_logical_axes_come_from_patterns_and_from_the_variables_own_names():
    cfg = PLAIN.copy().set(axes={"layers/0": ("embed", "mlp"), "layers/1": ("mlp", "embed")})
    specs = flatten_specs(cfg.instantiate(name="m").parameter_specs())
    assert specs["layers/0"].axes == ("embed", "mlp") and specs["bias"].axes == (None,)
    pytest.importorskip("flax", reason="needs flax")
    named = NNXLayer.Config(module=partial_for(make_nnx_linear, features=4))
    specs = flatten_specs(named.instantiate(name="m").parameter_specs())
    assert specs["kernel"].axes == ("embed", None)


def test_dtypes_are_ours_when_they_are_set():
    module, state = built(PLAIN.copy().set(param_dtype="bfloat16", compute_dtype="bfloat16"))
    assert state["layers"]["0"].dtype == "bfloat16" and state["steps"].dtype == "int32"
    assert call(module, state, X)[0].dtype == "bfloat16"


def test_what_cannot_be_is_refused():
    with pytest.raises(ModuleError, match="matches none") as caught:
        PLAIN.copy().set(axes={"layer/0": ("embed", "mlp")}).instantiate(name="m")
    assert "layers/0" in (caught.value.hint or "")
    with pytest.raises(ModuleError, match="got axes"):
        PLAIN.copy().set(axes={"bias": ("embed", "mlp")}).instantiate(name="m")
    module, _ = built(PLAIN)
    with pytest.raises(ModuleError, match="has no 'bias'"):
        call(module, {"layers": {}}, X)


def test_state_that_an_adapter_cannot_carry_is_refused():
    eqx = pytest.importorskip("equinox", reason="needs equinox")
    pytest.importorskip("flax", reason="needs flax")
    norm = partial_for(eqx.nn.BatchNorm, input_size=4, axis_name="batch", mode="batch")
    with pytest.raises(ModuleError, match=r"equinox\.nn\.State"):
        EquinoxLayer.Config(module=norm).instantiate(name="m")
    module, state = built(NNXLayer.Config(module=partial_for(make_nnx_writer)))
    with pytest.raises(ModuleError, match="sets its parameter 'w'"):
        call(module, state, jnp.ones(3))


@pytest.mark.parametrize("package", ["flax", "equinox"])
def test_a_missing_package_is_named(package, monkeypatch):
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    make = partial_for(init_mlp, features=4)  # never called
    cfg = (NNXLayer if package == "flax" else EquinoxLayer).Config(module=make)
    with pytest.raises(ModuleError, match=f"needs the package '{package}'") as caught:
        cfg.instantiate(name="m")
    assert f"pip install {package}" in (caught.value.hint or "")


def test_the_docstrings_example_runs():
    import doctest

    import axcore.interop

    assert doctest.testmod(axcore.interop).failed == 0
