"""Learner: what trains, what decays, what is kept, and what a bad step changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axcore.collection import OutputCollection, make_entry
from axcore.config import config_for
from axcore.errors import TrainError
from axcore.module import ParameterSpec
from axcore.train import optimizers, schedules
from axcore.train.learner import Learner
from axcore.train.per_layer import unroll_layers

LAYERS, DIM, HIDDEN = 4, 3, 5


def init(key, spec):
    return jax.random.normal(key, spec.shape, spec.dtype)


def spec(shape, *axes, **kw):
    return ParameterSpec(shape, kw.pop("dtype", "float32"), axes, init, **kw)


LAYER = {
    "up": {
        "weight": spec((DIM, HIDDEN), "embed", "mlp", fan_in_dims=(0,), fan_out_dims=(1,)),
        "bias": spec((HIDDEN,), "mlp", weight_decay=False),
    },
    "norm": {"scale": spec((DIM,), "embed", weight_decay=False)},
}
REST = {
    "head": {"weight": spec((DIM, 2), "embed", "vocab", fan_in_dims=(0,), fan_out_dims=(1,))},
    "seen": spec((), kind="state", dtype="int32"),
}
UNROLLED = {"layer": {str(i): LAYER for i in range(LAYERS)}, **REST}
SCANNED = {
    "layer": {f"0:{LAYERS}:1": jax.tree.map(lambda s: s.stacked(LAYERS), LAYER)},
    **REST,
}
KEY = f"0:{LAYERS}:1"


def make_params(specs=SCANNED):
    def one(path, s):
        seed = sum(map(ord, jax.tree_util.keystr(path)))
        if s.dtype == "int32":
            return jnp.zeros(s.shape, jnp.int32)
        return jnp.asarray(np.random.default_rng(seed).normal(size=s.shape), s.dtype)

    params = jax.tree_util.tree_map_with_path(one, SCANNED)
    return params if specs is SCANNED else unroll_layers(params)


def make_learner(optimizer=None, **fields):
    optimizer = optimizer or config_for(optimizers.adamw, learning_rate=0.1)
    return Learner.Config(optimizer=optimizer, **fields).instantiate(name="learner")


def grads_of(trainable):
    return jax.tree.map(lambda p: jnp.sin(2 * p).astype(p.dtype), trainable)


def run(learner, specs=SCANNED, steps=3, grads=grads_of, params=None):
    params = make_params(specs) if params is None else params
    state = jax.jit(lambda p: learner.init(p, specs))(params)

    @jax.jit
    def step(params, state):
        trainable, _ = learner.split(params, specs)
        return learner.update(grads(trainable), state, params, specs)

    metrics = {}
    for _ in range(steps):
        params, state, metrics = step(params, state)
    return params, state, metrics


def assert_trees(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, **(tolerance or dict(rtol=0, atol=0)))


# -- the update -------------------------------------------------------------------------------


# Adam on a scan differs in the last bit: a compiler divides by the bias correction as it likes.
@pytest.mark.parametrize(
    ("specs", "ours", "theirs"),
    [
        (UNROLLED, config_for(optimizers.adamw, 0.1), optax.adam(0.1)),
        (SCANNED, config_for(optimizers.lion, 0.1), optax.lion(0.1, weight_decay=0.0)),
        (SCANNED, config_for(optimizers.sgd, 0.1, momentum=0.9), optax.sgd(0.1, momentum=0.9)),
    ],
    ids=["adamw", "lion", "sgd"],
)
def test_update_is_bitwise_that_of_plain_optax(specs, ours, theirs):
    learner = make_learner(ours, clip_global_norm=0.5)
    chain = optax.chain(optax.clip_by_global_norm(0.5), theirs)
    params = make_params(specs)
    plain = {k: v for k, v in params.items() if k != "seen"}
    state, their_state = learner.init(params, specs), chain.init(plain)
    for step in range(2):
        grads = jax.tree.map(lambda p, n=step: jnp.sin(2 * p + n), plain)
        # Operation by operation, since whole programs are fused differently.
        params, state, _ = learner.update(grads, state, params, specs)
        updates, their_state = chain.update(grads, their_state, plain)
        plain = optax.apply_updates(plain, updates)
    assert_trees({k: v for k, v in params.items() if k != "seen"}, plain)
    assert_trees(jax.tree.leaves(state.optimizer), jax.tree.leaves(their_state))


@pytest.mark.parametrize(
    "optimizer",
    [
        config_for(optimizers.adamw, 0.1, weight_decay=0.3),
        config_for(optimizers.adafactor, 0.1, weight_decay=0.3, min_dim_size_to_factor=2),
        config_for(optimizers.lion, 0.1, weight_decay=0.3),
        config_for(optimizers.sgd, 0.1, momentum=0.9, weight_decay=0.3),
        config_for(optimizers.muon, 0.1, ns_steps=2, weight_decay=0.3),
        config_for(optax.contrib.muon, 0.1, ns_steps=2),
        config_for(optax.chain, config_for(optax.clip, 0.1), config_for(optax.sgd, 0.1)),
    ],
    ids=["adamw", "adafactor", "lion", "sgd", "muon", "optax-muon", "optax-chain"],
)
def test_both_stack_forms_learn_alike(optimizer):
    scanned, _, a = run(make_learner(optimizer, clip_global_norm=1.0))
    unrolled, _, b = run(make_learner(optimizer, clip_global_norm=1.0), UNROLLED)
    # The global norm is summed in another order.
    assert_trees(unroll_layers(scanned), unrolled, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-6)


def test_module_state_is_not_learned():
    params, state, _ = run(make_learner())
    assert params["seen"].dtype == jnp.int32 and params["seen"] == 0
    assert "seen" not in state.optimizer[0].mu


def test_metrics_are_those_of_the_step():
    schedule = config_for(schedules.linear, peak=0.4, warmup_steps=0, total_steps=4)
    learner = make_learner(
        config_for(optimizers.sgd, learning_rate=schedule), report_update_norm=True
    )
    params = make_params()
    _, _, metrics = run(learner, steps=3)
    assert metrics["learning_rate"] == pytest.approx(0.4 * 2 / 4)
    _, _, first = run(learner, steps=1)
    leaves = jax.tree.leaves(grads_of({k: v for k, v in params.items() if k != "seen"}))
    norm = np.sqrt(sum(np.sum(np.square(np.asarray(g, np.float64))) for g in leaves))
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert first["update_norm"] == pytest.approx(0.4 * norm, rel=1e-6)
    assert first["skipped_steps"] == 0


def test_learning_rate_is_left_out_where_there_is_none():
    _, _, metrics = run(make_learner(config_for(optax.scale, -0.1)), steps=1)
    assert "learning_rate" not in metrics


def test_low_precision_norm_is_summed_in_float32():
    learner = make_learner(config_for(optimizers.sgd, 0.0))
    specs = {"w": spec((4096,), "embed", dtype="bfloat16")}
    params = {"w": jnp.ones(4096, jnp.bfloat16)}
    _, _, metrics = learner.update(params, learner.init(params, specs), params, specs)
    assert metrics["grad_norm"] == 64.0


# -- weight decay -----------------------------------------------------------------------------


def decayed(specs=SCANNED, optimizer=None, **fields):
    """The parameters' names that a pure decay, to the half, changes, per layer."""
    if optimizer is None:
        optimizer = config_for(optimizers.sgd, 1.0, weight_decay=0.5)
    learner = make_learner(optimizer, **fields)
    before = make_params(specs)
    after, _, _ = run(
        learner, specs, steps=1, grads=lambda t: jax.tree.map(jnp.zeros_like, t), params=before
    )
    before, after = (unroll_layers(p) for p in (before, after))
    names = set()
    for path, leaf in jax.tree_util.tree_flatten_with_path(before)[0]:
        new = after
        for key in path:
            new = new[key.key]
        if not np.array_equal(leaf, new):
            np.testing.assert_allclose(new, 0.5 * leaf, rtol=1e-6)
            names.add("/".join(k.key for k in path))
    return names


