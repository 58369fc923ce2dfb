"""The references under a mesh give what they give on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axcore import Module, functional, ops
from axcore.ops import Causal, SegmentIds
from axcore.ops._linear_cross_entropy._xla import _fitting
from axcore.parallel import MeshShape, ProgramTarget, ShardingRules, build_mesh
from axcore.parallel.aot._collectives import find_collectives
from axcore.parallel.aot._hlo import read_program
from axcore.testing import equations


class Attend(Module):
    def forward(self, q, k, v, ids):
        return ops.attention(q, k, v, mask=Causal() & SegmentIds(), q_segment_ids=ids)


def losses(hidden, weight, targets):
    out = ops.linear_cross_entropy(hidden, weight, targets, chunk_tokens=8)
    return out.loss + 0.1 * out.z_loss


class Loss(Module):
    def forward(self, hidden, weight, targets):
        return losses(hidden, weight, targets)


def gradients(module, target, num_float, *inputs):
    """Value and gradients by the first inputs of a weighted sum of the outputs."""
    m = module.Config().instantiate(name="m")

    def loss(*inputs):
        out, _ = functional(m, state={}, inputs=inputs, is_training=True, target=target)
        return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    return jax.jit(jax.value_and_grad(loss, tuple(range(num_float))))(*inputs)


def sharded(mesh, *pairs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in pairs]


def close(got, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)


SIZES = [{"data": 2, "model": 2}, {"data": 2, "seq": 2, "model": 2}, {"seq": 4}]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_linear_cross_entropy(sizes):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, weight = jax.random.normal(keys[0], (4, 16, 8)), jax.random.normal(keys[1], (12, 8))
    targets = jax.random.randint(keys[2], (4, 16), 0, 12)
    mesh = build_mesh(MeshShape(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])
    target = ProgramTarget("cpu-8", "cpu", mesh)
    inputs = sharded(
        mesh,
        (hidden, P("data", "seq", None)),
        (weight, P("model", None)),
        (targets, P("data", "seq")),
    )
    expected = gradients(Loss, None, 2, hidden, weight, targets)
    close(gradients(Loss, target, 2, *inputs), expected)


TOKENS_SPLIT = [
    ({"fsdp": 8}, {}, (8, 16)),
    ({"data": 2, "expert": 2, "fsdp": 2}, {}, (8, 16)),
    ({"fsdp": 2, "seq": 2, "model": 2}, {}, (8, 16)),
    # Sequence parallel: one mesh axis splits tokens and vocabulary.
    ({"fsdp": 4, "model": 2}, {"activation_rules": {"seq": ("seq", "model")}}, (8, 16)),
    # Its weight lies on an axis of the tokens by both dims; it is whole on the others.
    ({"data": 2, "fsdp": 4}, {"param_rules": {"vocab": ("fsdp",), "embed": ("data",)}}, (8, 16)),
    ({"fsdp": 8}, {}, (64,)),
]


@pytest.mark.parametrize(("sizes", "rules", "lead"), TOKENS_SPLIT, ids=str)
def test_linear_cross_entropy_of_sharded_tokens_and_weight(sizes, rules, lead):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, weight = jax.random.normal(keys[0], (*lead, 8)), jax.random.normal(keys[1], (16, 8))
    # Some are negative: masked.
    targets = jax.random.randint(keys[2], lead, -4, 16)
    target = ProgramTarget("cpu-8", "cpu", mesh_of(sizes), ShardingRules(**rules))
    tokens = ("batch", "seq")[: len(lead)]
    inputs = sharded(
        target.mesh,
        (hidden, target.spec(hidden.shape, (*tokens, "embed"))),
        (weight, target.spec(weight.shape, ("vocab", "embed"), table="param")),
        (targets, target.spec(lead, tokens)),
    )
    expected = gradients(Loss, None, 2, hidden, weight, targets)
    close(gradients(Loss, target, 2, *inputs), expected)


def test_a_target_past_a_vocabulary_that_is_split_has_no_loss():
    keys = jax.random.split(jax.random.key(0), 2)
    hidden, weight = jax.random.normal(keys[0], (4, 16, 8)), jax.random.normal(keys[1], (16, 8))
    targets = jnp.zeros((4, 16), jnp.int32).at[1, 2].set(16)
    target = ProgramTarget("cpu-8", "cpu", mesh_of({"fsdp": 4, "model": 2}))
    module = Loss.Config().instantiate(name="m")

    @jax.jit
    def loss(*inputs):
        return functional(module, state={}, inputs=inputs, is_training=True, target=target)[0]

    assert np.argwhere(np.isnan(loss(hidden, weight, targets))).tolist() == [[1, 2]]


def test_linear_cross_entropy_inside_a_shard_map_of_another_axis():
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, weight = jax.random.normal(keys[0], (8, 16, 8)), jax.random.normal(keys[1], (16, 8))
    targets = jax.random.randint(keys[2], (8, 16), 0, 16)
    target = ProgramTarget("cpu-8", "cpu", mesh_of({"data": 2, "fsdp": 4}))

    class Mapped(Module):
        def forward(self, hidden, weight, targets):
            return jax.shard_map(
                losses,
                mesh=target.mesh,
                in_specs=(P("data"), P(), P("data")),
                out_specs=P("data"),
                axis_names={"data"},
                check_vma=False,
            )(hidden, weight, targets)

    expected = gradients(Loss, None, 2, hidden, weight, targets)
    close(gradients(Mapped, target, 2, hidden, weight, targets), expected)


def mesh_of(sizes):
    return build_mesh(MeshShape(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])


def moved_by_the_loss(chunk_tokens, sizes, dtype="bfloat16"):
    """(Kind, axes) -> (how many, bytes) of what a chunked loss and its gradients move."""

    class Chunked(Module):
        def forward(self, hidden, weight, targets):
            return jnp.sum(
                ops.linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens).loss
            )

    target = ProgramTarget("cpu-8", "cpu", mesh_of(sizes))
    module = Chunked.Config().instantiate(name="m")

    def array(shape, axes, dtype, table="activation"):
        place = NamedSharding(target.mesh, target.spec(shape, axes, table=table))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def loss(*inputs):
        return functional(module, state={}, inputs=inputs, is_training=True, target=target)[0]

    step = jax.jit(jax.grad(loss, (0, 1)))
    compiled = step.lower(
        array((8, 256, 64), ("batch", "seq", None), dtype),
        array((512, 64), ("vocab", "embed"), "float32", table="param"),
        array((8, 256), ("batch", "seq"), "int32"),
    ).compile()
    found = find_collectives(read_program(compiled.as_text()), target.mesh.shape)
    # What products over parts of the vocabulary sum goes with their tokens.
    return {
        (c.kind, c.mesh_axes): (c.count, c.bytes)
        for c in found
        if c.bytes > 1024 and (c.kind, c.mesh_axes) != ("all-reduce", "model")
    }


@pytest.mark.parametrize(
    "sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "model": 2}], ids=str
)
def test_a_chunked_loss_gathers_and_reduces_its_weight_once_for_all_chunks(sizes):
    few, many = (moved_by_the_loss(n, sizes) for n in (128, 8))
    # XLA's CPU compiler gathers bfloat16 as float32.
    part = 4 * 512 * 64 // sizes.get("model", 1)
    expected = {("all-gather", "fsdp"): (1, part), ("reduce-scatter", "fsdp"): (1, part)}
    if "data" in sizes:  # replicas of the weight: the part that was scattered to a device
        expected["all-reduce", "data"] = (1, part // sizes["fsdp"])
    assert few == many == expected


def test_a_loss_s_gradient_is_not_added_up_as_it_leaves_the_sum_over_devices():
    """libtpu 0.0.42 fails where a loop over microbatches adds such sums up (its code motion)."""
    target = ProgramTarget("cpu-8", "cpu", build_mesh(MeshShape(fsdp=8), jax.devices()))
    arrays = (jnp.zeros((8, 16, 8)), jnp.zeros((16, 8)), jnp.zeros((8, 16), jnp.int32))
    program = jax.make_jaxpr(lambda *inputs: gradients(Loss, target, 2, *inputs))(*arrays)
    every = list(equations(program))
    sums = [v for e in every if e.primitive.name == "reduce_scatter" for v in e.outvars]
    held = [v for e in every if e.primitive.name == "optimization_barrier" for v in e.invars]
    assert sums and all(any(v is h for h in held) for v in sums)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_attention(sizes):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (4, 256, 4, 4))
    k, v = (jax.random.normal(key, (4, 256, 2, 4)) for key in keys[1:])
    ids = jnp.broadcast_to(jnp.where(jnp.arange(256) > 100, 2, 1), (4, 256))
    mesh = build_mesh(MeshShape(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])
    target = ProgramTarget("cpu-8", "cpu", mesh)
    heads = P("data", "seq", "model", None)
    inputs = sharded(mesh, (q, heads), (k, heads), (v, heads), (ids, P("data", "seq")))
    close(gradients(Attend, target, 3, *inputs), gradients(Attend, None, 3, q, k, v, ids))


@pytest.mark.parametrize(
    ("num_chunks", "length", "shards", "expected"),
    [(3, 16, 1, 4), (3, 16, 2, 4), (5, 16, 4, 4), (100, 16, 2, 8), (2, 7, 2, 7)],
)
def test_chunks_cut_each_shard_evenly(num_chunks, length, shards, expected):
    assert _fitting(num_chunks, length, shards) == expected
