"""Attention over a split sequence equals the reference, forward and backward."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axcore import Module, functional, ops
from axcore.errors import OpError
from axcore.ops import Causal, Full, PrefixLM, SegmentIds, SlidingWindow, TracedWindow
from axcore.ops._attention import _ring
from axcore.ops._attention._ring_plan import plan_ring
from axcore.parallel import MeshShape, ProgramTarget, build_mesh

BATCH, SEQ, HEAD_DIM = 2, 32, 4
ROWS = ("data", "fsdp")


class Attend(Module):
    def forward(self, q, k, v, arrays, static):
        return ops.attention(q, k, v, **arrays, **dict(static))


def inputs(heads=4, kv_heads=2, seq=SEQ, dtype="float32"):
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (BATCH, seq, heads, HEAD_DIM), dtype)
    return q, *(jax.random.normal(k, (BATCH, seq, kv_heads, HEAD_DIM), dtype) for k in keys[1:])


def targets(implementations, **sizes):
    shape = MeshShape(**sizes)
    num = int(np.prod(list(sizes.values())))
    mesh = build_mesh(shape, jax.devices()[:num])
    return ProgramTarget("cpu-8", "cpu", mesh, kernels={"attention": implementations})


def run(target, qkv, arrays, static):
    """Outputs and gradients of a weighted sum of them, and what was chosen."""
    m = Attend.Config().instantiate(name="m")
    sinks, scale = arrays.pop("sinks", None), arrays.pop("logit_scale", None)

    def loss(q, k, v, sinks, scale):
        given = dict(arrays)
        given |= {} if sinks is None else {"sinks": sinks}
        given |= {} if scale is None else {"logit_scale": scale}
        out, _ = functional(
            m, state={}, inputs=(q, k, v, given, static), is_training=True, target=target
        )
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * weights), out

    if target is not None:
        spec = P(ROWS, "seq", "model", None)
        qkv = tuple(jax.device_put(x, NamedSharding(target.mesh, spec)) for x in qkv)
    numbers = (0, 1, 2) + ((3,) if sinks is not None else ()) + ((4,) if scale is not None else ())
    with ops.record_choices() as choices:
        lowered = jax.jit(jax.value_and_grad(loss, numbers, has_aux=True)).lower(*qkv, sinks, scale)
    program = lowered.compile()
    return program(*qkv, sinks, scale), choices, program


def check(implementations, sizes, static, arrays=None, **shape):
    arrays = arrays or {}
    qkv = inputs(**shape)
    static = tuple(static.items())
    expected, _, _ = run(None, qkv, dict(arrays), static)
    got, choices, program = run(targets(implementations, **sizes), qkv, dict(arrays), static)
    # float32: the sum over keys is taken in another order, in up to 8 parts.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), got, expected)
    assert choices[0].chosen == implementations[0], choices[0]
    return choices, program


SEGMENTS = {
    "q_segment_ids": np.repeat([[1, 1, 2, 2, 2, 3, 0, 0], [1, 2, 2, 3, 3, 3, 3, 0]], 4, axis=1)
}
POSITIONS = np.concatenate([np.arange(8), np.arange(12), np.arange(12)])
CASES = {
    "causal": ({"mask": Causal()}, {}),
    "window-cap": (
        {"mask": Causal() & SlidingWindow(left=5), "logit_cap": 2.0},
        {},
    ),
    "segments-sinks": (
        {"mask": Causal() & SegmentIds()},
        {**SEGMENTS, "sinks": np.linspace(-1, 1, 4, dtype=np.float32)},
    ),
    "prefix-positions": (
        {"mask": PrefixLM() & SegmentIds()},
        {
            **SEGMENTS,
            "prefix_lengths": np.array([3, 9]),
            "q_positions": np.tile(POSITIONS, (BATCH, 1)),
            "kv_positions": np.tile(POSITIONS, (BATCH, 1)),
        },
    ),
    "traced-window-scale": (
        {"mask": Causal() & TracedWindow()},
        {"window": np.int32(7), "logit_scale": np.float32(0.3)},
    ),
    "full-valid": ({"mask": Full()}, {"kv_valid": np.arange(SEQ) % 5 > np.ones((BATCH, 1))}),
}


@pytest.mark.parametrize("case", CASES)
def test_ring_equals_the_reference(case):
    check(("ring",), {"seq": 4, "model": 2}, *CASES[case])


@pytest.mark.parametrize("case", ["causal", "segments-sinks"])
def test_all_to_all_equals_the_reference(case):
    # Two query heads and one key/value head on a device: each of the two holds it.
    check(("all_to_all",), {"fsdp": 2, "seq": 2, "model": 2}, *CASES[case])
