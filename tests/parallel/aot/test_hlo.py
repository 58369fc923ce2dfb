"""Reading compiled programs: by hand on a text, and on what the compiler really writes."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from axcore.parallel import lower_step
from axcore.parallel.aot._buffers import largest_buffers
from axcore.parallel.aot._collectives import Collective, find_collectives
from axcore.parallel.aot._hlo import array_bytes, module_path, read_program

MESH = {"fsdp": 4, "model": 2}

# Devices 0..7 are (fsdp, model) = (0, 0), (0, 1), (1, 0), ... A loop of 3 trips gathers a weight
# over fsdp and sums over model; outside, gradients are scattered and all devices agree on a norm.
TEXT = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%body (p: (s32[], bf16[8,64], /*index=2*/f32[3,8,64])) -> (s32[], bf16[8,64], f32[3,8,64]) {
  %p = (s32[], bf16[8,64]{1,0}, /*index=2*/f32[3,8,64]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = bf16[16,64]{1,0} get-tuple-element(%p), index=1
  %saved = f32[3,8,64]{2,1,0} get-tuple-element(%p), index=2
  %gather = (bf16[16,64]{1,0}, bf16[64,64]{1,0}) all-gather-start(%w), channel_id=1, \
replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, use_global_device_ids=true, \
metadata={op_name="jit(step)/jvp(decoder)/while/body/0:3:1/up/dot_general"}
  %gathered = bf16[64,64]{1,0} all-gather-done(%gather)
  %dot = f32[8,64]{1,0} custom-call(%gathered), custom_call_target="gemm", \
metadata={op_name="jit(step)/jvp(decoder)/while/body/0:3:1/up/dot_general"}
  %reduced = f32[8,64]{1,0} all-reduce(%dot), channel_id=2, \
replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%sum
  %kept = f32[3,8,64]{2,1,0} dynamic-update-slice(%saved, %dot, %i), \
metadata={op_name="jit(step)/jvp(decoder)/while/body/dynamic_update_slice"}
  ROOT %out = (s32[], bf16[16,64]{1,0}, f32[3,8,64]{2,1,0}) tuple(%i, %w, %kept)
}

%condition (p: (s32[])) -> pred[] {
  %p = (s32[]) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (w: bf16[16,64]) -> f32[16,64] {
  %w = bf16[16,64]{1,0} parameter(0), metadata={op_name="state.model['up']['weight']"}
  %zero = f32[3,8,64]{2,1,0} broadcast(%w), dimensions={}
  %start = (s32[], bf16[16,64]{1,0}, f32[3,8,64]{2,1,0}) tuple(%w, %w, %zero)
  %loop = (s32[], bf16[16,64]{1,0}, f32[3,8,64]{2,1,0}) while(%start), condition=%condition, \
body=%body, backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0"}}
  %grad = f32[64,64]{1,0} convert(%w)
  %host = f32[512,512]{1,0:S(5)} copy(%grad)
  %scattered = f32[16,64]{1,0} reduce-scatter(%grad), channel_id=3, \
replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}, to_apply=%sum
  %norm = f32[] all-reduce(%i), channel_id=4, replica_groups={}, to_apply=%sum
  %ring = f32[16,64]{1,0} collective-permute(%scattered), channel_id=5, \
source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}
  ROOT %done = f32[16,64]{1,0} copy(%ring)
}
"""


@pytest.fixture(scope="module")
def program():
    return read_program(TEXT)


def test_collectives_are_counted_by_kind_and_mesh_axis_with_the_trips_of_loops(program):
    found = {(c.kind, c.mesh_axes): (c.count, c.bytes) for c in find_collectives(program, MESH)}
    assert found == {
        ("all-gather", "fsdp"): (3, 3 * 64 * 64 * 2),  # what comes out, bf16
        ("all-reduce", "model"): (3, 3 * 8 * 64 * 4),
        ("reduce-scatter", "fsdp"): (1, 64 * 64 * 4),  # what goes in
        ("collective-permute", "fsdp"): (1, 16 * 64 * 4),
        ("all-reduce", "fsdp+model"): (1, 4),
    }


def test_what_a_device_gets_from_others_is_its_group_less_itself_and_a_sum_twice(program):
    found = {(c.kind, c.mesh_axes): c.received_bytes for c in find_collectives(program, MESH)}
    assert found == {
        ("all-gather", "fsdp"): 3 * 64 * 64 * 2 * 3 // 4,
        ("all-reduce", "model"): 3 * 8 * 64 * 4 * 2 // 2,
        ("reduce-scatter", "fsdp"): 64 * 64 * 4 * 3 // 4,
        ("collective-permute", "fsdp"): 16 * 64 * 4,
        ("all-reduce", "fsdp+model"): 4 * 2 * 7 // 8,
    }