ALL_WEIGHTS = {f"layer/{i}/up/weight" for i in range(LAYERS)} | {"head/weight"}


@pytest.mark.parametrize("specs", [SCANNED, UNROLLED], ids=["scanned", "unrolled"])
def test_decay_follows_the_layers_hints_and_the_patterns(specs):
    assert decayed(specs) == ALL_WEIGHTS
    assert decayed(specs, weight_decay_exclude=("head/**",)) == ALL_WEIGHTS - {"head/weight"}
    assert decayed(specs, weight_decay_include=("**/scale",)) == ALL_WEIGHTS | {
        f"layer/{i}/norm/scale" for i in range(LAYERS)
    }


@pytest.mark.parametrize("specs", [SCANNED, UNROLLED], ids=["scanned", "unrolled"])
def test_decay_of_single_layers(specs):
    found = decayed(
        specs,
        weight_decay_include=("layer/3/up/bias",),
        weight_decay_exclude=("layer/[0-1]/**/weight",),
    )
    assert found == {
        "layer/2/up/weight",
        "layer/3/up/weight",
        "layer/3/up/bias",
        "head/weight",
    }


def test_patterns_that_the_optimizer_does_not_read_are_refused():
    optimizer = config_for(optax.adamw, learning_rate=0.1, weight_decay=0.1)
    learner = make_learner(optimizer, weight_decay_exclude=("**/scale",))
    with pytest.raises(TrainError, match="AX711") as error:
        learner.init(make_params(), SCANNED)
    assert "axcore.train.optimizers" in str(error.value)


