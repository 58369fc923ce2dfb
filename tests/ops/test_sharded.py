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
from axcore.parallel import MeshShape, ProgramTarget, build_mesh


class Attend(Module):
    def forward(self, q, k, v, ids):
        return ops.attention(q, k, v, mask=Causal() & SegmentIds(), q_segment_ids=ids)


class Loss(Module):
    def forward(self, hidden, weight, targets):
        out = ops.linear_cross_entropy(hidden, weight, targets, chunk_tokens=8)
        return out.loss + 0.1 * out.z_loss


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
