"""Kernels of axlearn-gpu without a GPU: what they serve, and Pallas kernels interpreted.

Compiling for GPUs that are not here: ``test_kernels_aot.py``; Triton kernels: ``test_triton.py``.
"""

import functools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import experiments
from axcore.errors import OpError
from axcore.ops import Causal, Full, PrefixLM, SegmentIds, SlidingWindow, TracedWindow
from axcore.ops.references import few_logits
from axcore.parallel import resolve_instance
from axcore.parallel.aot import compiler_for
from axcore.parallel.cost import count_function
from axcore.plugins import OpCall, host
from axcore.testing import KernelCase, KernelConformance
from axcore.train import assemble
from axlearn_gpu import supports
from axlearn_gpu._capability import capability_of
from axlearn_gpu._gpus import GPUS
from axlearn_gpu._target import SILICON
from axlearn_gpu.pallas_attention import attention_pallas
from axlearn_gpu.pallas_grouped_matmul import grouped_matmul_pallas
from axlearn_gpu.tokamax_attention import attention_tokamax


def segments(*rows):
    ids = jnp.array([np.repeat(np.arange(1, len(r) + 1) % 4, r) for r in rows], jnp.int32)
    return lambda: {"q_segment_ids": ids, "kv_segment_ids": ids}


def qkv(t, heads, kv_heads, dim, value_dim=None):
    return {
        "q": (2, t, heads, dim),
        "k": (2, t, kv_heads, dim),
        "v": (2, t, kv_heads, value_dim or dim),
    }


class TestPallasTriton(KernelConformance):
    """Several blocks of keys and queries, which the small standard calls do not have."""

    op = "attention"
    implementation = "pallas_triton"

    def cases(self):
        scale = {"logit_scale": 0.25}
        window = {"mask": Causal() & SlidingWindow(left=40), "logit_cap": 2.0, **scale}
        return [
            KernelCase("grouped-window-and-cap", qkv(100, 4, 2, 16), window),
            # 0 is padding: its rows see nothing and must be zero.
            KernelCase(
                "segments",
                qkv(80, 2, 1, 24, 8),
                {"mask": Causal() & SegmentIds(), **scale},
                segments((20, 30, 10, 20), (70, 10)),
            ),
            KernelCase(
                "more-keys-than-queries",
                {"q": (2, 8, 2, 16), "k": (2, 70, 2, 16), "v": (2, 70, 2, 16)},
                {"mask": Full(), **scale},
                lambda: {"kv_valid": jnp.arange(70)[None, :] < jnp.array([[33], [70]])},
            ),
        ]

    def function(self):
        return functools.partial(attention_pallas, interpret=True)


class TestPallasGrouped(KernelConformance):
    """Groups of no, few and several tiles of rows; sides that blocks do not divide."""

    op = "grouped_matmul"
    implementation = "pallas_triton"

    def cases(self):
        shapes = {"rows": (300, 40), "weights": (4, 40, 136)}
        sizes = {"group_sizes": jnp.array([107, 0, 130, 1], jnp.int32)}
        return [KernelCase("several-tiles-and-rows-left-over", shapes, given=lambda: sizes)]

    def function(self):
        return functools.partial(grouped_matmul_pallas, interpret=True)


@pytest.mark.parametrize(
    ("rows", "weights", "result"),
    [
        ("int8", "int8", "int32"),
        ("float32", "int8", "float32"),
        ("bfloat16", "float8_e4m3fn", "float32"),
        ("float8_e4m3fn", "float8_e4m3fn", "float32"),
        ("float8_e5m2", "float8_e4m3fn", "float32"),
    ],
)
def test_grouped_products_of_few_bits_are_exact(rows, weights, result):
    """Small integers, which all of these dtypes have, and whose sums float32 holds."""
    rng = np.random.default_rng(0)
    x, w = rng.integers(-4, 5, (40, 48)), rng.integers(-4, 5, (3, 48, 24))
    sizes = np.array([17, 0, 20])
    got = grouped_matmul_pallas(
        jnp.asarray(x, rows),
        jnp.asarray(w, weights),
        jnp.asarray(sizes, jnp.int32),
        preferred_element_type=result,
        interpret=True,
    )
    ends = np.cumsum(sizes)
    expected = np.zeros((40, 24), np.int64)
    for group, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        expected[end - size : end] = x[end - size : end] @ w[group]
    assert got.dtype == result
    np.testing.assert_array_equal(np.asarray(got, np.int64), expected)


