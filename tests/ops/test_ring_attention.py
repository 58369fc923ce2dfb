"""Attention over a split sequence equals the reference, forward and backward."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from axcore import Module, functional, ops
from axcore.errors import OpError
from axcore.ops import Causal, Full, PrefixLM, SegmentIds, SlidingWindow, TracedWindow
from axcore.ops._attention import _ring
from axcore.ops._attention._ring_plan import plan_ring
from axcore.ops._context_parallel import all_to_all_supports, ring_supports
from axcore.ops._select import Operand, make_call
from axcore.parallel import MeshShape, ProgramTarget, build_mesh

BATCH, SEQ, HEAD_DIM = 2, 32, 4
IN_A_HURRY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


pytestmark = pytest.mark.xdist_group("ring_attention")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks of queries and keys on each device, as long sequences have."""
    monkeypatch.setattr(_ring, "QUERY_CHUNK", 2)
    monkeypatch.setattr(_ring, "KEY_CHUNK", 4)


class Attend(Module):
    def forward(self, q, k, v, arrays, static):
        return ops.attention(q, k, v, **arrays, **dict(static))


def inputs(heads=4, kv_heads=2, seq=SEQ):
    rng = np.random.default_rng(0)
    shapes = [(BATCH, seq, n, HEAD_DIM) for n in (heads, kv_heads, kv_heads)]
    return tuple(rng.standard_normal(shape, np.float32) for shape in shapes)


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
        return jnp.sum(jnp.sin(3.0 * out)), out

    if target is not None:
        axes = ("batch", "seq", "heads", "head_dim"), *(("batch", "seq", "kv_heads", None),) * 2
        specs = (target.spec(x.shape, a) for x, a in zip(qkv, axes, strict=True))
        qkv = tuple(
            jax.device_put(x, NamedSharding(target.mesh, spec))
            for x, spec in zip(qkv, specs, strict=True)
        )
    numbers = (0, 1, 2) + ((3,) if sinks is not None else ()) + ((4,) if scale is not None else ())
    with ops.record_choices() as choices:
        lowered = jax.jit(jax.value_and_grad(loss, numbers, has_aux=True)).lower(*qkv, sinks, scale)
    program = lowered.compile(compiler_options=IN_A_HURRY)
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
    "window-cap": ({"mask": Causal() & SlidingWindow(left=5), "logit_cap": 2.0}, {}),
    "segments-sinks": (
        {"mask": Causal() & SegmentIds()},
        {**SEGMENTS, "sinks": np.linspace(-1, 1, 4, dtype=np.float32)},
    ),
    "prefix-positions-valid": (
        {"mask": PrefixLM() & SegmentIds()},
        {
            **SEGMENTS,
            "prefix_lengths": np.array([3, 9]),
            "q_positions": np.tile(POSITIONS, (BATCH, 1)),
            "kv_positions": np.tile(POSITIONS, (BATCH, 1)),
            "kv_valid": np.arange(SEQ) % 5 > np.ones((BATCH, 1)),
        },
    ),
    "traced-window-scale": (
        {"mask": Causal() & TracedWindow()},
        {"window": np.int32(7), "logit_scale": np.float32(0.3)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_ring_equals_the_reference(case):
    check(("ring",), {"seq": 4, "model": 2}, *CASES[case])


def test_all_to_all_equals_the_reference():
    # Two query heads and one key/value head on a device: both of those that split seq hold it.
    case = CASES["segments-sinks"]
    choices, _ = check(("all_to_all",), {"fsdp": 2, "seq": 2, "model": 2}, *case)
    inner = choices[1]
    assert inner.chosen == "xla" and inner.call.mesh_axes == {}
    assert inner.call.shapes["q"] == (1, SEQ, 1, HEAD_DIM)


def test_key_value_heads_fewer_than_devices_are_copied():
    choices, _ = check(("ring",), {"seq": 2, "model": 4}, {"mask": Causal()})
    assert choices[0].call.device_shapes["k"] == (BATCH, SEQ, 1, HEAD_DIM)


def test_a_ring_gathers_no_keys():
    # 48 positions, 6 on a device: no result of the program has a dim of all of them.
    _, program = check(("ring",), {"seq": 8}, {"mask": Full()}, seq=48)
    text = program.as_text()
    dims = {d for shape in re.findall(r"\bf32\[([\d,]+)\]", text) for d in shape.split(",")}
    assert "48" not in dims and "6" in dims
    assert "all-gather" not in text and "collective-permute" in text


def refusals(implementation, target, q, k, **arrays):
    """The reason why an implementation does not serve a call."""
    m = Attend.Config().instantiate(name="m")

    def attend(q, k, arrays):
        static = (("mask", Full()), ("implementation", implementation))
        inputs = (q, k, k, arrays, static)
        return functional(m, state={}, inputs=inputs, is_training=True, target=target)

    with pytest.raises(OpError) as caught:
        jax.eval_shape(attend, q, k, arrays)
    assert caught.value.code == "AX410"
    return str(caught.value)


def test_refusals_give_the_reason():
    split = targets(("xla",), seq=4)
    q, k, _ = inputs(heads=6, kv_heads=3)
    for name in ("ring", "all_to_all"):
        assert "seq, which is whole" in refusals(name, targets(("xla",), data=2), q, k)
        bias = jnp.zeros((1, 1, SEQ, SEQ))
        assert f"no bias array (1, 1, {SEQ}, {SEQ})" in refusals(name, split, q, k, bias=bias)
        said = refusals(name, split, q, k[:, : SEQ // 2])
        assert f"got {SEQ} queries and {SEQ // 2} keys" in said
    assert "6 query heads on a device do not divide over 4" in refusals("all_to_all", split, q, k)
    q, k, _ = inputs(heads=12, kv_heads=3)
    said = refusals("all_to_all", split, q, k)
    assert "3 key/value heads on a device neither divide over 4 devices (seq)" in said


def test_a_cache_is_refused():
    k = jnp.zeros((BATCH, SEQ, 2, HEAD_DIM))

    class View:
        kind = "dense"

        def dense(self):
            return ops.DenseKV(k, k)

    call = make_call(
        "attention", {"q": Operand(k, (None,) * 4), "k": Operand(k, (None,) * 4)}, view="dense",
        options={},
    )  # fmt: skip
    assert ops.attention(k, view=View()).shape == k.shape
    for supports in (ring_supports, all_to_all_supports):
        assert "reads no key/value cache (a 'dense' view)" in (supports(call) or "")


@pytest.mark.parametrize(
    ("mask", "local", "plan"),
    [
        (Causal(), 8, (True, 4)),
        (Causal(), 7, (False, 4)),  # halves would not be equal
        (Full(), 8, (False, 4)),
        (Causal() & SlidingWindow(left=8), 8, (False, 2)),
        (Causal() & SlidingWindow(left=9), 8, (False, 3)),
        (Causal() & SegmentIds(), 8, (True, 4)),
        (SlidingWindow(left=0, right=8), 8, (False, 4)),  # the next device is the last hop
        (SlidingWindow(left=0, right=0), 8, (False, 1)),
    ],
    ids=str,
)
def test_the_plan_follows_from_what_the_mask_reaches(mask, local, plan):
    assert plan_ring(mask, local, 4) == plan


def test_zigzag_gives_every_device_the_same_work():
    """Of n devices the busiest compares 2 n + 1 pairs of pieces; in order it would be 4 n - 1."""
    n, size = 8, 2
    for device in range(n):
        pieces = (device, 2 * n - 1 - device)
        seen = [
            sum(Causal().reaches((q * size, q * size + 1), (k * size, k * size + 1)) for q in pieces
                for k in ((device - hop) % n, 2 * n - 1 - (device - hop) % n))
            for hop in range(n)
        ]  # fmt: skip
        assert seen == [3] + [2] * (n - 1)
