"""Files whose tensors' names lack a prefix that other files of the same family have."""

import numpy as np
import pytest

from axcore.checkpoint.convert import (
    FormerSuffix,
    Fused,
    Ignored,
    Matrix,
    OptionalPrefix,
    TensorInfo,
    TensorRule,
    Tied,
)
from axcore.checkpoint.convert._rules import applications, match_tensors
from axcore.errors import CheckpointError

RULES = [
    OptionalPrefix("model."),
    TensorRule("model.words", "embedding/weight"),
    TensorRule("model.{i}.ab", ("layer/{i}/a", "layer/{i}/b"), Fused(Matrix(), axis=1)),
    Tied("head", same_as="model.words"),
    Ignored("model.{i}.mask", "a constant"),
]
PARAMS = {"embedding/weight": (5, 4), "layer/0/a": (4, 3), "layer/0/b": (4, 3)}
SHAPES = {"model.words": (5, 4), "model.0.ab": (4, 6), "head": (5, 4), "model.0.mask": (1,)}


def infos(shapes):
    return {n: TensorInfo(n, s, "float32", 4 * int(np.prod(s)), "f") for n, s in shapes.items()}


def short(shapes):
    return {name.removeprefix("model."): shape for name, shape in shapes.items()}


def test_both_spellings_are_read():
    for shapes, prefix in ((SHAPES, "model."), (short(SHAPES), "")):
        found = match_tensors(RULES, PARAMS, infos(shapes))
        assert [item.foreign for item in found.applications] == [
            (f"{prefix}words",),
            (f"{prefix}0.ab",),
        ]
        assert found.tied == {"head": f"{prefix}words"}
        assert found.ignored == {f"{prefix}0.mask": "a constant"}


def test_the_prefix_is_written():
    assert [item.foreign for item in applications(RULES, PARAMS)] == [
        ("model.words",),
        ("model.0.ab",),
    ]


def test_a_file_that_mixes_them_is_refused():
    mixed = {**SHAPES, "0.ab": (4, 6)}
    del mixed["model.0.ab"]
    with pytest.raises(CheckpointError, match=r"0\.ab") as caught:
        match_tensors(RULES, PARAMS, infos(mixed))
    assert caught.value.code == "AX615"


def test_a_former_end_of_names_is_read_where_the_file_has_it_and_never_written():
    rules = [
        FormerSuffix("norm.weight", "norm.gamma"),
        TensorRule("{i}.norm.weight", "layer/{i}/norm/scale"),
        TensorRule("{i}.weight", "layer/{i}/weight"),
    ]
    params = {"layer/0/norm/scale": (4,), "layer/0/weight": (4, 3)}
    for name in ("0.norm.weight", "0.norm.gamma"):
        found = match_tensors(rules, params, infos({name: (4,), "0.weight": (4, 3)}))
        assert [item.foreign for item in found.applications] == [(name,), ("0.weight",)]
    written = [item.foreign for item in applications(rules, params)]
    assert written == [("0.norm.weight",), ("0.weight",)]
