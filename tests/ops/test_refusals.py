"""Reasons that kernels of attention share: each names what was got, and none is given too often."""

import pytest

from axcore.ops import masks
from axcore.ops.refusals import blockwise_attention, many_queries, own_products
from axcore.plugins import OpCall

QKV = {name: (1, 64, 2, 16) for name in "qkv"}
POSITIONS = {"q_positions": (1, 64)}


def call(shapes=QKV, *, dtypes=None, **fields):
    dtypes = dict.fromkeys(shapes, "bfloat16") | (dtypes or {})
    fields = {"mask": masks.Causal(), **fields}
    return OpCall(op="attention", shapes=shapes, dtypes=dtypes, **fields)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (call(), None),
        (call(dtypes={"q": "float16"}), "one dtype, bfloat16 or float16, got bfloat16 and float16"),
        (call(dtypes=dict.fromkeys("qkv", "float32")), "bfloat16 or float16, got float32"),
        (call(view="dense"), "reads no key/value cache (a 'dense' view)"),
        (call(options={"dot_general": "replaced"}), "cannot be replaced"),
        (call(QKV | {"bias": (1, 2, 64, 64)}), "takes no bias, got an array (1, 2, 64, 64)"),
        (call(QKV | {"logit_scale": ()}), "takes a static logit scale, got an array ()"),
        (call(QKV | {"sinks": (2,)}), None),  # the caller does not name them
        (call(QKV | POSITIONS), "takes positions for indices"),
        (call(QKV | POSITIONS, mask=masks.SegmentIds()), None),  # which reads none
        (call(QKV | POSITIONS, mask=None), None),
    ],
)
def test_attention_in_blocks(asked, reason):
    got = blockwise_attention(
        asked, dtypes=("bfloat16", "float16"), without=("bias", "logit_scale")
    )
    assert got is reason is None or reason in got


def test_tiles_of_queries_are_not_for_decoding():
    assert many_queries(call(purpose="prefill")) is None
    assert "decoding has one" in many_queries(call(purpose="decode"))


def test_products_of_its_own_are_not_replaced():
    assert own_products(call()) is own_products(call(options={"dot_general": "plain"})) is None
    assert "cannot be replaced" in own_products(call(options={"dot_general": "replaced"}))
