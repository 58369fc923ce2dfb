"""Predicted step times: bytes and seconds by hand, and laws that hold for every config."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models_for_tests import Experts, language_model, trainer

from axcore.errors import ShardingError
from axcore.layers import RepeatedTransformer
from axcore.ops import DotGeneral, OpRule
from axcore.parallel import MeshShape, PipelineModifier, ShardingRules
from axcore.parallel.cost import StepModel, StepPrediction, model_flops, predict_step
from axcore.plugins import Instance
from axcore.remat import Remat

SMALL = dict(layers=3, dim=32, heads=8, kv_heads=2, hidden=48, vocab=128)
ROWS, SEQ = 16, 16
F32 = 4


def machine(chips: int = 4, **fields) -> Instance:
    """All devices in one host, at rates that leave nothing to be hidden behind."""
    known = dict(
        name=f"test-{chips}",
        family="test",
        platform="test",
        num_hosts=1,
        devices_per_host=chips,
        hbm_bytes=2**34,
        hbm_bandwidth_bytes=1e12,
        peak_flops={"bfloat16": 1e14},
        ici_bandwidth_bytes=1e11,
        matmul_efficiency=0.5,
    )
    return Instance(**(known | fields))


def config(feed_forward=None, **mesh: int):
    """A small trainer on a mesh."""
    sizes = {**SMALL, "hidden": 0} if feed_forward is not None else SMALL
    model = language_model(**sizes, feed_forward=feed_forward)
    return trainer(model, batch_size=ROWS, seq_len=SEQ).set(mesh_shape=MeshShape.of(mesh))


def predicted(cfg, **fields) -> StepPrediction:
    return predict_step(cfg, machine(**fields))


def num_parameters() -> int:
    return model_flops(language_model(**SMALL), SEQ).num_parameters


# -- bytes of collectives --------------------------------------------------------------------


def test_full_sharding_gathers_twice_and_scatters_once():
    moved = predicted(config(fsdp=4)).collective_bytes
    whole = num_parameters() * F32 * 3 / 4
    assert dict(moved) == {
        ("all_gather", "fsdp"): pytest.approx(2 * whole),
        ("reduce_scatter", "fsdp"): pytest.approx(whole),
    }


def test_each_microbatch_gathers_anew():
    once = predicted(config(fsdp=4)).collective_bytes
    cfg = config(fsdp=4).set(accumulation_steps=2)
    assert predicted(cfg).collective_bytes == {k: 2 * n for k, n in once.items()}


def test_replicas_reduce_gradients():
    moved = predicted(config(data=4)).collective_bytes
    assert dict(moved) == {
        ("all_reduce", "data"): pytest.approx(2 * num_parameters() * F32 * 3 / 4)
    }


def test_hybrid_sharding_reduces_the_shard_only():
    moved = predicted(config(data=2, fsdp=2)).collective_bytes
    half = num_parameters() * F32 / 2
    assert moved["all_reduce", "data"] == pytest.approx(2 * half / 2)
    assert moved["all_gather", "fsdp"] == pytest.approx(2 * half)


def test_frozen_parameters_have_no_gradients_to_reduce():
    cfg = config(data=4)
    cfg.learner.frozen_params = ("decoder/**",)
    trained = 2 * SMALL["dim"] * SMALL["vocab"]  # the table and the head
    moved = predicted(cfg).collective_bytes
    assert moved["all_reduce", "data"] == pytest.approx(2 * trained * F32 * 3 / 4)


def test_split_tensors_are_summed_twice_a_layer_in_each_pass():
    moved = predicted(config(model=2), chips=2).collective_bytes
    # Two branches a layer; forward the embedding too, backward the head.
    one = ROWS * SEQ * SMALL["dim"] * F32 * 2 * (1 / 2)
    assert dict(moved) == {("all_reduce", "model"): pytest.approx(one * (2 * 2 * 3 + 2))}


def test_what_is_recomputed_is_summed_again():
    cfg = config(model=2)
    cfg.model.decoder.stack = RepeatedTransformer.Config(remat=Remat("full"))
    one = ROWS * SEQ * SMALL["dim"] * F32 * 2 * (1 / 2)
    moved = predicted(cfg, chips=2).collective_bytes
    # Attention's output once more; the last product of a layer is not repeated.
    assert moved["all_reduce", "model"] == pytest.approx(one * (5 * 3 + 2))


@pytest.mark.parametrize(
    ("implementation", "expected"),
    [
        # Keys and values of half a row go to the one neighbour; backward with their gradients.
        ("ring", {"permute": 3 * (1 + 2)}),
        # The other half is gathered in the one pass, and its gradients are scattered.
        ("xla", {"all_gather": 3, "reduce_scatter": 3}),
    ],
)
def test_context_parallelism_moves_keys_and_values(implementation, expected):
    cfg = config(seq=2)
    cfg.ops = {**cfg.ops, "attention": OpRule(implementations=(implementation,))}
    moved = predicted(cfg, chips=2).collective_bytes
    keys = ROWS * SEQ / 2 * 2 * (4 + 4) * F32  # 2 heads of 4, both
    found = {k: n for (k, axes), n in moved.items() if axes == "seq" and k != "all_reduce"}
    assert found == {kind: pytest.approx(n * keys) for kind, n in expected.items()}


def test_heads_for_positions_moves_queries_and_output_too():
    cfg = config(seq=2)
    cfg.ops = {**cfg.ops, "attention": OpRule(implementations=("all_to_all",))}
    moved = predicted(cfg, chips=2).collective_bytes
    each = ROWS * SEQ / 2 * (8 + 2) * (4 + 4) * F32
    assert moved["all_to_all", "seq"] == pytest.approx(2 * 3 * each / 2)


def test_tokens_go_to_their_experts_and_back_in_both_passes():
    cfg = config(Experts.Config(num_experts=8, top_k=2, hidden_dim=48), expert=4)
    moved = predicted(cfg).collective_bytes
    sent = ROWS * SEQ / 4 * 2 * SMALL["dim"] * F32 * (3 / 4)
    assert moved["all_to_all", "expert"] == pytest.approx(sent * 4 * 3)


def test_what_experts_recompute_travels_both_ways_once_more():
    """A gate's gradient is the product of a result with its gradient, so results come back too."""
    cfg = config(Experts.Config(num_experts=8, top_k=2, hidden_dim=48), expert=4)
    cfg.model.decoder.stack = RepeatedTransformer.Config(remat=Remat("full"))
    sent = ROWS * SEQ / 4 * 2 * SMALL["dim"] * F32 * (3 / 4)
    assert predicted(cfg).collective_bytes["all_to_all", "expert"] == pytest.approx(sent * 6 * 3)


