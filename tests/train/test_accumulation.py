"""Microbatches against the whole batch, for losses whose denominators differ."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.collection import OutputCollection, make_entry, total_loss
from axcore.context import current_context, functional
from axcore.errors import TrainError
from axcore.module import Module, ParameterSpec
from axcore.train.accumulation import loss_and_grads, split_microbatches

ROWS, LENGTH, DIM = 8, 5, 3
# Tokens that count in each row; rows 1 and 5 (one microbatch of four) have none.
TOKENS = [5, 0, 2, 1, 3, 0, 4, 5]


def batch():
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(ROWS, LENGTH, DIM)).astype(np.float32),
        "mask": (np.arange(LENGTH) < np.array(TOKENS)[:, None]).astype(np.float32),
    }


PARAMS = {"w": jnp.asarray([0.3, -0.2, 0.5]), "b": jnp.asarray(0.1)}


def loss_fn(params, rows, key):
    """A token loss, an auxiliary loss per row, and one of every reduction."""
    del key
    out = jnp.tanh(rows["x"] @ params["w"] + params["b"])
    tokens = jnp.sum(rows["mask"])
    token_mean = jnp.sum(out**2 * rows["mask"]) / tokens  # 0/0 in a microbatch without tokens
    found = OutputCollection()
    found.add("losses", "lm/loss", make_entry(token_mean, "mean", tokens, 1.0))
    num_rows = rows["x"].shape[0]
    found.add("losses", "aux", make_entry(jnp.mean(jnp.cos(out)), "mean", num_rows, 0.3))
    found.add("summaries", "peak", make_entry(jnp.max(out), "max", None))
    found.add("summaries", "tokens", make_entry(tokens, "sum", None))
    found.add("summaries", "accuracy", make_entry(token_mean, "weighted_mean", tokens))
    found.add("state_updates", "amax", make_entry(jnp.max(jnp.abs(out)), "max", None))
    return found


@pytest.mark.parametrize("steps", [2, 4, 8])
def test_accumulated_gradients_equal_those_of_the_whole_batch(steps):
    data = batch()
    whole, _ = loss_and_grads(guarded, PARAMS, data)
    parts, _ = jax.jit(lambda p, b: loss_and_grads(guarded, p, b, accumulation_steps=steps))(
        PARAMS, data
    )
    assert_gradients(parts, whole)


def assert_gradients(got, expected):
    """To 1e-5 of the largest: the sums run in another order, and some of them cancel."""
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * largest), got, expected
    )


def guarded(params, rows, key):
    """As a real layer does it: the mean over no tokens is zero, with a zero gradient."""
    del key
    out = jnp.tanh(rows["x"] @ params["w"] + params["b"])
    tokens = jnp.sum(rows["mask"])
    mean = jnp.sum(out**2 * rows["mask"]) / jnp.maximum(tokens, 1.0)
    found = OutputCollection()
    found.add("losses", "lm/loss", make_entry(mean, "mean", tokens, 1.0))
    num_rows = rows["x"].shape[0]
    found.add("losses", "aux", make_entry(jnp.mean(jnp.cos(out)), "mean", num_rows, 0.3))
    return found


def test_gradients_agree_with_finite_differences_of_the_token_mean():
    data = batch()
    grads, _ = loss_and_grads(guarded, PARAMS, data, accumulation_steps=4)

    def objective(w):
        out = np.tanh(data["x"].astype(np.float64) @ w + 0.1)
        return (out**2 * data["mask"]).sum() / sum(TOKENS) + 0.3 * np.cos(out).mean()

    w = np.asarray(PARAMS["w"], np.float64)
    for i in range(DIM):
        h = np.eye(DIM)[i] * 1e-5
        slope = (objective(w + h) - objective(w - h)) / 2e-5
        np.testing.assert_allclose(grads["w"][i], slope, rtol=1e-4)


def test_losses_summaries_and_state_combine_by_their_reductions():
    data = batch()
    whole = loss_fn(PARAMS, data, None)
    _, parts = loss_and_grads(loss_fn, PARAMS, data, accumulation_steps=4)
    np.testing.assert_allclose(total_loss(parts), total_loss(whole), rtol=1e-6)
    for kind in ("losses", "summaries", "state_updates"):
        for name, entry in getattr(whole, kind).items():
            np.testing.assert_allclose(
                getattr(parts, kind)[name].result(), entry.result(), rtol=1e-6
            )


def test_one_step_is_plain_grad():
    data = batch()
    grads, found = loss_and_grads(loss_fn, PARAMS, data)
    plain = jax.grad(lambda p: total_loss(loss_fn(p, data, None)))(PARAMS)
    for name in PARAMS:
        np.testing.assert_array_equal(grads[name], plain[name])
    np.testing.assert_array_equal(total_loss(found), total_loss(loss_fn(PARAMS, data, None)))


def test_microbatches_draw_different_keys():
    def noisy(params, rows, key):
        found = OutputCollection()
        found.add("losses", "loss", make_entry(jnp.sum(params["w"] ** 2), "mean", 1.0))
        found.add("summaries", "draw", make_entry(jax.random.uniform(key), "max", None))
        found.add("summaries", "sum", make_entry(jax.random.uniform(key), "sum", None))
        return found

    _, found = loss_and_grads(noisy, PARAMS, batch(), accumulation_steps=2, key=jax.random.key(0))
    peak, total = found.summaries["draw"].result(), found.summaries["sum"].result()
    assert not np.isclose(2 * peak, total)


def test_counting_pass_leaves_no_second_forward_pass():
    def heavy(params, rows, key):
        del key
        out = jnp.sin(rows["x"] @ params["w"])
        found = OutputCollection()
        tokens = jnp.sum(rows["mask"])
        found.add("losses", "loss", make_entry(jnp.sum(out * rows["mask"]), "mean", tokens))
        return found

    compiled = (
        jax.jit(lambda p, b: loss_and_grads(heavy, p, b, accumulation_steps=2)[0])
        .lower(PARAMS, batch())
        .compile()
    )
    # The gradient of sin is cos; sin itself is needed by nothing that is returned.
    assert " sine(" not in compiled.as_text() and " cosine(" in compiled.as_text()


def test_rows_are_dealt_in_turn_so_that_devices_keep_theirs():
    rows = {"x": np.arange(8)}
    micro = split_microbatches(rows, 2)["x"]
    np.testing.assert_array_equal(micro, [[0, 2, 4, 6], [1, 3, 5, 7]])
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    lowered = jax.jit(
        lambda b: split_microbatches(b, 2),
        in_shardings=({"x": sharding},),
        out_shardings=jax.NamedSharding(mesh, jax.P(None, "data")),
    )
    text = lowered.lower({"x": jax.ShapeDtypeStruct((8,), jnp.int32)}).compile().as_text()
    assert not any(word in text for word in ("all-gather", "all-to-all", "permute"))


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(TrainError, match="8 rows do not split into 3") as error:
        split_microbatches(batch(), 3)
    assert error.value.where == "accumulation_steps"


def test_leaves_with_different_rows_are_refused():
    with pytest.raises(TrainError, match="equal leading dims"):
        split_microbatches({"a": np.zeros(4), "b": np.zeros(3)}, 1)


def test_a_model_without_losses_is_refused():
    with pytest.raises(TrainError, match="collected no loss"):
        loss_and_grads(lambda p, b, k: OutputCollection(), PARAMS, batch())


class Toy(Module):
    """A module with a token loss, a random draw and a max-reduced state."""

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)

        def ones(key, spec):
            del key
            return jnp.ones(spec.shape, spec.dtype)

        self._add_parameter("w", ParameterSpec((DIM,), "float32", (None,), ones))
        self._add_parameter("amax", ParameterSpec((), "float32", (), ones, kind="state"))

    def forward(self, x, mask):
        ctx = current_context()
        out = x @ ctx.state["w"]
        tokens = jnp.sum(mask)
        mean = jnp.sum(jnp.cos(out) * mask) / jnp.maximum(tokens, 1.0)
        ctx.add_loss("loss", mean, num_items=tokens)
        ctx.add_summary("draw", jax.random.uniform(ctx.key()))
        ctx.set_state("amax", jnp.max(jnp.abs(out)), reduction="max")


def test_a_module_accumulates_as_the_whole_batch_under_jit():
    toy = Toy.Config().instantiate(name="toy")
    params = toy.initialize(jax.random.key(0))

    def collect(weights, rows, key):
        state = {**params, "w": weights}
        return functional(toy, state=state, inputs=rows, is_training=True, key=key)[1]

    @partial(jax.jit, static_argnums=1)
    def run(weights, steps):
        return loss_and_grads(
            collect, weights, batch(), accumulation_steps=steps, key=jax.random.key(1)
        )

    whole, one = run(params["w"], 1)
    parts, many = run(params["w"], 4)
    assert_gradients(parts, whole)
    np.testing.assert_allclose(total_loss(many), total_loss(one), rtol=1e-6)
    amax = many.state_updates["amax"].result()
    np.testing.assert_allclose(amax, one.state_updates["amax"].result(), rtol=1e-6)
