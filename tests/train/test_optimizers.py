"""Optimizers against plain optax, and scanned stacks against unrolled ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axcore.errors import TrainError
from axcore.train import optimizers
from axcore.train.per_layer import per_layer, stack_layers, unroll_layers

LR = optax.linear_schedule(1e-2, 1e-3, 10)
# Above Adafactor's smallest dim to factor, and not square.
ROWS, COLUMNS, LAYERS = 6, 8, 3
FACTOR = dict(min_dim_size_to_factor=4)


class Spec:
    """The parts of ParameterSpec that optimizers look at."""

    def __init__(self, shape, axes, fan_in_dims=(), fan_out_dims=()):
        self.shape, self.axes = shape, axes
        self.fan_in_dims, self.fan_out_dims = fan_in_dims, fan_out_dims


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def stacked_params():
    layers = {"w": normal(1, LAYERS, ROWS, COLUMNS), "b": normal(2, LAYERS, COLUMNS)}
    return {
        "embed": {"weight": normal(0, 9, ROWS)},
        "decoder": {"layer": {f"0:{LAYERS}:1": layers}, "norm": normal(3, ROWS)},
    }


SPECS = {
    "embed": {"weight": Spec((9, ROWS), ("vocab", "embed"), (0,), (1,))},
    "decoder": {
        "layer": {
            f"0:{LAYERS}:1": {
                "w": Spec((LAYERS, ROWS, COLUMNS), ("layers", "embed", "mlp"), (1,), (2,)),
                "b": Spec((LAYERS, COLUMNS), ("layers", "mlp")),
            }
        },
        "norm": Spec((ROWS,), ("embed",)),
    },
}
MASK = {
    "embed": {"weight": False},
    "decoder": {
        "layer": {f"0:{LAYERS}:1": {"w": True, "b": np.array([True, False, True])}},
        "norm": False,
    },
}
UNROLLED_MASK = {
    "embed": {"weight": False},
    "decoder": {
        "layer": {str(i): {"w": True, "b": i != 1} for i in range(LAYERS)},
        "norm": False,
    },
}


def grads_at(params, step):
    return jax.tree.map(lambda p: jnp.sin(3 * p + step) * (1 + step), params)


def run(transformation, params, mask=None, steps=3):
    """Parameters after a few steps, jitted; ``mask`` goes in as the learner would give it."""
    state = transformation.init(params)
    extra = {} if mask is None else {"weight_decay_mask": mask}

    @jax.jit
    def step(params, state, number):
        updates, state = transformation.update(grads_at(params, number), state, params, **extra)
        return optax.apply_updates(params, updates), state

    for number in range(steps):
        params, state = step(params, state, number)
    return params, state


def assert_equal(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **(tolerance or dict(rtol=0, atol=0)))


SAME_OPS = {
    "adamw": (optimizers.adamw(LR, weight_decay=0.1), optax.adamw(LR, weight_decay=0.1)),
    "adamw-nesterov-bf16": (
        optimizers.adamw(LR, mu_dtype="bfloat16", nesterov=True),
        optax.adamw(LR, weight_decay=0.0, mu_dtype="bfloat16", nesterov=True),
    ),
    "lion": (optimizers.lion(LR, weight_decay=0.1), optax.lion(LR, weight_decay=0.1)),
    "sgd": (optimizers.sgd(LR), optax.sgd(LR)),
    "sgd-momentum": (optimizers.sgd(LR, momentum=0.9), optax.sgd(LR, momentum=0.9)),
    "muon": (optimizers.muon(LR), optax.contrib.muon(LR)),
}


@pytest.mark.parametrize("name", SAME_OPS)
def test_updates_are_bitwise_those_of_optax(name):
    ours, theirs = SAME_OPS[name]
    params = unroll_layers(stacked_params())
    assert_equal(run(ours, params)[0], run(theirs, params)[0])


def test_adafactor_agrees_with_optax_up_to_the_order_of_factors():
    # The learning rate is multiplied in last; in optax before the parameter scale.
    params = unroll_layers(stacked_params())
    theirs = run(optax.adafactor(LR, **FACTOR), params)[0]
    assert_equal(run(optimizers.adafactor(LR, **FACTOR), params)[0], theirs, rtol=1e-5, atol=1e-6)


def test_muon_decays_as_optax_does():
    params = unroll_layers(stacked_params())
    theirs = optax.contrib.muon(LR, weight_decay=0.1, adam_weight_decay=0.1)
    assert_equal(run(optimizers.muon(LR, weight_decay=0.1), params)[0], run(theirs, params)[0])


def test_weight_decay_schedule_is_followed():
    decay = optax.linear_schedule(0.0, 0.3, 3)
    transformation = optimizers.sgd(0.5, weight_decay=decay)
    params = {"w": jnp.ones(2)}
    state = transformation.init(params)
    for step in range(3):
        updates, state = transformation.update({"w": jnp.zeros(2)}, state, params)
        np.testing.assert_allclose(updates["w"], -0.5 * 0.1 * step, rtol=1e-6, atol=0)


def test_mask_agrees_with_optax_mask():
    params = unroll_layers(stacked_params())
    theirs = optax.adamw(LR, weight_decay=0.1, mask=UNROLLED_MASK)
    ours = optimizers.adamw(LR, weight_decay=0.1)
    assert_equal(run(ours, params, UNROLLED_MASK)[0], run(theirs, params)[0])


def test_mask_reaches_a_partitioned_transformation():
    parts = {"decay": optimizers.sgd(1.0, weight_decay=0.5), "rest": optimizers.sgd(1.0)}
    transformation = optax.partition(parts, {"a": "decay", "b": "rest"})
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    for decays in (True, False):
        updates, _ = transformation.update(
            zeros,
            transformation.init(params),
            params,
            weight_decay_mask={"a": decays, "b": True},
        )
        np.testing.assert_array_equal(updates["a"], -0.5 * decays)
        np.testing.assert_array_equal(updates["b"], 0.0)


def third_party():
    """A block-wise rule that optax does not have: updates of RMS one per array."""

    def init(params):
        return {"seen": jax.tree.map(jnp.zeros_like, params), "calls": jnp.zeros([], jnp.int32)}

    def update(grads, state, params=None):
        seen = jax.tree.map(lambda s, g: 0.5 * s + g, state["seen"], grads)
        updates = jax.tree.map(lambda s: -0.01 * s / jnp.sqrt(jnp.mean(s**2)), seen)
        return updates, {"seen": seen, "calls": state["calls"] + 1}

    return optax.GradientTransformation(init, update)


MAPPED = {
    "adamw": optimizers.adamw(LR, weight_decay=0.1),
    "adafactor": optimizers.adafactor(LR, weight_decay=0.1, momentum=0.9, **FACTOR),
    "lion": optimizers.lion(LR, weight_decay=0.1),
    "sgd": optimizers.sgd(LR, momentum=0.9, weight_decay=0.1),
    "muon": optimizers.muon(LR, weight_decay=0.1),
    "muon-specs": optimizers.muon(LR, weight_decay=0.1, consistent_rms=0.2, specs=SPECS),
    "optax-adafactor": optax.adafactor(LR, **FACTOR),
    "optax-lamb": optax.lamb(LR),
    "third-party": third_party(),
}
MIXING = {
    "norm-inside": optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(LR, **FACTOR)),
    "noise": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(LR)),
    "every-second": optax.MultiSteps(optax.adam(LR), 2).gradient_transformation(),
}


@pytest.mark.parametrize("name", [*MAPPED, *MIXING])
def test_scanned_and_unrolled_stacks_get_equal_updates(name):
    transformation = (MAPPED | MIXING)[name]
    params = stacked_params()
    scanned, _ = run(per_layer(transformation), params, MASK)
    unrolled_params = unroll_layers(params)
    unrolled, _ = run(optax.with_extra_args_support(transformation), unrolled_params, UNROLLED_MASK)
    # Muon's batched and single matrix products may round differently.
    assert_equal(unroll_layers(scanned), unrolled, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", MAPPED)
def test_state_of_a_scanned_stack_is_the_stack_of_the_layers_states(name):
    params = stacked_params()
    state = per_layer(MAPPED[name]).init(params)
    unrolled = MAPPED[name].init(unroll_layers(params))
    layers = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(unrolled)[0]
    }
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        key, stack = jax.tree_util.keystr(path), f"['0:{LAYERS}:1']"
        if stack in key:
            own = [layers.pop(key.replace(stack, f"['{i}']")) for i in range(LAYERS)]
            np.testing.assert_array_equal(leaf, np.stack(own))
        else:
            np.testing.assert_array_equal(leaf, layers.pop(key))
    assert not layers


def test_elementwise_state_of_a_scan_is_that_of_plain_optax():
    params = stacked_params()
    assert_equal(run(per_layer(optax.adam(LR)), params)[1], run(optax.adam(LR), params)[1])


def test_mapping_over_layers_costs_nothing():
    params = stacked_params()
    transformation = optimizers.adamw(LR, weight_decay=0.1)

    def cost(transformation):
        state = transformation.init(params)
        analysis = jax.jit(transformation.update).lower(params, state, params).compile()
        return {
            k: v for k, v in analysis.cost_analysis().items() if k in ("flops", "bytes accessed")
        }

    assert cost(per_layer(transformation)) == cost(transformation)


def test_nested_stacks_are_mapped_over_both_axes():
    inner = {"0:2:1": {"w": normal(5, 2, LAYERS, ROWS, COLUMNS)}}
    params = {"0:2:1": {"block": {f"0:{LAYERS}:1": inner["0:2:1"]}}, "head": normal(6, ROWS, 4)}
    transformation = optimizers.adafactor(LR, **FACTOR)
    scanned, _ = run(per_layer(transformation), params)
    unrolled, _ = run(transformation, unroll_layers(params))
    assert_equal(unroll_layers(scanned), unrolled, rtol=1e-5, atol=1e-6)


def test_stacks_of_different_sizes_are_mapped_each():
    params = {
        "a": {"0:2:1": {"w": normal(0, 2, ROWS, COLUMNS)}},
        "b": {"0:4:2": {"w": normal(1, 2, ROWS)}, "1:7:2": {"w": normal(2, 3, ROWS, COLUMNS)}},
    }
    transformation = optimizers.adafactor(LR, **FACTOR)
    scanned, _ = run(per_layer(transformation), params)
    unrolled, _ = run(transformation, unroll_layers(params))
    assert set(unrolled["b"]) == {"0", "2", "1", "3", "5"}
    assert_equal(unroll_layers(scanned), unrolled, rtol=1e-5, atol=1e-6)


def test_stacking_inverts_unrolling():
    params = stacked_params()
    assert_equal(stack_layers(unroll_layers(params), params), params)


def orthogonality(matrix):
    """Singular values of Muon's direction lie around one."""
    return np.linalg.svd(np.asarray(matrix), compute_uv=False)