def test_tokens_go_whole_to_each_part_of_an_expert():
    cfg = config(Experts.Config(num_experts=8, top_k=2, hidden_dim=48), expert=2, model=2)
    sent = ROWS * SEQ / 2 * 2 * SMALL["dim"] * F32 * (1 / 2)
    assert predicted(cfg).collective_bytes["all_to_all", "expert"] == pytest.approx(sent * 4 * 3)


def test_each_token_is_copied_for_each_of_its_experts():
    model = StepModel(
        config(Experts.Config(num_experts=8, top_k=2, hidden_dim=48), data=4), machine()
    )
    rows = SMALL["layers"] * ROWS * SEQ / 4 * 2
    assert list(model.traffic.assigned()) == [(rows * SMALL["dim"] * F32, False)]


# -- seconds ---------------------------------------------------------------------------------


def test_products_take_their_flops_at_the_peak_that_is_reached():
    flops = model_flops(language_model(**SMALL), SEQ).hardware.causal * ROWS * SEQ
    found = predicted(config(data=4), hbm_bandwidth_bytes=1e20)
    assert found.seconds["matmul"] == pytest.approx(flops / 4 / (1e14 * 0.5))
    assert found.efficiency == 0.5


def test_recomputation_takes_time_but_is_no_model_flop():
    cfg = config(data=4)
    cfg.model.decoder.stack = RepeatedTransformer.Config(remat=Remat("full"))
    plain, again = predicted(config(data=4)), predicted(cfg)
    assert again.seconds["matmul"] > plain.seconds["matmul"]
    ideal = plain.mfu_causal * plain.step_seconds
    assert again.mfu_causal * again.step_seconds == pytest.approx(ideal)


def test_devices_that_nothing_is_split_over_repeat_the_work():
    rules = ShardingRules(param_rules={"mlp": (), "heads": (), "kv_heads": (), "vocab": ()})
    cfg = config(model=4).set(sharding_rules=rules)
    cfg.sharding_rules = dataclasses.replace(rules, activation_rules=rules.param_rules)
    fast = dict(hbm_bandwidth_bytes=1e20)
    alone = predicted(config(data=1), chips=1, **fast).seconds["matmul"]
    assert predicted(cfg, **fast).seconds["matmul"] == pytest.approx(alone)


