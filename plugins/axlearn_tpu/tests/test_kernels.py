"""The Pallas kernels, step by step on a CPU: results and gradients against core's references."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from axcore.ops import masks
from axcore.ops.references import few_logits
from axcore.plugins import OpCall
from axcore.testing import KernelCase, KernelConformance
from axlearn_tpu import supports
from axlearn_tpu._block_sizes import tile
from axlearn_tpu.pallas_grouped_matmul import grouped_matmul_megablox
from axlearn_tpu.pallas_paged_attention import paged_attention_pallas
from axlearn_tpu.pallas_splash import attention_splash

CAUSAL = masks.Causal()


def qkv(t, heads, kv_heads, *, s=None, h=16, v=None):
    s = s or t
    return {"q": (2, t, heads, h), "k": (2, s, kv_heads, h), "v": (2, s, kv_heads, v or h)}


def case(name, shapes, mask, given=dict, **static):
    return KernelCase(name, shapes, {"mask": mask, "logit_scale": 0.3, **static}, given)


def documents():
    """Two documents and padding in one row, one document in the other."""
    first = jnp.repeat(jnp.array([1, 2, 0]), jnp.array([60, 50, 20]))
    ids = jnp.stack([first, jnp.ones_like(first)]).astype(jnp.int32)
    return {"q_segment_ids": ids, "kv_segment_ids": ids}


def other_documents():
    """Keys of a document that no query is of, and queries of one that no key is of."""
    q = jnp.full((2, 130), 1, jnp.int32).at[:, 90:].set(3)
    return {"q_segment_ids": q, "kv_segment_ids": jnp.full((2, 140), 1, jnp.int32).at[1].set(2)}


def some_valid():
    """The second row has no key at all."""
    return {"kv_valid": jnp.arange(140)[None, :] < jnp.array([[100], [0]])}


class TestSplash(KernelConformance):
    """What training on packed documents needs: 130 tokens, which no tile divides."""

    op = "attention"
    implementation = "pallas_splash"
    low_precision = None

    def function(self):
        return functools.partial(attention_splash, interpret=True)

    def cases(self):
        documents_of = CAUSAL & masks.SegmentIds()
        return [case("packed-grouped", qkv(130, 4, 2), documents_of, documents)]


@pytest.mark.slow
class TestSplashMasks(KernelConformance):
    """Every mask that it says it serves, caps, sinks, other value dims, and several tiles."""

    op = "attention"
    implementation = "pallas_splash"

    def function(self):
        return functools.partial(attention_splash, interpret=True)

    def cases(self):
        window = CAUSAL & masks.SlidingWindow(left=100)
        return [
            case("full-padded-keys", qkv(128, 2, 2, s=140), masks.Full()),
            case("multi-query-cap", qkv(130, 4, 1), CAUSAL, logit_cap=2.0),
            # Three tiles of 384 by three: some hidden, some whole, some in part.
            case("window-several-tiles", qkv(1100, 2, 1), window),
            case("both-sides", qkv(128, 2, 2), masks.SlidingWindow(left=20, right=9)),
            case("prefix", qkv(130, 2, 1, h=24, v=8), masks.PrefixLM(40)),
            KernelCase(
                "sinks",
                qkv(128, 2, 1) | {"sinks": (2,)},
                {"mask": CAUSAL, "logit_scale": 0.3},
            ),
            case("rows-without-keys", qkv(130, 2, 2, s=140), masks.SegmentIds(), other_documents),
            case("invalid-keys", qkv(130, 2, 2, s=140), masks.Full(), some_valid),
        ]

    # Each jit compiles an interpreter's loop; results of one are bitwise those of another run.
    def test_determinism(self, case):
        if case.name != "window-several-tiles":
            pytest.skip("one case stands for all")
        super().test_determinism(case)


class TestMegablox(KernelConformance):
    op = "grouped_matmul"
    implementation = "pallas_megablox"
    low_precision = None

    def function(self):
        return functools.partial(grouped_matmul_megablox, interpret=True)

    def cases(self):
        def sizes(*values):
            return lambda: {"group_sizes": jnp.array(values, jnp.int32)}

        shapes = {"rows": (300, 40), "weights": (3, 40, 136)}
        return [KernelCase("empty-group-and-rows-left-over", shapes, given=sizes(107, 0, 130))]


@pytest.mark.slow
class TestMegabloxTiles(TestMegablox):
    low_precision = "bfloat16"

    def cases(self):
        # More than one tile of every dim, none of which divides it.
        shapes = {"rows": (600, 700), "weights": (4, 700, 650)}
        sizes = {"group_sizes": jnp.array([300, 1, 259, 40], jnp.int32)}
        return [KernelCase("several-tiles", shapes, given=lambda: sizes)]


class TestPaged(KernelConformance):
    """Pages are bfloat16 here in every test: the kernel rounds others to it."""

    op = "paged_attention"
    implementation = "pallas_paged"
    differentiable = False
    low_precision = None
    # Both get the same bfloat16 pages; probabilities are rounded to it in one of them.
    tolerance = 1e-2

    def function(self):
        def interpreted(**arguments):
            with pltpu.force_tpu_interpret_mode():
                return paged_attention_pallas(**arguments)

        return interpreted

    def cases(self):
        def given():
            keys = jax.random.split(jax.random.key(1))
            pages = {
                name: jax.random.normal(key, (2, 9, 16, 128)).astype(jnp.bfloat16)
                for name, key in zip(("k_pages", "v_pages"), keys, strict=True)
            }
            # Pages past a row's length may be anything.
            table = jnp.array([[99, 99, 99], [1, 5, 77], [3, 4, 6]], jnp.int32)
            return {**pages, "lengths": jnp.array([0, 17, 48], jnp.int32), "page_table": table}

        static = {"logit_scale": 0.1, "logit_cap": 5.0, "window": None}
        return [KernelCase("grouped-cap-empty-row", {"q": (3, 4, 128)}, static, given)]


def call(op="attention", *, dtype="bfloat16", **changes):
    """A call of attention that splash serves, but for the changes."""
    shape = (4, 4096, 8, 128)
    shapes = changes.pop("shapes", {"q": shape, "k": shape, "v": shape})
    dtypes = dict.fromkeys(shapes, dtype)
    arguments = {"mask": CAUSAL, "platform": "tpu", "dtypes": dtypes, **changes}
    return OpCall(op=op, shapes=shapes, **arguments)


QKV = {"q": (4, 4096, 8, 128), "k": (4, 4096, 8, 128), "v": (4, 4096, 8, 128)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"dtype": "float32"}, None),
        ({"mask": CAUSAL & masks.SlidingWindow(left=9) & masks.SegmentIds()}, None),
        ({"options": {"logit_cap": 50.0}}, None),
        ({"shapes": QKV | {"sinks": (8,), "kv_valid": (4, 4096)}}, None),
        ({"purpose": "decode"}, "decoding"),
        ({"view": "dense", "purpose": "prefill"}, "no key/value cache"),
        ({"shapes": QKV | {"bias": (1, 8, 4096, 4096)}}, "no bias"),
        ({"options": {"dot_general": "replaced"}}, "cannot be replaced"),
        ({"dtype": "float16"}, "bfloat16 or float32, got"),
        ({"mask": CAUSAL & masks.TracedWindow()}, "a stack whose period"),
        ({"mask": masks.PrefixLM()}, "fixed prefix"),
        ({"shapes": QKV | {"q_positions": (4, 4096)}}, "positions for indices"),
        ({"shapes": QKV | {"q_positions": (4, 4096)}, "mask": masks.SegmentIds()}, None),
        ({"shapes": {n: (4, 64, 8, 128) for n in "qkv"}}, "tiles of 128 queries"),
        ({"shapes": {n: (4, 4096, 8, 576) for n in "qkv"}}, "head dims up to 256, got 576"),
    ],
)
def test_splash_says_what_it_cannot_serve(changes, reason):
    got = supports.splash(call(**changes))
    assert got is None if reason is None else reason in got


@pytest.mark.parametrize(
    ("changes", "serves"),
    [
        ({}, False),
        ({"shapes": {n: (4, 1024, 8, 128) for n in "qkv"}}, True),
        ({"purpose": "decode"}, True),
        ({"view": "dense", "purpose": "prefill"}, True),
    ],
)
def test_xlas_own_attention_is_for_few_logits_and_caches(changes, serves):
    assert (few_logits(call(**changes)) is None) == serves


@pytest.mark.parametrize(
    ("length", "largest", "padded", "size"),
    [(100, 512, 128, 128), (512, 512, 512, 512), (4096, 512, 4096, 512), (1100, 512, 1152, 384)],
)
def test_tiles_pad_little(length, largest, padded, size):
    assert tile(length, largest) == (padded, size)


def test_paged_attention_refuses_what_scalar_memory_cannot_hold():
    pages = (8, 64, 16, 128)
    shapes = {"q": (256, 8, 128), "k_pages": pages, "v_pages": pages, "page_table": (256, 1024)}
    reason = supports.paged_attention(call("paged_attention", shapes=shapes, mask=None))
    assert "larger pages need fewer" in reason
    smaller = shapes | {"page_table": (256, 128)}
    assert supports.paged_attention(call("paged_attention", shapes=smaller, mask=None)) is None


def test_a_rows_scale_may_be_traced():
    """Models that learn a scale hand an array over."""
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 128, 1, 16)) for i in range(3))
    run = functools.partial(attention_splash, q, k, v, mask=CAUSAL, interpret=True)
    fixed, traced = (jax.jit(lambda s: run(logit_scale=s)), jax.jit(lambda: run(logit_scale=0.2)))
    # Not bitwise: a constant scale is folded into the kernel's input.
    np.testing.assert_allclose(fixed(jnp.float32(0.2)), traced(), rtol=1e-5, atol=1e-6)