def call(op="attention", shapes=None, dtype="bfloat16", instance="gpu-h100-8", **fields):
    shapes = shapes or {n: (1, 4096, 8, 128) for n in "qkv"}
    dtypes = fields.pop("dtypes", dict.fromkeys(shapes, dtype))
    fields.setdefault("mask", Causal())
    return OpCall(op=op, shapes=shapes, dtypes=dtypes, instance=instance, platform="gpu", **fields)


def with_array(name, shape=(1, 4096)):
    return call(shapes={**call().shapes, name: shape}, dtypes={**call().dtypes, name: "int32"})


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (call(), None),
        (call(mask=Full()), None),
        (call(mask=Causal() & SlidingWindow(left=1023)), None),
        (call(mask=SlidingWindow(left=1023, right=0)), None),
        (call(mask=SlidingWindow(left=5, right=5)), "windows to the left only"),
        (call(mask=Causal() & SegmentIds()), "segment ids only as a dense"),
        (call(mask=PrefixLM(8)), "does not know the mask PrefixLM"),
        (call(mask=Causal() & TracedWindow()), "does not know the mask TracedWindow"),
        (call(dtype="float32"), "bfloat16 or float16, got float32"),
        (call(options={"logit_cap": 30.0}), "no soft cap"),
        (call(options={"dot_general": "replaced"}), "products cannot be replaced"),
        (call(view="dense"), "reads no key/value cache"),
        (with_array("q_positions"), "positions for indices"),
        (with_array("bias", (1, 8, 4096, 4096)), "takes no bias"),
        (with_array("logit_scale", ()), "static logit scale"),
        (call(shapes={n: (1, 64, 2, 20) for n in "qkv"}), "multiple of 8 up to 256, got 20"),
        (call(shapes={n: (1, 64, 2, 256) for n in "qkv"}), None),
        (
            call(shapes={n: (1, 64, 2, 256) for n in "qkv"}, instance="gpu-a100-80-8"),
            "multiple of 8 up to 128, got 256",
        ),
    ],
)  # fmt: skip
def test_what_cudnn_serves(asked, reason):
    got = supports.cudnn(asked)
    assert got is reason is None or reason in got


def test_pallas_takes_what_cudnn_does_not():
    packed = call(mask=Causal() & SegmentIds(), options={"logit_cap": 30.0}, dtype="float32")
    assert supports.pallas_triton(packed) is None
    assert "up to 256" in supports.pallas_triton(call(shapes={n: (1, 8, 2, 576) for n in "qkv"}))


@pytest.mark.parametrize(
    ("rows", "weights", "instance", "reason"),
    [
        ("bfloat16", "bfloat16", "gpu-a100-80-8", None),
        ("float32", "int8", "gpu-a100-80-8", None),
        ("int8", "int8", "gpu-h100-8", None),
        ("float8_e5m2", "float8_e4m3fn", "gpu-h100-8", None),
        ("bfloat16", "float8_e4m3fn", "gpu-a100-80-8", "compute capability 8.9"),
        ("float64", "float64", "gpu-h100-8", "got float64"),
        ("bfloat16", "float32", "gpu-h100-8", "fewer bits, got float32"),
        ("int8", "bfloat16", "gpu-h100-8", "multiplies int8 by int8"),
        ("bfloat16", "int4", "gpu-h100-8", "got int4"),
    ],
)
def test_what_grouped_products_take(rows, weights, instance, reason):
    asked = call(
        "grouped_matmul",
        {"rows": (64, 32), "weights": (4, 32, 16)},
        dtypes={"rows": rows, "weights": weights},
        instance=instance,
        mask=None,
    )
    got = supports.pallas_grouped(asked)
    assert got is reason is None or reason in got