def test_a_chain_with_decayed_weights_reads_the_patterns():
    optimizer = config_for(
        optax.chain,
        config_for(optax.scale_by_adam),
        config_for(optimizers.decayed_weights, 0.5),
        config_for(optax.scale_by_learning_rate, 1.0),
    )
    found = decayed(optimizer=optimizer, weight_decay_exclude=("layer/2/**",))
    assert found == ALL_WEIGHTS - {"layer/2/up/weight"}


# -- patterns that are wrong ------------------------------------------------------------------


@pytest.mark.parametrize("field", ["frozen_params", "weight_decay_include", "weight_decay_exclude"])
def test_a_pattern_that_matches_nothing_is_an_error(field):
    learner = make_learner(**{field: ("layer/3/up/weigth",)})
    with pytest.raises(TrainError, match="matches none of the") as error:
        learner.init(make_params(), SCANNED)
    assert error.value.where == field
    assert "did you mean 'layer/3/up/weight'" in str(error.value)


def test_freezing_everything_is_an_error():
    with pytest.raises(TrainError, match="nothing is left to train"):
        make_learner(frozen_params=("**",)).init(make_params(), SCANNED)


@pytest.mark.parametrize(
    "fields", [dict(ema_decay=1.0), dict(ema_decay=-0.1), dict(clip_global_norm=0.0)]
)
def test_values_out_of_range_are_refused(fields):
    with pytest.raises(TrainError) as error:
        make_learner(**fields)
    assert error.value.where == next(iter(fields))


def test_something_that_is_no_optimizer_is_refused():
    learner = make_learner(config_for(optax.constant_schedule, 0.1))
    with pytest.raises(TrainError, match="AX715"):
        learner.init(make_params(), SCANNED)


def test_parameters_of_another_model_are_refused():
    params = make_params()
    del params["head"]
    with pytest.raises(TrainError, match="'head/weight' is missing"):
        make_learner().init(params, SCANNED)


# -- freezing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [SCANNED, UNROLLED], ids=["scanned", "unrolled"])
def test_frozen_parameters_have_no_state_and_stay_bitwise(specs):
    learner = make_learner(frozen_params=("head/**", "**/bias"), ema_decay=0.9)
    params, state, _ = run(learner, specs)
    before = make_params(specs)
    np.testing.assert_array_equal(params["head"]["weight"], before["head"]["weight"])
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    assert not any("head" in n or "bias" in n for n in names)
    assert any("scale" in n for n in names)


@pytest.mark.parametrize("specs", [SCANNED, UNROLLED], ids=["scanned", "unrolled"])
def test_freezing_single_layers_keeps_them_and_trains_the_others(specs):
    learner = make_learner(frozen_params=("layer/[02]/**",))
    params, _, _ = run(learner, specs)
    before, after = unroll_layers(make_params(specs)), unroll_layers(params)
    for i in range(LAYERS):
        same = np.array_equal(
            before["layer"][str(i)]["up"]["weight"], after["layer"][str(i)]["up"]["weight"]
        )
        assert same == (i in (0, 2))


def test_partly_frozen_stack_has_state_for_trainable_layers_only():
    learner = make_learner(frozen_params=("layer/[0-1]/**",))
    _, state, _ = run(learner, steps=1)
    layers = state.optimizer[0].mu["layer"]
    assert set(layers) == {"2:4:1"}
    assert layers["2:4:1"]["up"]["weight"].shape == (2, DIM, HIDDEN)


