"""Axes of optimizer state for optax's transformations and unknown ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axcore.module import ParameterSpec
from axcore.parallel.optimizer_state import StateSpec, optimizer_state_axes
from axcore.train import optimizers
from axcore.train.per_layer import per_layer, unroll_layers


def spec(shape, *axes, **kw):
    return ParameterSpec(shape, "float32", axes, lambda key, spec: jnp.zeros(spec.shape), **kw)


SPECS = {
    "decoder": {
        "layer": {
            "0:3:1": {
                "w": spec((3, 4, 6), "layers", "embed", "mlp", fan_in_dims=(1,), fan_out_dims=(2,)),
                "b": spec((3, 6), "layers", "mlp"),
            }
        },
        "norm": {"scale": spec((4,), "embed")},
    },
    "scale": spec((7,), "vocab"),
    "square": spec((4, 4), "embed", "heads", fan_in_dims=(0,), fan_out_dims=(1,)),
}
PARAMS = jax.tree.map(lambda s: s.struct(), SPECS)
FACTOR = dict(min_dim_size_to_factor=4)


def axes_of(transformation, params=PARAMS):
    shapes = jax.eval_shape(per_layer(transformation).init, params)
    found = optimizer_state_axes(shapes, SPECS)
    by_name = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(found.specs)[0]
    }
    return by_name, found


def assert_mirrors_params(state):
    for path, leaf in jax.tree_util.tree_flatten_with_path(SPECS)[0]:
        got = state
        for key in path:
            got = got[key.key]
        assert got.axes == leaf.axes


def test_moments_take_their_parameters_axes():
    _, found = axes_of(optimizers.adamw(1e-3))
    adam = found.specs[0]
    assert_mirrors_params(adam.mu)
    assert_mirrors_params(adam.nu)
    assert adam.count.axes == ()


@pytest.mark.parametrize(
    "transformation",
    [optimizers.lion(1e-3), optimizers.sgd(1e-3, momentum=0.9), optax.adabelief(1e-3)],
)
def test_only_scalars_are_replicated(transformation):
    by_name, found = axes_of(transformation)
    assert {leaf.axes for leaf in by_name.values()} >= {s.axes for s in jax.tree.leaves(SPECS)}
    assert all(r.shape == () for r in found.replicated)


def test_muon_splits_its_state_without_losing_axes():
    by_name, found = axes_of(optimizers.muon(1e-3, specs=SPECS))
    for path, leaf in jax.tree_util.tree_flatten_with_path(SPECS)[0]:
        name = "/".join(key.key for key in path)
        mine = [s for s in by_name.values() if s.parameter == name]
        # Muon keeps one moment of a matrix, Adam two of anything else.
        assert len(mine) == (1 if leaf.fan_out_dims else 2)
        assert {s.axes for s in mine} == {leaf.axes}
    # The Newton-Schulz coefficients belong to no parameter.
    assert [r.shape for r in found.replicated if r.shape] == [(3,)]


def test_factored_leaves_take_the_surviving_dims():
    _, found = axes_of(optax.adafactor(1e-3, **FACTOR))
    factored = found.specs[0]

    def layer(tree):
        return tree["decoder"]["layer"]["0:3:1"]

    assert layer(factored.v_row)["w"] == StateSpec(
        (3, 4), "float32", ("layers", "embed"), "decoder/layer/0:3:1/w"
    )
    assert layer(factored.v_col)["w"].axes == ("layers", "mlp")
    assert layer(factored.v)["b"].axes == ("layers", "mlp")
    assert factored.v["decoder"]["norm"]["scale"].axes == ("embed",)


def test_dims_that_sizes_leave_open_are_replicated_and_listed():
    _, found = axes_of(optax.adafactor(1e-3, **FACTOR))
    assert found.specs[0].v_row["square"].axes == (None,)
    listed = {r.path: r for r in found.replicated}
    row = next(r for name, r in listed.items() if "v_row['square']" in name)
    assert "which dim survived" in row.reason and row.num_bytes == 16


def test_the_longest_matching_path_owns_a_leaf():
    by_name, _ = axes_of(optimizers.sgd(1e-3, momentum=0.9))
    assert next(s for n, s in by_name.items() if n.endswith(".trace['scale']")).axes == ("vocab",)
    assert next(s for n, s in by_name.items() if n.endswith("['norm']['scale']")).axes == ("embed",)


def test_an_unknown_transformation_is_understood():
    """Per-parameter trees in containers of its own, reduced leaves, and a global vector."""

    def init(params):
        return {
            "slow": [params, jax.tree.map(lambda p: jnp.zeros((*p.shape[:-1], 1)), params)],
            "history": jnp.zeros((16,)),
            "sketch": jax.tree.map(lambda p: jnp.zeros((2, 5)), params),
        }

    transformation = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    by_name, found = axes_of(transformation)
    w = "['decoder']['layer']['0:3:1']['w']"
    assert by_name[f"['slow'][0]{w}"].axes == ("layers", "embed", "mlp")
    assert by_name[f"['slow'][1]{w}"].axes == ("layers", "embed", None)
    reasons = {r.path: r.reason for r in found.replicated}
    assert reasons["['history']"] == "belongs to no parameter"
    assert "does not derive" in reasons["['sketch']['scale']"]
    assert [r.num_bytes for r in found.replicated] == sorted(
        (r.num_bytes for r in found.replicated), reverse=True
    )


def test_state_of_single_layers_takes_the_stacks_axes():
    transformation = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    found = optimizer_state_axes(
        jax.eval_shape(transformation.init, jax.eval_shape(unroll_layers, PARAMS)), SPECS
    )
    leaf = found.specs[1][0].mu["decoder"]["layer"]["2"]["w"]
    assert (leaf.shape, leaf.axes) == ((4, 6), ("embed", "mlp"))


def test_every_axis_fits_its_dim():
    for transformation in (optimizers.adafactor(1e-3, momentum=0.9, **FACTOR), optax.sm3(1e-3)):
        by_name, _ = axes_of(transformation)
        sizes = {"layers": 3, "embed": 4, "mlp": 6, "heads": 4, "vocab": 7}
        for leaf in by_name.values():
            assert len(leaf.axes) == len(leaf.shape)
            for axis, dim in zip(leaf.axes, leaf.shape, strict=True):
                assert axis is None or sizes[axis] == dim
            assert leaf.num_bytes == np.prod(leaf.shape, dtype=int) * np.dtype(leaf.dtype).itemsize