def test_a_product_of_few_tokens_waits_for_its_weights():
    found = predicted(config(data=4), peak_flops={"bfloat16": 1e20})
    # Read forward and, with their gradients, twice backward. The table is not multiplied.
    weights = num_parameters() - SMALL["vocab"] * SMALL["dim"] - 7 * SMALL["dim"]
    assert found.seconds["matmul"] == pytest.approx(3 * weights * F32 / 0.8e12, rel=1e-3)


def test_the_optimizer_reads_gradients_and_passes_over_its_state():
    found = predicted(config(data=4))
    memory = found.memory
    moved = 2 * (memory.parameters + memory.optimizer) + memory.gradients
    assert found.seconds["optimizer"] == pytest.approx(moved / 0.8e12)


def test_full_sharding_hides_behind_compute_and_split_tensors_do_not():
    slow = dict(peak_flops={"bfloat16": 1e9})
    sharded = predicted(config(fsdp=4), **slow)
    # But for one layer of three, whose gather and reduction have nothing beside them.
    total = sharded.hidden_seconds["fsdp"] + sharded.seconds["collectives fsdp"]
    assert sharded.seconds["collectives fsdp"] == pytest.approx(total / 3)
    split = predicted(config(model=2), chips=2, **slow)
    assert not split.hidden_seconds and split.seconds["collectives model"] > 0


def test_what_does_not_fit_behind_compute_is_waited_for():
    found = predicted(config(fsdp=4), ici_bandwidth_bytes=1e6, peak_flops={"bfloat16": 1e20})
    assert found.bound_by == "collectives fsdp"
    compute = found.seconds["matmul"] + found.seconds["memory"]
    assert found.hidden_seconds["fsdp"] == pytest.approx(compute)


def staged(*, split_batch: bool, microbatches: int = 8, repeats: int = 1):
    """The model in three stages."""
    cfg = config(pipeline=3)
    cfg.model.decoder.set(num_layers=3 * repeats, stack=RepeatedTransformer.Config())
    modifier = PipelineModifier.Config(
        num_microbatches=microbatches, num_repeats=repeats, split_batch=split_batch
    )
    return modifier.instantiate()(cfg.set(batch_size=24))


# The vocabulary's product, on one device of the rates below.
HEAD_SECONDS = 6 * 32 * 128 * 24 * SEQ / 0.5e14
FAST_MEMORY = dict(chips=3, hbm_bandwidth_bytes=1e20)


@pytest.mark.parametrize(("microbatches", "repeats"), [(8, 1), (12, 1), (6, 2)])
def test_the_bubble_of_a_pipeline_is_that_of_the_schedule(microbatches, repeats):
    cfg = staged(split_batch=False, microbatches=microbatches, repeats=repeats)
    found = predicted(cfg, **FAST_MEMORY)
    # All but the head, which every stage repeats here, waits for the pipeline to fill and empty.
    stages = found.step_seconds - found.seconds["optimizer"] - HEAD_SECONDS
    bubble = (3 - 1) / (microbatches * repeats + 3 - 1)
    assert found.seconds["pipeline bubble"] == pytest.approx(bubble * stages, rel=1e-6)
    width = 24 * SEQ * SMALL["dim"] * F32
    assert found.collective_bytes["permute", "pipeline"] == pytest.approx(2 * repeats * width)


def test_stages_may_divide_the_rows_outside_of_them():
    whole = predicted(staged(split_batch=False), **FAST_MEMORY)
    split = predicted(staged(split_batch=True), **FAST_MEMORY)
    saved = whole.seconds["matmul"] - split.seconds["matmul"]
    assert saved == pytest.approx(HEAD_SECONDS * 2 / 3)
    # Inside of the stages nothing changes; outside, gradients of the head and the table are summed.
    permutes = ("permute", "pipeline")
    assert split.collective_bytes[permutes] == whole.collective_bytes[permutes]
    assert split.collective_bytes["all_reduce", "pipeline"] > 0


def test_layers_over_an_axis_without_a_pipeline_are_gathered():
    moved = predicted(config(pipeline=3), chips=3).collective_bytes
    assert set(moved) == {("all_gather", "pipeline"), ("reduce_scatter", "pipeline")}


class Int8Dot(DotGeneral):
    """A product in int8, as a quantization recipe would put in."""

    class Config(DotGeneral.Config):
        """No fields."""

    operand_dtype = "int8"