def test_tokamax_is_refused_where_it_would_choose_another_kernel(monkeypatch):
    """It looks at the device of the process: traced from a CPU it would take the one for TPU."""
    monkeypatch.setitem(sys.modules, "tokamax", types.ModuleType("tokamax"))
    x = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    with pytest.raises(OpError, match="device of this process, 'cpu'") as error:
        attention_tokamax(x, x, x, mask=Causal(), logit_scale=1.0)
    assert error.value.code == "AX418"


def test_tokamax_says_why_not():
    assert "not installed" in supports.tokamax_mosaic(call()) or "gradient" in (
        supports.tokamax_mosaic(call())
    )


def test_the_reference_serves_short_calls_and_caches_only():
    assert "fewer than 2048 keys" in few_logits(call())
    assert few_logits(call(shapes={n: (1, 2047, 8, 128) for n in "qkv"})) is None
    assert few_logits(call(view="dense")) is None


@pytest.mark.parametrize(
    "mask", [Full(), Causal(), Causal() & SlidingWindow(left=3), SlidingWindow(left=2, right=70)]
)
def test_attention_states_the_work_that_its_mask_leaves(mask):
    """The loops' lengths depend on the mask, so nothing else could count them."""
    t, heads, dim, value_dim = 128, 2, 32, 16
    q, v = (jax.ShapeDtypeStruct((1, t, heads, d), jnp.float32) for d in (dim, value_dim))
    seen = int(jnp.sum(mask.dense(jnp.arange(t), jnp.arange(t))))

    def attend(q, k, v):
        return jnp.sum(attention_pallas(q, k, v, mask=mask, logit_scale=1.0, interpret=True))

    forward = 2 * heads * seen * (dim + value_dim)
    assert kernel_flops(attend, q, q, v) == forward
    # Two kernels, each with logits and their gradients; one more product here, two more there.
    backward = 2 * heads * seen * ((2 * dim + value_dim) + 2 * (dim + value_dim))
    assert kernel_flops(jax.grad(attend, (0, 1, 2)), q, q, v) == forward + backward


def kernel_flops(function, *arrays):
    """FLOPs that the Pallas kernels of a function state."""
    entries = count_function(function, *arrays).entries
    return sum(entry.flops for entry in entries if entry.op == "pallas_call")


def test_every_gpu_has_its_capability():
    assert set(SILICON) == set(GPUS)
    assert capability_of("gpu-p6-b200.48xlarge-8") == (10, 0)
    assert capability_of("tpu-v5p-8") is capability_of("gpu-none-8") is None


def test_every_stand_in_is_a_kernel_that_the_instance_accepts():
    instance = resolve_instance("gpu-h100-8")
    accepted = instance.attributes["aot_stand_ins"].split()
    stand_ins = compiler_for(instance).stand_ins
    assert accepted == [f"{op}.{implementation}" for op, implementation in stand_ins]
    for (op, implementation), (other, reason) in stand_ins.items():
        assert {f"{op}.{implementation}", f"{op}.{other}"} <= set(host().kernels.names())
        assert reason


def test_lists_of_a_gpu_end_with_the_reference():
    rules = assemble(experiments.get("tiny-lm"), instance="gpu-h100-8").cfg.ops
    assert rules["attention"].implementations[0] == "cudnn"
    for op in ("attention", "gated_activation", "grouped_matmul", "rms_norm", "rotary"):
        assert rules[op].implementations[-1] == "xla_gpu"
    assert rules["linear_cross_entropy"].implementations == ("xla_gpu", "triton")
