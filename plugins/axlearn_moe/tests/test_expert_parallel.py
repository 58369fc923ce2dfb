"""Experts over several devices do what one device does, in every product of mesh axes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_moe_tests import (
    IN_A_HURRY,
    assert_close,
    inputs,
    layer,
    random_params,
    run_layer,
    sequence_info,
    small,
    weighted,
)

from axcore import functional
from axcore.collection import total_loss
from axcore.errors import ShardingError
from axcore.layers import FeedForward, Linear, PipelinedTransformer
from axcore.parallel import MESH_AXES, ProgramTarget, ShardingRules
from axcore.quantization import Int8Dot
from axcore.remat import Remat
from axlearn_moe import (
    ClampedGLU,
    EinsumDispatch,
    ExpertChoiceRouter,
    Experts,
    GroupedDispatch,
    MoE,
    _dispatch,
)

INT8 = dict.fromkeys(("up", "down"), Linear.Config(dot=Int8Dot.Config()))
GATED = dict(gate=Linear.Config(), experts=Experts.Config(glu=ClampedGLU()))


def target_of(rules=None, **axes):
    sizes = [axes.get(axis, 1) for axis in MESH_AXES]
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    mesh = jax.sharding.Mesh(devices, MESH_AXES, axis_types=auto)
    return ProgramTarget("cpu-8", "cpu", mesh, rules or ShardingRules())


def run_on(target, cfg, x, info):
    module = cfg.instantiate(name="layer")
    assert target.mesh is not None
    params = random_params(module)
    params = jax.device_put(params, target.shardings(module.parameter_specs()))
    place = jax.sharding.NamedSharding(target.mesh, target.spec(x.shape, ("batch", "seq", None)))
    x = jax.device_put(x, place)

    def scalar(params, x):
        y, collection = functional(
            module,
            state=params,
            inputs=(x, info),
            key=jax.random.key(9),
            is_training=True,
            target=target,
        )
        return weighted(y, info) + total_loss(collection), (y, collection)

    step = jax.jit(jax.value_and_grad(scalar, argnums=(0, 1), has_aux=True))
    program = step.lower(params, x).compile(compiler_options=IN_A_HURRY)
    (_, (y, collection)), grads = program(params, x)
    return (y, collection, grads), program.as_text()


BATCH, SEQ = 8, 6
PRODUCTS = [
    (dict(expert=2), GATED),
    (dict(expert=4, data=2), dict(gate=Linear.Config(bias=False))),
    (dict(expert=2, seq=2, model=2), GATED),
    (dict(expert=2, model=2, fsdp=2), dict(capacity_factor=0.8)),
    (dict(expert=4), dict(capacity_factor=0.8, top_k=1)),
    (dict(expert=2, seq=2), dict(router=ExpertChoiceRouter.Config())),
    (dict(expert=2, model=2, fsdp=2), dict(dispatch=EinsumDispatch.Config(), **GATED)),
    (dict(expert=8), dict(num_experts=8, top_k=3)),
    (dict(expert=4), INT8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "fields"), PRODUCTS)
def test_every_product_equals_one_device(axes, fields):
    cfg = layer(**fields)
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)
    got, _ = run_on(target_of(**axes), cfg, x, info)
    assert_close(got, run_layer(cfg, x, info))


def test_experts_tensors_and_shards_together_equal_one_device():
    cfg = layer(**GATED)
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)
    got, program = run_on(target_of(expert=2, model=2, fsdp=2), cfg, x, info)
    assert_close(got, run_layer(cfg, x, info))
    assert " all-to-all(" in program


@pytest.mark.parametrize(
    "experts", [("model",), ("expert", "model")], ids=["model", "expert_and_model"]
)
@pytest.mark.slow
def test_experts_may_lie_on_the_axis_that_attention_splits_heads_over(experts):
    """There all devices have all tokens, so each adds up what its experts make."""
    split = {"experts": experts, "expert_mlp": ()}
    rules = ShardingRules(param_rules=split, activation_rules=split)
    cfg = layer(**GATED)
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)
    got, _ = run_on(target_of(rules, expert=2, model=2, data=2), cfg, x, info)
    assert_close(got, run_layer(cfg, x, info))


@pytest.mark.slow
def test_a_pipeline_of_layers_with_experts_equals_one_device():
    cfg = small("fuji-test-v3")
    cfg.replace(FeedForward.Config, MoE.Config(num_experts=4))
    cfg.model.decoder.stack = PipelinedTransformer.Config(num_microbatches=2)
    model = cfg.model.instantiate(name="model")
    params = random_params(model)
    ids = np.random.default_rng(0).integers(1, 250, (4, 8)).astype(np.int32)
    batch = {"input_ids": ids, "target_ids": ids, "segment_ids": np.ones_like(ids)}
    batch["segment_ids"][3, 5:] = 0

    def run(target, params):
        def loss(params):
            _, collection = functional(
                model, state=params, inputs=batch, is_training=True, target=target
            )
            return total_loss(collection), collection

        step = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, collection), grads = step.lower(params).compile(compiler_options=IN_A_HURRY)(params)
        return collection, grads

    target = target_of(pipeline=2, expert=2)
    placed = jax.device_put(params, target.shardings(model.parameter_specs()))
    assert_close(run(target, placed), run(None, params))


def test_rows_of_a_stage_divide_over_the_axes_that_are_left():
    """Two rows, which four devices would not share: two of them are another stage."""
    cfg, target = layer(), target_of(pipeline=2, expert=2)
    module = cfg.instantiate(name="layer")
    params, info = random_params(module), sequence_info(2, 4)

    def stage(params, x):
        return functional(
            module, state=params, inputs=(x[0], info), is_training=True, target=target
        )[0][None]

    spec = jax.sharding.PartitionSpec
    stages = jax.shard_map(
        stage,
        mesh=target.mesh,
        in_specs=(spec(), spec("pipeline")),
        out_specs=spec("pipeline"),
        axis_names={"pipeline"},
        check_vma=False,
    )
    x = inputs(4, 4).reshape(2, 2, 4, 8)
    got = jax.jit(stages)(params, x)
    for one, y in zip(x, got, strict=True):
        expected = functional(module, state=params, inputs=(one, info), is_training=True)[0]
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_small_buffer_drops_and_says_so():
    cfg = layer(top_k=1, dispatch=GroupedDispatch.Config(buffer_factor=1.0))
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)
    (_, collection, grads), _ = run_on(target_of(expert=4), cfg, x, info)
    dropped = float(collection.summaries["dropped_fraction"].result())
    assert 0 < dropped < 0.5
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.slow
def test_the_ragged_exchange_equals_one_device(monkeypatch):
    """Where there is no ragged all-to-all, one is made of an all-gather."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", gathered_ragged_all_to_all)
    monkeypatch.setattr(_dispatch, "_WITHOUT_RAGGED", frozenset())
    cfg = layer(dispatch=GroupedDispatch.Config(exchange="ragged"), **GATED)
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)
    expected = run_layer(cfg, x, info)
    assert_close(run_on(target_of(expert=4, data=2), cfg, x, info)[0], expected)