def test_a_quantized_product_runs_at_its_own_peak_if_there_is_one():
    cfg = config(data=4)
    plain = predicted(cfg, hbm_bandwidth_bytes=1e20).seconds["matmul"]
    cfg.model.decoder.layer.feed_forward.up.dot = Int8Dot.Config()
    fast = dict(hbm_bandwidth_bytes=1e20, peak_flops={"bfloat16": 1e14, "int8": 1e30})
    up = 6 * 3 * 32 * 48 * ROWS * SEQ / 4 / 0.5e14
    assert predicted(cfg, **fast).seconds["matmul"] == pytest.approx(plain - up)
    # Widened where the hardware has no such product.
    assert predicted(cfg, hbm_bandwidth_bytes=1e20).seconds["matmul"] == pytest.approx(plain)


def test_experts_count_as_often_as_a_token_goes_to_one():
    def seconds(top_k: int) -> float:
        cfg = config(Experts.Config(num_experts=16, top_k=top_k, hidden_dim=48), data=4)
        return predicted(cfg, hbm_bandwidth_bytes=1e20).seconds["matmul"]

    more = 6 * 3 * (3 * 32 * 48) * ROWS * SEQ / 4 / 0.5e14
    assert seconds(2) - seconds(1) == pytest.approx(more)


def test_parts_add_up_and_both_conventions_are_given():
    found = predicted(config(data=2, fsdp=2))
    assert sum(found.seconds.values()) == pytest.approx(found.step_seconds)
    assert found.tokens_per_second * found.step_seconds == pytest.approx(ROWS * SEQ)
    assert 0 < found.mfu_causal < found.mfu_noncausal < 1
    assert found.bound_by in found.seconds
    document = json.loads(json.dumps(found.to_json()))
    assert document["collective_bytes"]["all_reduce data"] > 0
    assert document["memory"]["total"] == found.memory.total


# -- laws ------------------------------------------------------------------------------------

MESHES = [{"fsdp": 8}, {"data": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "model": 2}, {"seq": 8}]


@settings(max_examples=20, deadline=None)
@given(
    mesh=st.sampled_from(MESHES),
    field=st.sampled_from(["ici_bandwidth_bytes", "hbm_bandwidth_bytes", "dcn_bandwidth_bytes"]),
    domain=st.sampled_from([2, 8]),
    faster=st.floats(1, 100),
)
def test_faster_hardware_is_never_slower(mesh, field, domain, faster):
    base = machine(
        8, ici_domain_devices=domain, dcn_bandwidth_bytes=1e10, peak_flops={"bfloat16": 1e12}
    )
    better = dataclasses.replace(base, **{field: getattr(base, field) * faster})
    cfg = config(**mesh)
    slow, fast = predict_step(cfg, base), predict_step(cfg, better)
    assert fast.step_seconds <= slow.step_seconds * (1 + 1e-12)


@settings(max_examples=12, deadline=None)
@given(
    axes=st.sampled_from([("fsdp",), ("data",), ("data", "fsdp"), ("fsdp", "model")]),
    policy=st.sampled_from(["none", "full", "dots"]),
)
def test_more_chips_never_need_more_memory_nor_more_products(axes, policy):
    cfg = config()
    cfg.model.decoder.stack = RepeatedTransformer.Config(remat=Remat(policy))
    memory, matmul = [], []
    for size in (1, 2):
        cfg.mesh_shape = MeshShape.of(dict.fromkeys(axes, size))
        found = predicted(cfg, chips=size ** len(axes), peak_flops={"bfloat16": 1e9})
        memory.append(found.memory.total)
        matmul.append(found.seconds["matmul"])
    assert memory[1] <= memory[0] and matmul[1] < matmul[0]


# -- what is not stated ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"peak_flops": {"int8": 1.0}}, "AX490"),
        ({"hbm_bandwidth_bytes": None}, "AX491"),
        ({"matmul_efficiency": 1.5}, "AX493"),
    ],
)
def test_rates_that_are_missing_or_impossible_are_refused(fields, code):
    with pytest.raises(ShardingError) as error:
        predicted(config(data=4), **fields)
    assert error.value.code == code and "test-4" in str(error.value)


def test_an_efficiency_that_nobody_fitted_is_noted_and_one_that_was_says_from_what():
    assert "good to compare" in predicted(config(data=4), matmul_efficiency=None).notes[0]
    stated = predicted(config(data=4), matmul_efficiency_source="two published rows")
    assert stated.notes[0] == "matmul_efficiency 0.5: two published rows"


def test_a_cpu_is_measured():
    cpu = Instance(
        name="cpu-4", family="cpu", platform="cpu", num_hosts=1, devices_per_host=4,
        hbm_bytes=2**32, simulated_devices=4,
    )  # fmt: skip
    assert predict_step(config(fsdp=4), cpu).step_seconds > 0
