"""Layouts: each against its definition, and every one there and back without loss."""

from __future__ import annotations

import dataclasses

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axcore.checkpoint.convert import (
    Flatten,
    Fused,
    Identity,
    Matrix,
    Offset,
    PairsToHalves,
    Settings,
    Stacked,
    TensorInfo,
    TensorRule,
    Tied,
    TorchLinear,
    Transpose,
)
from axcore.checkpoint.convert._rules import applications, match_tensors
from axcore.errors import CheckpointError

DIM, HEADS, KV, HEAD = 6, 4, 2, 8
QUERY, KEY = (DIM, HEADS, HEAD), (DIM, KV, HEAD)

# transform -> (shapes of ours, shapes of the foreign arrays)
CASES = {
    "identity": (Identity(), [(3, 4)], [(3, 4)]),
    "torch": (TorchLinear(), [QUERY], [(HEADS * HEAD, DIM)]),
    "torch-output": (TorchLinear(num_in=2), [(HEADS, HEAD, DIM)], [(DIM, HEADS * HEAD)]),
    "matrix": (Matrix(), [QUERY], [(DIM, HEADS * HEAD)]),
    "flatten": (Flatten(), [(HEADS, HEAD)], [(HEADS * HEAD,)]),
    "transpose": (Transpose((2, 0, 1)), [(4, 2, 3)], [(2, 3, 4)]),
    "pairs": (PairsToHalves(), [QUERY], [(HEADS * HEAD, DIM)]),
    "pairs-part": (PairsToHalves(num_dims=4), [QUERY], [(HEADS * HEAD, DIM)]),
    "pairs-bias": (PairsToHalves(Flatten()), [(HEADS, HEAD)], [(HEADS * HEAD,)]),
    "fused": (Fused(), [QUERY, KEY, KEY], [((HEADS + 2 * KV) * HEAD, DIM)]),
    "fused-groups": (Fused(groups=KV), [QUERY, KEY, KEY], [((HEADS + 2 * KV) * HEAD, DIM)]),
    "fused-columns": (Fused(Matrix(), axis=1), [QUERY, KEY], [(DIM, (HEADS + KV) * HEAD)]),
    "fused-bias": (Fused(Flatten()), [(HEADS, HEAD), (KV, HEAD)], [((HEADS + KV) * HEAD,)]),
    "stacked": (Stacked(), [(3, DIM, 5)], [(5, DIM)] * 3),
}


def filled(shapes):
    start = 0
    out = []
    for shape in shapes:
        size = int(np.prod(shape))
        out.append(np.arange(start, start + size, dtype=np.float32).reshape(shape))
        start += size
    return out


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_the_same(name):
    transform, ours, foreign = CASES[name]
    assert [tuple(s) for s in transform.foreign_shapes(ours)] == foreign
    arrays = filled(foreign)
    made = transform.to_ours(arrays, ours)
    assert [x.shape for x in made] == ours
    back = transform.to_foreign(made)
    assert all(np.array_equal(x, y) for x, y in zip(back, arrays, strict=True))


def test_a_torch_layer_multiplies_the_same():
    rng = np.random.default_rng(0)
    weight, x = rng.standard_normal((HEADS * HEAD, DIM)), rng.standard_normal((2, DIM))
    ours = TorchLinear().ours(weight, QUERY)
    want = (x @ weight.T).reshape(2, HEADS, HEAD)
    np.testing.assert_allclose(np.einsum("bd,dnh->bnh", x, ours), want)


def test_moving_axes_copies_nothing():
    weight = np.zeros((HEADS * HEAD, DIM))
    assert np.shares_memory(TorchLinear().ours(weight, QUERY), weight)
    output = np.zeros((DIM, HEADS * HEAD))
    assert np.shares_memory(TorchLinear(2).ours(output, (HEADS, HEAD, DIM)), output)


def test_pairs_side_by_side_become_halves_of_a_head():
    rows = np.array(["a0", "b0", "a1", "b1", "a2", "b2"])
    np.testing.assert_array_equal(
        PairsToHalves(Identity()).ours(rows, rows.shape), ["a0", "a1", "a2", "b0", "b1", "b2"]
    )