@pytest.mark.parametrize(
    "optimizer",
    [
        config_for(optimizers.adafactor, 0.1, weight_decay=0.2, min_dim_size_to_factor=2),
        config_for(optimizers.muon, 0.1, ns_steps=2, weight_decay=0.2),
    ],
    ids=["adafactor", "muon"],
)
def test_partly_frozen_stacks_learn_as_unrolled_ones(optimizer):
    fields = dict(frozen_params=("layer/1/up/*",), weight_decay_exclude=("layer/3/up/weight",))
    scanned, _, _ = run(make_learner(optimizer, **fields))
    unrolled, _, _ = run(make_learner(optimizer, **fields), UNROLLED)
    assert_trees(unroll_layers(scanned), unrolled, rtol=1e-5, atol=1e-6)


def test_split_and_merge_are_inverse():
    learner = make_learner(frozen_params=("layer/[13]/up/*", "head/**"))
    params = make_params()
    trainable, frozen = learner.split(params, SCANNED)
    assert set(trainable["layer"]) == {KEY, "0:1:1", "2:3:1"}
    assert set(frozen) == {"head", "layer", "seen"}
    assert_trees(learner.merge(trainable, frozen, SCANNED), params)
    shapes = jax.tree.map(lambda s: s.shape, learner.trainable_specs(SCANNED))
    assert shapes == jax.tree.map(jnp.shape, trainable)


def quadratic(params, rows, key):
    del key
    found = OutputCollection()
    hidden = rows["x"] @ params["layer"]["0"]["up"]["weight"]
    out = hidden @ hidden.T @ (rows["x"] @ params["head"]["weight"])
    found.add("losses", "loss", make_entry(jnp.mean(out**2), "mean", rows["x"].shape[0]))
    return found


def count_primitive(jaxpr, name):
    return str(jaxpr).count(f" {name}[")


def test_no_gradient_is_computed_for_frozen_parameters():
    batch = {"x": np.ones((2, DIM), np.float32)}
    params = make_params(UNROLLED)

    def dots(**fields):
        learner = make_learner(**fields)
        return count_primitive(
            jax.make_jaxpr(lambda p: learner.loss_and_grads(quadratic, p, batch, UNROLLED)[0])(
                params
            ),
            "dot_general",
        )

    plain = jax.make_jaxpr(lambda p: quadratic(p, batch, None).losses["loss"].total)(params)
    forward = count_primitive(plain, "dot_general")
    # Only the head trains: its gradient is one product beside those of the forward pass, after the
    # one that carries the cotangent back to it.
    only_head = dots(frozen_params=("layer/**",))
    assert only_head == forward + 2
    assert dots() > only_head


def test_gradients_come_in_the_structure_of_the_trainable_tree():
    learner = make_learner(frozen_params=("layer/[1-3]/**", "**/bias"))
    batch = {"x": np.ones((4, DIM), np.float32)}
    params = make_params(UNROLLED)
    for steps in (1, 2):
        grads, found = learner.loss_and_grads(
            quadratic, params, batch, UNROLLED, accumulation_steps=steps
        )
        trainable, _ = learner.split(params, UNROLLED)
        assert jax.tree.structure(grads) == jax.tree.structure(trainable)
        assert set(found.losses) == {"loss"}


# -- moving average ---------------------------------------------------------------------------


def test_moving_average_has_its_closed_form():
    decay, learner = 0.8, make_learner(config_for(optimizers.sgd, 0.1), ema_decay=0.8)
    history, params = [make_params()], make_params()
    state = learner.init(params, SCANNED)
    for _ in range(4):
        trainable, _ = learner.split(params, SCANNED)
        params, state, _ = learner.update(grads_of(trainable), state, params, SCANNED)
        history.append(params)
    weights = [decay**4] + [(1 - decay) * decay ** (4 - t) for t in range(1, 5)]
    expected = sum(w * p["head"]["weight"] for w, p in zip(weights, history, strict=True))
    np.testing.assert_allclose(state.ema["head"]["weight"], expected, rtol=1e-5)
    averaged = learner.ema_params(state, params, SCANNED)
    np.testing.assert_allclose(averaged["head"]["weight"], expected, rtol=1e-5)
    assert jax.tree.structure(averaged) == jax.tree.structure(params)


def test_asking_for_an_average_that_is_not_kept_is_an_error():
    learner = make_learner()
    state = learner.init(make_params(), SCANNED)
    with pytest.raises(TrainError, match="no moving average"):
        learner.ema_params(state, make_params(), SCANNED)