def test_a_ragged_exchange_counts_what_there_is_not_the_room_for_it():
    """Rows go into room for the worst case, and come out of it again."""
    axes = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
    text = TEXT.replace(
        "%norm = ",
        "%room = f32[512,64]{1,0} broadcast(%i), dimensions={}\n"
        "  %there = (f32[64,64]{1,0}, f32[512,64]{1,0}, f32[512,64]{1,0}) ragged-all-to-all-start("
        f"%grad, %room, %i, %i, %i, %i), channel_id=8, {axes}\n"
        "  %filled = f32[512,64]{1,0} ragged-all-to-all-done(%there)\n"
        "  %back = f32[64,64]{1,0} ragged-all-to-all(%filled, %grad, %i, %i, %i, %i), "
        f"channel_id=9, {axes}\n  %norm = ",
    )
    found = {c.kind: c for c in find_collectives(read_program(text), MESH)}["ragged-all-to-all"]
    assert found == Collective("ragged-all-to-all", "model", 2, 2 * 64 * 64 * 4, 64 * 64 * 4)


UNCOUNTED = TEXT.replace('"known_trip_count":{"n":"3"},', "")
COMPARED = """%bound = s32[]{:T(128)} constant(7)
  ROOT %less = pred[]{:T(512)} compare(%n, %bound), direction=LT"""
COUNTER = "%n = s32[]{:T(128)} get-tuple-element(%p), index=0\n  "


@pytest.mark.parametrize(
    "text",
    [
        UNCOUNTED.replace("ROOT %less = pred[] constant(true)", COUNTER + COMPARED),
        UNCOUNTED.replace(
            "ROOT %less = pred[] constant(true)",
            COUNTER + "ROOT %less = pred[] fusion(%n), kind=kLoop, calls=%fused_compare",
        ).replace(
            "ENTRY ",
            "%fused_compare (n: s32[]) -> pred[] {\n  %n = s32[] parameter(0)\n  "
            f"{COMPARED}\n}}\n\nENTRY ",
        ),
    ],
    ids=["as for TPUs", "as for GPUs"],
)
def test_a_loop_whose_count_is_not_stated_runs_up_to_what_its_condition_compares_with(text):
    found = {c.kind: c.count for c in find_collectives(read_program(text), MESH)}
    assert found["all-gather"] == 7
    unknown = text.replace("direction=LT", "direction=NE")
    assert {c.count for c in find_collectives(read_program(unknown), MESH)} == {1}


def test_a_sum_that_is_fused_with_the_choice_of_a_part_is_a_scatter():
    """As the TPU compiler writes it."""
    fused = (
        "%all-reduce-scatter.1 (x: f32[64,64]) -> f32[16,64] {\n"
        "  %x = f32[64,64]{1,0} parameter(0)\n"
        "  %sum.1 = f32[64,64]{1,0} all-reduce(%x), channel_id=3, "
        "replica_groups=mesh['a'=4,'b'=2] {'a'}, to_apply=%sum\n"
        "  %i = s32[] partition-id()\n"
        "  ROOT %part = f32[16,64]{1,0} dynamic-slice(%sum.1, %i, %i)\n}\n\nENTRY "
    )
    text = re.sub(
        r"reduce-scatter\(%grad\).*", "fusion(%grad), calls=%all-reduce-scatter.1", TEXT
    ).replace("ENTRY ", fused)
    assert find_collectives(read_program(text), MESH) == find_collectives(read_program(TEXT), MESH)


def test_an_instruction_may_go_on_over_lines_that_begin_with_braces():
    """As kernels written with Pallas stand in programs for TPUs; what follows them counts."""
    kernel = (
        '%kernel = f32[8,64]{1,0} custom-call(%w), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"block\\": 512}"\n}}, '
        'metadata={op_name="jit(step)/jvp(decoder)/attention/pallas_call"}\n  '
    )
    found = read_program(TEXT.replace("%reduced = ", kernel + "%reduced = "))
    assert found.computations["body"].keys() >= {"kernel", "reduced", "out"}
    assert found.computations["body"]["kernel"].op_name.endswith("attention/pallas_call")
    assert find_collectives(found, MESH) == find_collectives(read_program(TEXT), MESH)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        # The program's devices 0, 1, 2, ... are (a, b) = (0, 0), (1, 0), (2, 0), (3, 0), (0, 1).
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", "fsdp"),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", "model"),
        ("mesh['a'=8], device_ids=([8]) {'a'}", "fsdp+model"),
    ],
)
def test_a_mesh_may_have_its_devices_in_another_order(groups, expected):
    text = TEXT.replace("mesh['a'=4,'b'=2] {'a'}", groups)
    kinds = {c.kind: c.mesh_axes for c in find_collectives(read_program(text), MESH)}
    assert kinds["reduce-scatter"] == expected