def test_groups_alternate_in_a_fused_array():
    ours = [np.array([0, 1, 2, 3]), np.array([10, 11]), np.array([20, 21])]
    (fused,) = Fused(Identity(), groups=2).to_foreign(ours)
    np.testing.assert_array_equal(fused, [0, 1, 10, 20, 2, 3, 11, 21])
    with pytest.raises(CheckpointError, match="do not divide into 3 groups"):
        Fused(Identity(), groups=3).to_foreign(ours)


@given(hnp.arrays(np.float32, (4,), elements=st.floats(0.5, 2, width=32)))
def test_an_offset_is_taken_off_again(scale):
    ours = Offset(1.0).ours(scale, (4,))
    np.testing.assert_array_equal(ours, np.float32(1) + scale)
    np.testing.assert_allclose(Offset(1.0).foreign(ours), scale, rtol=3e-7)


# -- rules ------------------------------------------------------------------------------------


def infos(**shapes) -> dict[str, TensorInfo]:
    return {n: TensorInfo(n, tuple(s), "float32", 0, "f") for n, s in shapes.items()}


def test_a_number_is_the_same_on_both_sides():
    rule = TensorRule("h{i}_{j}", "layer/{i}/sub/{j}/w")
    params = {f"layer/{i}/sub/{j}/w": (2,) for i in range(2) for j in (0, 10)}
    found = applications([rule], params)
    assert {item.paths[0]: item.foreign for item in found} == {
        f"layer/{i}/sub/{j}/w": (f"h{i}_{j}",) for i in range(2) for j in (0, 10)
    }


def test_a_number_of_the_foreign_name_alone_counts_our_first_dim():
    rule = TensorRule("h.{i}.experts.{j}.w", "layer/{i}/experts", Stacked(Identity()))
    (item,) = applications([rule], {"layer/4/experts": (3, 2)})
    assert item.foreign == tuple(f"h.4.experts.{j}.w" for j in range(3))


def test_rules_that_contradict_each_other_are_the_authors_fault():
    twice = [TensorRule("a", "w"), TensorRule("b", "w")]
    with pytest.raises(CheckpointError, match="taken by") as caught:
        applications(twice, {"w": (1,)})
    assert caught.value.code == "AX621"
    with pytest.raises(CheckpointError, match="key is no parameter"):
        applications([TensorRule("a", ("query", "key"), Fused())], {"query": (1,)})


def test_a_rule_for_parameters_that_the_model_has_not_does_nothing():
    rules = [TensorRule("a", "w"), TensorRule("b", "bias"), Tied("c", "b")]
    found = match_tensors(rules, {"w": (1,)}, infos(a=(1,)))
    assert [item.foreign for item in found.applications] == [("a",)]
    # ... and what would have held them is not dropped in silence.
    with pytest.raises(CheckpointError, match=r"nothing uses: b \[1\], c \[1\]"):
        match_tensors(rules, {"w": (1,)}, infos(a=(1,), b=(1,), c=(1,)))


def test_half_of_a_group_is_missing():
    rule = TensorRule(("a", "b"), ("x", "y"), Identity(), default=0.0)
    with pytest.raises(CheckpointError, match=r"x \[1\] \(from b\)"):
        match_tensors([rule], {"x": (1,), "y": (1,)}, infos(a=(1,)))


# -- settings ---------------------------------------------------------------------------------


def test_settings_know_what_was_read():
    settings = Settings({"a": 1, "b": {"c": 2, "d": 3}, "e": 4, "f": 5}, "config.json")
    assert settings.require("a", int) == 1 and settings["b"]["c"] == 2
    settings.skip("e")
    assert settings.unread() == ("f", "b.d")


def test_settings_refuse_what_is_not_implemented():
    settings = Settings({"act": "relu", "size": "8", "flag": True, "eps": 1}, "config.json")
    assert settings.require("eps", float) == 1.0
    for call, words in (
        (lambda: settings.expect("act", "silu", "gelu"), "'relu'; implemented: 'silu', 'gelu'"),
        (lambda: settings.require("size", int), "'size' is '8', expected int"),
        (lambda: settings.require("flag", int), "'flag' is True, expected int"),
        (lambda: settings.require("sizes", int), "'sizes' is missing"),
    ):
        with pytest.raises(CheckpointError, match=words) as caught:
            call()
        assert caught.value.code == "AX614" and caught.value.where == "config.json"


def test_transforms_are_values():
    assert Fused(groups=2) == Fused(groups=2) != Fused()
    assert all(dataclasses.is_dataclass(transform) for transform, _, _ in CASES.values())