# -- steps that are not finite ----------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_step_changes_only_counters(bad):
    learner = make_learner(ema_decay=0.9, clip_global_norm=1.0, report_update_norm=True)
    params, state, _ = run(learner)

    @jax.jit
    def step(params, state, value):
        trainable, _ = learner.split(params, SCANNED)
        grads = grads_of(trainable)
        grads["head"]["weight"] = grads["head"]["weight"].at[0, 0].set(value)
        return learner.update(grads, state, params, SCANNED)

    new, after, metrics = step(params, state, bad)
    assert_trees(new, params)
    assert_trees((after.optimizer, after.ema), (state.optimizer, state.ema))
    assert (after.updates, after.skipped, after.skipped_in_a_row) == (3, 1, 1)
    assert metrics["skipped_steps"] == 1 and metrics["update_norm"] == 0
    _, after, _ = step(new, after, bad)
    assert (after.updates, after.skipped, after.skipped_in_a_row) == (3, 2, 2)
    new, after, _ = step(new, after, 0.5)
    assert (after.updates, after.skipped, after.skipped_in_a_row) == (4, 2, 0)
    assert not np.array_equal(new["head"]["weight"], params["head"]["weight"])


def test_without_skipping_a_bad_step_goes_through():
    learner = make_learner(skip_non_finite=False)
    params, _, metrics = run(learner, grads=lambda t: jax.tree.map(lambda x: x * np.nan, t))
    assert np.isnan(params["head"]["weight"]).all() and metrics["skipped_steps"] == 0


# -- state ------------------------------------------------------------------------------------


def test_state_may_be_stored_in_another_dtype():
    learner = make_learner(config_for(optimizers.muon, 0.1, ns_steps=2), state_dtype="bfloat16")
    params, state, _ = run(learner)
    exact, _, _ = run(make_learner(config_for(optimizers.muon, 0.1, ns_steps=2)))
    kept = {
        jax.tree_util.keystr(p): x.dtype
        for p, x in jax.tree_util.tree_flatten_with_path(state.optimizer)[0]
    }
    assert {d for n, d in kept.items() if "layer" in n} == {jnp.dtype("bfloat16")}
    assert kept[next(n for n in kept if "ns_coeffs" in n)] == jnp.float32
    assert params["head"]["weight"].dtype == jnp.float32
    # Three steps of 0.1 with moments of 8 significant bits.
    np.testing.assert_allclose(params["head"]["weight"], exact["head"]["weight"], atol=0.02)


def test_low_precision_parameters_may_have_float32_state():
    specs = {"w": spec((4,), "embed", dtype="bfloat16")}
    params = {"w": jnp.ones(4, jnp.bfloat16)}
    learner = make_learner(state_dtype="float32")
    new, state, _ = run(learner, specs, params=params)
    assert new["w"].dtype == jnp.bfloat16
    assert state.optimizer[0].nu["w"].dtype == jnp.float32


def test_state_axes_follow_the_parameters():
    learner = make_learner(frozen_params=("layer/0/**",), ema_decay=0.9)
    axes = learner.state_axes(SCANNED)
    state = learner.init(make_params(), SCANNED)
    assert jax.tree.structure(axes.specs) == jax.tree.structure(state)
    assert jax.tree.map(lambda s: s.shape, axes.specs) == jax.tree.map(jnp.shape, state)
    for tree in (axes.specs.ema, axes.specs.optimizer[0].mu):
        assert tree["layer"]["1:4:1"]["up"]["weight"].axes == ("layers", "embed", "mlp")
    assert {r.shape for r in axes.replicated} == {()}


def test_step_can_donate_its_state():
    learner = make_learner(ema_decay=0.9)
    params = make_params()
    state = jax.jit(lambda p: learner.init(p, SCANNED))(params)

    def step(params, state):
        trainable, _ = learner.split(params, SCANNED)
        return learner.update(grads_of(trainable), state, params, SCANNED)

    donating = jax.jit(step, donate_argnums=(0, 1))
    for _ in range(2):
        params, state, _ = donating(params, state)
    assert state.updates == 2


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_skips_the_step_too(value):
    learner = make_learner()
    params = make_params()
    state = learner.init(params, SCANNED)
    trainable, _ = learner.split(params, SCANNED)
    loss = jnp.float32(value)
    new, after, _ = learner.update(grads_of(trainable), state, params, SCANNED, loss=loss)
    assert_trees(new, params)
    assert after.skipped == 1