def test_groups_that_are_no_product_of_mesh_axes_are_called_unknown():
    text = TEXT.replace("replica_groups={}", "replica_groups={{0,9},{1,8}}")
    kinds = {(c.kind, c.mesh_axes) for c in find_collectives(read_program(text), MESH)}
    assert ("all-reduce", "unknown") in kinds


def test_what_a_loop_keeps_has_the_path_of_the_module_that_made_it(program):
    first, second, *_ = largest_buffers(program)
    assert (first.shape, first.bytes, first.kind) == ("f32[64,64]", 16384, "temporary")
    # The gathered weight is next; of the array that the loop fills, what it is filled with counts.
    shapes = {b.shape: b for b in largest_buffers(program)}
    assert shapes["f32[3,8,64]"].path == "decoder/0:3:1/up"
    assert shapes["f32[3,8,64]"].phase == "forward"
    assert shapes["bf16[16,64]"].path == "state/model/up/weight"
    assert shapes["bf16[16,64]"].kind == "argument"
    assert second.bytes == 8192


def test_an_argument_whose_quotes_are_escaped_has_the_path_of_its_array():
    text = TEXT.replace("state.model['up']['weight']", r"state.model[\'up\'][\'weight\']")
    found = {b.shape: b for b in largest_buffers(read_program(text))}
    assert found["bf16[16,64]"].path == "state/model/up/weight"
    assert found["bf16[16,64]"].op == "parameter"


def test_what_makes_a_buffer_is_named_without_the_brackets_of_transforms():
    text = TEXT.replace("jvp(decoder)/while/body/0:3:1/up/dot_general", "jvp(up/reduce_sum))")
    made = {b.op for b in largest_buffers(read_program(text), 100)}
    assert "reduce_sum" in made and not any(")" in op or "(" in op for op in made)


def test_host_memory_is_not_device_memory(program):
    assert "f32[512,512]" not in {b.shape for b in largest_buffers(program, 100)}


@pytest.mark.parametrize(
    ("dtype", "dims", "expected"),
    [("f32", "8,64", 2048), ("s4", "3", 2), ("pred", "5", 5), ("bf16", "", 2), ("token", "", 0)],
)
def test_bytes_of_arrays(dtype, dims, expected):
    assert array_bytes(dtype, dims) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "jit(step)/transpose(jvp(decoder))/layer/up/dot_general",
            ("decoder/layer/up", "backward"),
        ),
        ("jit(step)/jvp(head)/jit(_softmax)/exp", ("head", "forward")),
        (
            "jit(step)/transpose(jvp(head))/jvp(head)/checkpoint/shard_map/while/body/dot_general",
            ("head", "backward"),
        ),
        ("jit(step)/(reduce_sum:transpose(jvp(head))/dot_general)", ("head", "backward")),
        ("jit(step)/jvp()/0:2:1/(up/dot:up/mul:down/add)", ("0:2:1/up", "forward")),
        ("batch['input_ids']", ("batch/input_ids", "other")),
        ("", ("", "other")),
    ],
)
def test_the_module_path_of_an_instruction(name, expected):
    assert module_path(name) == expected


def test_a_compiled_product_moves_what_its_shardings_say():
    """A weight split over fsdp and model, rows over fsdp: gather over fsdp, sum over model."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "model"), (AxisType.Auto,) * 2)

    def struct(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    w, x = struct((64, 32), ("model", "fsdp"), None), struct((16, 64), "fsdp", "model")
    out = NamedSharding(mesh, P("fsdp", None))
    step = lower_step(lambda w, x: x @ w, w, x, out_shardings=out).compile()
    found = find_collectives(read_program(step.call.as_text()), dict(mesh.shape))
    assert found == (
        # 64 / 2 rows of the weight, whole over fsdp; 16 / 4 rows of partial results.
        Collective("all-gather", "fsdp", 1, 64 // 2 * 32 * 4, 64 // 2 * 32 * 4 * 3 // 4),
        Collective("all-reduce", "model", 1, 16 // 4 * 32 * 4, 16 // 4 * 32 * 4),
    )
