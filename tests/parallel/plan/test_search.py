"""The planner's search: what is enumerated, what is dropped and why, and how the rest is ranked."""

from __future__ import annotations

import itertools

import pytest

from axcore import experiments
from axcore.config import apply_modifier, author
from axcore.layers import ALiBi
from axcore.parallel import MeshRules, MeshShape, compute_traits
from axcore.parallel.cost import memory_estimate, predict_step
from axcore.parallel.plan import Dims, budget_bytes, meshes, rule_text, search
from axcore.plugins import Instance

ROWS, SEQ = 16, 32


def machine(devices: int = 8, **fields) -> Instance:
    known = dict(
        name=f"test-{devices}",
        family="test",
        platform="test",
        num_hosts=1,
        devices_per_host=devices,
        hbm_bytes=2**34,
        hbm_bandwidth_bytes=1e12,
        peak_flops={"bfloat16": 1e14, "float32": 5e13},
        ici_bandwidth_bytes=1e11,
        matmul_efficiency=0.5,
    )
    return Instance(**(known | fields))


@pytest.fixture(scope="module")
def cfg():
    cfg = experiments.get("tiny-lm")
    cfg.model.model_dim = 32
    cfg.model.decoder.num_layers = 4
    cfg.model.decoder.layer.attention.num_heads = 4
    return cfg.set(batch_size=ROWS, seq_len=SEQ, mesh_shape=MeshShape(data=-1))


@pytest.fixture(scope="module")
def plan(cfg):
    return search(cfg, machine())


def test_meshes_are_all_that_divide_devices_layers_tensors_and_rows(cfg):
    traits = compute_traits(cfg)
    found = set(meshes(Dims(traits, pipelined=True), machine()))
    powers = (1, 2, 4, 8)
    expected = {
        MeshShape(pipeline=p, data=d, fsdp=f, model=m)
        for p, d, f, m in itertools.product(powers, repeat=4)
        if p * d * f * m == 8
        and traits.num_layers % p == 0
        and traits.tensor_parts % m == 0
        and ROWS % (d * f) == 0
    }
    assert found == expected


def test_layers_before_the_first_period_leave_no_pipeline(cfg):
    prefixed = cfg.copy()
    layer = prefixed.model.decoder.layer.copy()
    prefixed.model.decoder.set(prefix=(layer,))
    dims = [Dims.of(each, compute_traits(each)).pipelined for each in (cfg, prefixed)]
    assert dims == [True, False]


def test_rows_are_split_where_there_are_fewer_than_shards(cfg):
    traits = compute_traits(cfg.copy().set(batch_size=1, seq_len=1024))
    for mesh in meshes(Dims(traits), machine()):
        assert mesh.data * mesh.fsdp == 1 and mesh.seq * mesh.model == 8


def test_rows_stay_whole_where_attention_has_a_bias(cfg):
    biased = cfg.copy().set(batch_size=4, seq_len=1024)
    biased.model.decoder.layer.attention.bias = ALiBi.Config()
    plain, with_bias = (
        {mesh.seq for mesh in meshes(Dims.of(c, compute_traits(c)), machine(32))}
        for c in (cfg.copy().set(batch_size=4, seq_len=1024), biased)
    )
    assert max(plain) > 1 and with_bias == {1}


def test_the_budget_is_the_compilers_where_that_allows_less():
    cpu = Instance(
        name="cpu", family="cpu", platform="cpu", num_hosts=1, devices_per_host=1, hbm_bytes=1000
    )
    assert budget_bytes(cpu) <= 920
    assert budget_bytes(machine(hbm_bytes=1000)) == 920  # no compiler for it


def test_the_first_is_the_fastest_of_all_and_each_other_says_what_it_lost_by(plan):
    times = [r.prediction.step_seconds for r in plan.ranked]
    assert times == sorted(times) and len(times) > 5
    assert plan.ranked[0].reason == ""
    assert all("x the time" in r.reason for r in plan.ranked[1:])


def test_what_is_ranked_is_what_the_rule_makes_of_the_config(cfg, plan):
    best = plan.ranked[0]
    rules = MeshRules.Config.from_text(rule_text(best.candidate, "test-*")).rules
    ((pattern, modifiers),) = rules
    made = cfg
    for modifier in modifiers:
        made = apply_modifier(made, modifier)
    assert pattern == "test-*"
    assert predict_step(made, machine()).step_seconds == best.prediction.step_seconds


def test_everything_ranked_fits_and_everything_rejected_for_memory_does_not(cfg):
    whole = memory_estimate(cfg, {"data": 8}, num_devices=8).total
    small = machine(hbm_bytes=round(0.6 * whole))
    plan = search(cfg, small)
    assert plan.ranked and plan.rejected
    assert all(r.prediction.memory.total <= plan.limit_bytes for r in plan.ranked)
    assert all("GiB" in r.reason for r in plan.rejected)


def test_nothing_fits_into_no_memory_and_the_reason_names_the_largest_part(cfg):
    plan = search(cfg, machine(hbm_bytes=1000))
    assert plan.ranked == ()
    assert all("GiB" in r.reason for r in plan.rejected)


def test_memory_as_objective_ranks_by_memory(cfg, plan):
    small = search(cfg, machine(), objective="memory")
    sizes = [r.prediction.memory.total for r in small.ranked]
    assert sizes == sorted(sizes)
    assert sizes[0] < plan.ranked[0].prediction.memory.total


def test_more_microbatches_only_where_memory_asks_for_them(cfg):
    roomy = search(cfg, machine())
    assert {r.candidate.accumulation_steps for r in roomy.ranked} == {1}
    tight = search(cfg, machine(hbm_bytes=roomy.ranked[0].prediction.memory.total // 2))
    assert any(r.candidate.accumulation_steps > 1 for r in tight.ranked)


def test_what_a_flag_has_set_is_kept(cfg):
    own = cfg.copy()
    with author("flag", "--set mesh_shape"):
        own.mesh_shape = MeshShape(data=2, fsdp=4)
    plan = search(own, machine())
    assert {r.candidate.mesh for r in plan.ranked} == {MeshShape(data=2, fsdp=4)}


def test_slices_are_joined_by_data(cfg):
    two = machine(num_slices=2, num_hosts=2, devices_per_host=4, dcn_bandwidth_bytes=1e10)
    plan = search(cfg, two)
    assert {tuple(r.candidate.mesh.across_slices.items()) for r in plan.ranked} == {(("data", 2),)}
