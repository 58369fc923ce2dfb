"""Modules: children, described state, initialization, and where a call finds its context."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import Module, current_context, functional
from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.layers import BaseFeedForward, Constant, FeedForward, Layer, Linear, Normal


class Pair(Layer):
    class Config(Layer.Config):
        dim: Required[int] = REQUIRED
        first: Linear.Config = Linear.Config()
        second: Linear.Config = Linear.Config()

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)
        dims = dict(input_dim=cfg.dim, output_dim=cfg.dim)
        self.first = self._add_child("first", cfg.first, Linear, **dims)
        self.second = self._add_child("second", cfg.second, Linear, **dims)

    def forward(self, x):
        return self.second(self.first(x))


class Triple(Pair):
    class Config(Pair.Config):
        extra: Linear.Config = Linear.Config()

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)
        self.extra = self._add_child(
            "extra", cfg.extra, Linear, input_dim=cfg.dim, output_dim=cfg.dim
        )


def test_a_linear_layer_is_a_matrix_product_plus_bias():
    layer = Linear.Config(input_dim=3, output_dim=2).instantiate(name="m")
    state = layer.initialize(jax.random.key(0))
    x = jnp.arange(12.0).reshape(4, 3)
    y, collection = functional(layer, state=state, inputs=(x,), is_training=False)
    np.testing.assert_allclose(y, np.asarray(x) @ state["weight"] + state["bias"], rtol=1e-6)
    assert collection.names() == dict(losses=(), summaries=(), state_updates=(), outputs=())


def test_state_is_nested_by_child_name_and_described_before_it_exists():
    module = Pair.Config(dim=4).instantiate(name="m")
    specs = module.parameter_specs()
    state = module.initialize(jax.random.key(0))
    assert jax.tree.structure(state) == jax.tree.structure(
        specs, is_leaf=lambda s: hasattr(s, "axes")
    )
    assert specs["first"]["weight"].shape == state["first"]["weight"].shape == (4, 4)
    assert specs["first"]["weight"].axes == ("embed", "mlp")


def test_adding_a_sibling_changes_no_other_layers_weights():
    key = jax.random.key(3)
    pair = Pair.Config(dim=4).instantiate(name="m").initialize(key)
    triple = Triple.Config(dim=4).instantiate(name="other_name").initialize(key)
    for name in ("first", "second"):
        np.testing.assert_array_equal(pair[name]["weight"], triple[name]["weight"])
    assert not np.array_equal(triple["first"]["weight"], triple["second"]["weight"])


@pytest.mark.parametrize(
    "make_key",
    [
        lambda: jax.random.key(0),
        lambda: jax.random.PRNGKey(0),
        lambda: jax.random.key(0, impl="rbg"),
    ],
    ids=["typed", "raw", "rbg"],
)
def test_every_kind_of_key_initializes(make_key):
    module = Pair.Config(dim=4).instantiate(name="m")
    a, b = module.initialize(make_key()), module.initialize(make_key())
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_a_call_outside_functional_names_the_module_and_the_way():
    module = Pair.Config(dim=4).instantiate(name="m")
    assert current_context() is None
    with pytest.raises(ModuleError, match=r"m\.first\.forward was called outside.*\n.*functional"):
        module.first(jnp.ones((1, 4)))


def test_a_shape_error_names_the_layer_the_shapes_and_the_config_path():
    module = Pair.Config(dim=4).instantiate(name="m")
    state = module.initialize(jax.random.key(0))
    with pytest.raises(ModuleError) as caught:
        functional(module, state=state, inputs=(jnp.ones((2, 5)),), is_training=False)
    notes = "\n".join(caught.value.__notes__)
    assert "m.first" in notes and "float32[2, 5]" in notes and "config path: first" in notes


def test_an_error_of_jax_itself_is_annotated_too():
    class Broken(Layer):
        def forward(self, x):
            return x @ jnp.ones((7, 7))

    module = Broken.Config().instantiate(name="m")
    with pytest.raises(TypeError) as caught:
        functional(module, state={}, inputs=(jnp.ones((2, 5)),), is_training=False)
    assert "m (" in "\n".join(caught.value.__notes__)


def test_a_module_holds_no_arrays():
    class Holder(Layer):
        def __init__(self, cfg, *, parent=None):
            super().__init__(cfg, parent=parent)
            self.table = jnp.ones(3)

    with pytest.raises(ModuleError, match="holds none"):
        Holder.Config().instantiate(name="m")


def test_direct_construction_is_refused():
    with pytest.raises(ModuleError, match="constructed directly"):
        Linear(Linear.Config(input_dim=1, output_dim=1))


@pytest.mark.parametrize("name", ["a b", "_x", "3:x", "forward", "initialize"])
def test_bad_child_names_are_refused(name):
    class Parent(Layer):
        class Config(Layer.Config):
            child: Linear.Config = Linear.Config(input_dim=1, output_dim=1)

        def __init__(self, cfg, *, parent=None):
            super().__init__(cfg, parent=parent)
            self._add_child(name, cfg.child, Linear)

        def forward(self, x):
            return x

    with pytest.raises(ModuleError):
        Parent.Config().instantiate(name="m")


def test_instantiation_makes_no_array_and_no_thread():
    arrays, threads = jax.live_arrays(), threading.enumerate()
    Pair.Config(dim=512).instantiate(name="m")
    assert {id(a) for a in jax.live_arrays()} <= {id(a) for a in arrays}
    assert set(threading.enumerate()) <= set(threads)


def test_a_child_takes_the_parents_precision_unless_it_sets_its_own():
    cfg = Pair.Config(dim=4, compute_dtype="bfloat16")
    cfg.second.compute_dtype = "float32"
    module = cfg.instantiate(name="m")
    assert module.first.compute_dtype == "bfloat16"
    assert module.second.compute_dtype == "float32"
    assert module.first.param_dtype == "float32"


def test_the_source_config_is_never_changed():
    cfg = Pair.Config(dim=4, compute_dtype="bfloat16")
    text = cfg.to_text()
    module = cfg.instantiate(name="m")
    assert cfg.to_text() == text
    module.cfg.copy().set(dim=8)
    with pytest.raises(Exception, match="frozen"):
        module.cfg.dim = 8


def test_a_scaled_dim_follows_the_input_dim():
    cfg = FeedForward.Config(input_dim=6)
    module = cfg.instantiate(name="m")
    assert module.parameter_specs()["up"]["weight"].shape == (6, 24)


def test_initializers_make_what_they_say():
    spec_of = Linear.Config(input_dim=400, output_dim=300).instantiate(name="m").parameter_specs()
    state = (
        Linear.Config(input_dim=400, output_dim=300)
        .instantiate(name="m")
        .initialize(jax.random.key(0))
    )
    # Fan-in scaling: variance 1/400; 120,000 draws put the estimate within 1 %.
    np.testing.assert_allclose(np.std(state["weight"]), 1 / 20, rtol=0.01)
    assert np.max(np.abs(state["weight"])) <= 2 / 20 / 0.8796 + 1e-6
    weight = spec_of["weight"]
    assert np.all(Constant(2.5)(jax.random.key(0), weight) == 2.5)
    np.testing.assert_allclose(np.std(Normal(0.5)(jax.random.key(0), weight)), 0.5, rtol=0.01)


def test_threads_do_not_share_a_context():
    seen = {}

    class Probe(Layer):
        def forward(self, x):
            thread = threading.Thread(target=lambda: seen.update(other=current_context()))
            thread.start()
            thread.join()
            seen["own"] = current_context()
            return x

    module = Probe.Config().instantiate(name="m")
    functional(module, state={}, inputs=(1.0,), is_training=False)
    assert seen["other"] is None and seen["own"].module is module


def test_concurrent_calls_in_threads_keep_apart():
    class Slow(Layer):
        def forward(self, x, barrier):
            barrier.wait(timeout=200)
            current_context().add_summary("x", x)
            barrier.wait(timeout=200)
            return current_context().state["tag"]

    module = Slow.Config().instantiate(name="m")
    barrier, results = threading.Barrier(2), {}

    def run(tag):
        out, col = functional(module, state={"tag": tag}, inputs=(tag, barrier), is_training=False)
        results[tag] = (out, float(col.summaries["x"].result()))

    threads = [threading.Thread(target=run, args=(t,)) for t in (1.0, 2.0)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == {1.0: (1.0, 1.0), 2.0: (2.0, 2.0)}


def test_a_public_method_keeps_its_signature_and_docstring():
    import inspect

    assert list(inspect.signature(Pair.forward).parameters) == ["self", "x"]
    assert Linear.forward.__doc__.startswith("(..., *input_dim)")


def test_repeated_module_calls_give_distinct_names_and_keys():
    class Noise(Layer):
        def forward(self):
            value = jax.random.uniform(current_context().key())
            current_context().add_summary("value", value)
            return value

    class Twice(Layer):
        class Config(Layer.Config):
            d: Noise.Config = Noise.Config()

        def __init__(self, cfg, *, parent=None):
            super().__init__(cfg, parent=parent)
            self.d = self._add_child("d", cfg.d, Noise)

        def forward(self):
            return self.d(), self.d()

    module = Twice.Config().instantiate(name="m")
    (a, b), col = functional(module, state={}, inputs=(), is_training=True, key=jax.random.key(0))
    assert a != b
    assert set(col.summaries) == {"d/value", "d#1/value"}


def test_shared_weights_are_found_by_walking_the_context_stack():
    class Head(Module):
        def forward(self, x):
            owner = current_context().parent
            return x @ owner.state["table"]["weight"]

    class Model(Layer):
        class Config(Layer.Config):
            table: Linear.Config = Linear.Config(input_dim=3, output_dim=3, bias=False)
            head: Head.Config = Head.Config()

        def __init__(self, cfg, *, parent=None):
            super().__init__(cfg, parent=parent)
            self.table = self._add_child("table", cfg.table, Linear)
            self.head = self._add_child("head", cfg.head, Head)

        def forward(self, x):
            return self.head(x)

    module = Model.Config().instantiate(name="m")
    state = module.initialize(jax.random.key(0))
    y, _ = functional(module, state=state, inputs=(jnp.eye(3),), is_training=False)
    np.testing.assert_allclose(y, state["table"]["weight"])


def test_a_role_without_its_method_is_refused():
    class Nothing(BaseFeedForward):
        pass

    with pytest.raises(ModuleError, match="Nothing does not define forward"):
        Nothing.Config(input_dim=3).instantiate(name="m")


def test_a_forgotten_super_init_is_named():
    class Forgetful(Layer):
        def __init__(self, cfg, *, parent=None):
            del cfg, parent

    with pytest.raises(ModuleError, match=r"does not call super\(\).__init__"):
        Forgetful.Config().instantiate(name="m")