def test_muon_flattens_heads_and_keeps_experts_apart():
    specs = {
        "q": Spec((8, 2, 4), ("embed", "heads", "head_dim"), (0,), (1, 2)),
        "up": Spec((3, 8, 6), ("experts", "embed", "mlp"), (1,), (2,)),
        "head": Spec((8, 9), ("embed", "vocab"), (0,), (1,)),
    }
    params = {k: normal(n, *s.shape) for n, (k, s) in enumerate(specs.items())}
    transformation = optimizers.muon(1.0, nesterov=False, specs=specs)
    grads = {k: normal(n + 7, *s.shape) for n, (k, s) in enumerate(specs.items())}
    updates, _ = transformation.update(grads, transformation.init(params), params)
    q = orthogonality(updates["q"].reshape(8, 8))
    assert 0.5 < q.min() and q.max() < 1.5
    for expert in updates["up"]:
        singular = orthogonality(expert)
        assert 0.5 < singular.min() and singular.max() < 1.5
    # Adam's first step is the gradient's sign: the head is no matrix of Muon's.
    np.testing.assert_allclose(updates["head"], -np.sign(grads["head"]), rtol=1e-3)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: optimizers.sgd(float("nan")), "learning_rate"),
        (lambda: optimizers.muon(-1e-3), "learning_rate"),
        (lambda: optimizers.adamw(LR, weight_decay=float("inf")), "weight_decay"),
        (lambda: optimizers.adamw(LR, b1=2.0), "b1"),
        (lambda: optimizers.lion(LR, b2=1.0), "b2"),
        (lambda: optimizers.adamw(LR, eps=-1e-8), "eps"),
    ],
)
def test_rates_that_cannot_be_are_refused(make, name):
    with pytest.raises(TrainError, match=f"{name} must be a number"):
        make()
