"""A pipelined stack computes, collects and draws what a scanned one does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.checkpoint.stack_form import canonical, flatten
from axcore.context import current_context, functional
from axcore.errors import ModuleError
from axcore.layers import (
    BaseTransformerLayer,
    Dropout,
    Normal,
    PipelinedTransformer,
    RepeatedTransformer,
    SequenceInfo,
    StackedTransformer,
)
from axcore.parallel import MeshShape, ProgramTarget, ShardingRules, build_mesh
from axcore.pipelining import PipelineSchedule
from axcore.remat import Remat

BATCH, SEQ, DIM, LAYERS = 24, 3, 4, 4
FULL = Remat("full")


class Probe(BaseTransformerLayer):
    """A layer that reads all that a layer can know and collects all that it can collect."""

    class Config(BaseTransformerLayer.Config):
        dropout: float = 0.0

    def __init__(self, cfg, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._add_weight("w", (DIM, DIM), ("embed", "mlp"), Normal(stddev=0.5))
        self._add_weight("seen", (), (), Normal(stddev=1.0), kind="state")
        self.dropout = self._add_child("dropout", Dropout.Config(rate=cfg.dropout))

    def forward(self, x, info):
        ctx = current_context()
        x = self._constrain(x, "batch", "seq", "embed")
        mask = info.segment_ids > 0
        y = x @ self._param("w") + info.shared["table"][info.positions]
        y = y * info.layer_values["scale"] + info.token_values["extra"][..., None]
        y = y + jnp.mean(info.memory, axis=1, keepdims=True) * info.prefix_lengths[:, None, None]
        x = x + self.dropout(jnp.tanh(y)) * mask[..., None]
        tokens = jnp.sum(mask)
        size = jnp.sum(jnp.square(x) * mask[..., None])
        ctx.add_loss("size", size / jnp.maximum(tokens, 1), weight=0.1, num_items=tokens)
        ctx.add_summary("largest", jnp.max(x), reduction="max")
        ctx.add_summary("size", size, reduction="sum")
        ctx.add_output("first", x[0, 0])
        ctx.set_state("seen", ctx.state["seen"] + size, reduction="last")
        return x


def inputs(rows=BATCH):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, SEQ, DIM)), jnp.float32)
    return x, SequenceInfo(
        positions=jnp.asarray(rng.integers(0, 5, (rows, SEQ))),
        segment_ids=jnp.asarray(rng.integers(0, 3, (rows, SEQ))),
        token_values={"extra": jnp.asarray(rng.normal(size=(rows, SEQ)), jnp.float32)},
        prefix_lengths=jnp.asarray(rng.integers(0, 3, (rows,))),
        memory=jnp.asarray(rng.normal(size=(rows, 2, DIM)), jnp.float32),
        shared={"table": jnp.asarray(rng.normal(size=(5, DIM)), jnp.float32)},
    )


def stack(kind, num_layers=LAYERS, *, layer=None, **fields):
    return kind.Config(
        input_dim=DIM,
        num_layers=num_layers,
        layer=layer or Probe.Config(),
        layer_values={"scale": tuple(1.0 + 0.1 * i for i in range(num_layers))},
        **fields,
    ).instantiate(name="stack")


def target(rules=None, **sizes):
    num = int(np.prod(list(sizes.values())))
    mesh = build_mesh(MeshShape(**sizes), jax.devices()[:num])
    return ProgramTarget("cpu-8", "cpu", mesh, rules or ShardingRules())


def run(module, on=None, args=None, *, is_training=True):
    """Returns output, collection per layer, and gradients by every float that goes in."""
    x, info = args or inputs()
    state = module.initialize(jax.random.key(0))
    floats = (x, info.memory, info.shared, info.token_values)

    def loss(state, floats):
        x, memory, shared, tokens = floats
        known = dataclasses.replace(info, memory=memory, shared=shared, token_values=tokens)
        y, collection = functional(
            module,
            state=state,
            inputs=(x, known),
            is_training=is_training,
            key=jax.random.key(1),
            target=on,
        )
        total = sum(jnp.sum(e.result()) for e in collection.expand().losses.values())
        return jnp.sum(jnp.sin(y)) + total, (y, collection)

    shapes = jax.tree.map(jnp.shape, state)
    (_, (y, collection)), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        state, floats
    )
    assert jax.tree.map(jnp.shape, grads[0]) == shapes
    return y, collection.expand(), (canonical(flatten(grads[0])), grads[1])


def close(got, expected):
    # Sums run in another order: a few float32 ulps of values up to about 100.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


@pytest.fixture(scope="module")
def scanned():
    return run(stack(RepeatedTransformer))


@functools.cache
def of_last_rows(num):
    """What the scanned stack collects of the last of ``num`` microbatches."""
    x, info = inputs()
    last = jax.tree.map(lambda a: a[num - 1 :: num], dataclasses.replace(info, shared={}))
    last = dataclasses.replace(last, shared=info.shared)
    return run(stack(RepeatedTransformer), args=(x[num - 1 :: num], last))[1]


CASES = {
    "gpipe": (dict(num_microbatches=4, remat=FULL), dict(pipeline=2)),
    "uneven": (dict(num_microbatches=3), dict(pipeline=2, data=2)),
    "fewer than stages": (dict(num_microbatches=2), dict(pipeline=4)),
    "circular": (dict(num_microbatches=4, num_repeats=2), dict(pipeline=2, model=2)),
    "circular uneven": (dict(num_microbatches=3, num_repeats=2, remat=FULL), dict(pipeline=2)),
    "one stage": (dict(num_microbatches=4, num_repeats=2), dict(data=2)),
}


@pytest.mark.xdist_group("pipeline_layers")
@pytest.mark.parametrize("case", CASES)
def test_output_gradients_and_collection_are_those_of_the_scanned_stack(case, scanned):
    fields, sizes = CASES[case]
    y, collection, grads = run(stack(PipelinedTransformer, **fields), target(**sizes))
    expected_y, expected, expected_grads = scanned
    close(y, expected_y)
    close(grads, expected_grads)
    assert {k: set(v) for k, v in collection.names().items()} == {
        k: set(v) for k, v in expected.names().items()
    }
    for kind in ("losses", "summaries"):
        close(
            {p: (e.result(), e.num_items) for p, e in getattr(collection, kind).items()},
            {p: (e.result(), e.num_items) for p, e in getattr(expected, kind).items()},
        )
    # What keeps the last value has that of the last microbatch: rows r with r mod n = n - 1.
    of_last = of_last_rows(fields["num_microbatches"])
    for kind in ("state_updates", "outputs"):
        close(
            {p: e.result() for p, e in getattr(collection, kind).items()},
            {p: e.result() for p, e in getattr(of_last, kind).items()},
        )


@pytest.mark.xdist_group("pipeline_layers")
def test_rows_over_stages_give_the_same_output(scanned):
    rules = ShardingRules(activation_rules={"batch": ("pipeline", "data")})
    module = stack(PipelinedTransformer, num_microbatches=4)
    y, _, grads = run(module, target(rules, pipeline=2, data=2))
    close(y, scanned[0])
    close(grads, scanned[2])


def test_a_period_of_two_layers_is_divided_whole(scanned):
    period = (Probe.Config(), Probe.Config())
    module = stack(PipelinedTransformer, layer=period, num_microbatches=2)
    y, _, grads = run(module, target(pipeline=2))
    close(y, scanned[0])
    close(grads, scanned[2])


def test_with_one_microbatch_dropout_is_that_of_the_scanned_stack():
    noisy = Probe.Config(dropout=0.5)
    expected, _, _ = run(stack(RepeatedTransformer, layer=noisy))
    for fields in (dict(), dict(num_repeats=2)):
        y, _, _ = run(stack(PipelinedTransformer, layer=noisy, **fields), target(pipeline=2))
        close(y, expected)


def test_microbatches_have_masks_of_their_own_that_no_mesh_changes():
    x, info = inputs(4)
    same = jax.tree.map(lambda a: jnp.broadcast_to(a[:1], a.shape), dataclasses.replace(info))
    same = dataclasses.replace(same, shared=info.shared)
    args = jnp.broadcast_to(x[:1], x.shape), same
    fields = dict(layer=Probe.Config(dropout=0.5), num_microbatches=4)
    module = stack(PipelinedTransformer, **fields)
    y, _, _ = run(module, args=args)
    assert len(np.unique(np.asarray(y).reshape(4, -1), axis=0)) == 4
    staged, _, _ = run(module, target(pipeline=2), args=args)
    close(staged, y)


def test_without_training_a_batch_of_any_size_runs():
    x, info = inputs(3)
    module = stack(PipelinedTransformer, num_microbatches=4)
    y, _, _ = run(module, target(pipeline=2), args=(x, info), is_training=False)
    expected, _, _ = run(stack(RepeatedTransformer), args=(x, info), is_training=False)
    close(y, expected)


def test_parameters_are_those_of_the_scanned_stack_bit_by_bit():
    expected = canonical(flatten(stack(RepeatedTransformer).initialize(jax.random.key(3))))
    module = stack(PipelinedTransformer, num_repeats=2)
    got = canonical(flatten(module.initialize(jax.random.key(3))))
    assert sorted(module.children) == ["0:2:1", "2:4:1"]
    jax.tree.map(np.testing.assert_array_equal, got, expected)


# -- schedules -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "microbatches", "repeats", "ticks"),
    [(4, 8, 1, 11), (4, 6, 1, 9), (4, 2, 1, 5), (4, 8, 2, 19), (2, 3, 2, 8), (4, 1, 3, 12)],
)
def test_ticks(stages, microbatches, repeats, ticks):
    schedule = PipelineSchedule(stages, microbatches, repeats)
    assert schedule.num_ticks == ticks
    assert schedule.bubble_fraction == pytest.approx(1 - microbatches * repeats / ticks)


# -- what is refused -----------------------------------------------------------------------


def shape_of(module, on, rows=BATCH):
    x, info = inputs(rows)
    state = jax.eval_shape(lambda: module.initialize(jax.random.key(0)))
    return jax.eval_shape(
        lambda s: functional(
            module, state=s, inputs=(x, info), is_training=True, target=on, key=jax.random.key(0)
        )[0],
        state,
    )


def test_layers_that_do_not_divide_are_refused_with_numbers_that_work():
    with pytest.raises(ModuleError, match=r"6 layers do not divide into 4 stages \(pipeline\)"):
        shape_of(stack(PipelinedTransformer, 6), target(pipeline=4))
    with pytest.raises(ModuleError, match="AX470") as error:
        stack(PipelinedTransformer, 6, num_repeats=4)
    assert error.value.hint == "a pipeline has no remainder; nearest that work: 4 or 8 layers"


def test_rows_that_do_not_divide_are_refused_with_numbers_that_work():
    module = stack(PipelinedTransformer, num_microbatches=4)
    with pytest.raises(ModuleError, match=r"20 rows .* 4 microbatches x 2 data shards") as error:
        shape_of(module, target(pipeline=2, data=2), rows=20)
    assert "num_microbatches 2 or 5" in error.value.hint
    assert "16 or 24 rows" in error.value.hint


@pytest.mark.parametrize("field", ["num_microbatches", "num_repeats"])
def test_numbers_below_one_are_refused(field):
    with pytest.raises(ModuleError, match=f"{field} is 0, expected at least 1"):
        stack(PipelinedTransformer, **{field: 0})


def test_the_fields_of_a_decoders_stack_are_named_as_they_are_set():
    layers = stack(PipelinedTransformer, num_microbatches=4)
    layers.config_path = "model.decoder.layer"  # as in a Decoder, whose layers it runs
    with pytest.raises(ModuleError) as error:
        shape_of(layers, target(pipeline=2, data=2), rows=20)
    assert error.value.where == "model.decoder.stack.num_microbatches"


def test_shared_arrays_of_tokens_are_refused():
    x, info = inputs()
    info = dataclasses.replace(info, shared={"rotary": jnp.zeros((BATCH, SEQ, 2))})
    module = stack(PipelinedTransformer, num_microbatches=2)
    with pytest.raises(ModuleError, match=r"shared array 'rotary' of shape \[24, 3, 2\]"):
        run(module, args=(x, info))


@pytest.mark.parametrize("kind", [RepeatedTransformer, StackedTransformer])
def test_other_stacks_refuse_stages_that_they_would_leave_idle(kind):
    with pytest.raises(ModuleError, match=r"stages \(pipeline=2\), but .* every layer everywhere"):
        shape_of(stack(kind), target(pipeline=2))
    split = ShardingRules(activation_rules={"batch": ("pipeline", "data")})
    assert shape_of(stack(kind), target(split, pipeline=2)).shape == (BATCH, SEQ, DIM)


def test_a_prefix_is_refused():
    with pytest.raises(ModuleError, match="AX470"):
        stack(PipelinedTransformer, prefix=(Probe.Config(),))