def test_a_ragged_exchange_is_refused_where_there_is_none():
    cfg = layer(dispatch=GroupedDispatch.Config(exchange="ragged"))
    with pytest.raises(ShardingError, match="AX976") as raised:
        run_on(target_of(expert=2), cfg, inputs(2, 4), sequence_info(2, 4))
    assert "exchange='auto'" in str(raised.value)


def gathered_ragged_all_to_all(
    operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name
):
    """The documented meaning of ``jax.lax.ragged_all_to_all``, of equal results and slow."""
    del recv_sizes
    gather = functools.partial(jax.lax.all_gather, axis_name=axis_name)
    rows, begins = gather(operand), gather(input_offsets)
    counts, places = gather(send_sizes), gather(output_offsets)
    me = jax.lax.axis_index(axis_name)
    numbers = jnp.arange(output.shape[0])
    for peer in range(rows.shape[0]):
        at = numbers - places[peer, me]
        is_from_peer = (at >= 0) & (at < counts[peer, me])
        taken = rows[peer][jnp.clip(begins[peer, me] + at, 0, rows.shape[1] - 1)]
        output = jnp.where(is_from_peer[:, None], taken, output)
    return output


def test_experts_that_do_not_divide_are_refused_with_the_nearest():
    module = layer(num_experts=6).instantiate(name="layer")
    with pytest.raises(ShardingError, match="AX458") as raised:
        target_of(expert=4).shardings(module.parameter_specs())
    assert "size 6 does not divide into 4 parts (expert=4)" in str(raised.value)
    assert "nearest sizes that do: 4 or 8; or split it into 2 or 3 parts" in str(raised.value)


def test_tokens_and_hidden_units_on_one_axis_are_refused():
    rules = ShardingRules(activation_rules={"seq": ("model",), "expert_mlp": ("model",)})
    with pytest.raises(ShardingError, match="AX911"):
        run_on(target_of(rules, model=2), layer(), inputs(2, 4), sequence_info(2, 4))


@pytest.mark.parametrize("policy", [Remat("full"), Remat("sites", save=("ffn_hidden",))])
def test_recomputation_reaches_into_the_exchange(policy):
    cfg = layer(gate=Linear.Config())
    module = cfg.instantiate(name="layer")
    x, info = inputs(BATCH, SEQ), sequence_info(BATCH, SEQ, 1)
    target = target_of(expert=2)

    def run(params, x):
        y, _ = functional(module, state=params, inputs=(x, info), is_training=False, target=target)
        return weighted(y, info)

    def kept(policy):
        wrapped = policy.wrap(run, platform="cpu")
        _, back = jax.eval_shape(lambda p, x: jax.vjp(wrapped, p, x), random_params(module), x)
        hidden = BATCH * SEQ * 2 // 2 * cfg.hidden_dim  # of the assignments of a device
        return [leaf.shape for leaf in jax.tree.leaves(back) if leaf.size >= hidden]

    assert len(kept(policy)) < len(kept(Remat("none")))
