"""Checkpoints written array by array, and arrays read one layer at a time."""

from __future__ import annotations

import hashlib

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axcore.checkpoint import OrbaxCheckpointer
from axcore.checkpoint._stream import CheckpointWriter
from axcore.errors import CheckpointError

VALUES = {
    "model/a": np.arange(84, dtype=np.float32).reshape(7, 12),
    "model/layer/0/b": np.arange(10, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(2, 5),
    "model/layer/1/b": np.ones((2, 5), ml_dtypes.bfloat16),
    "model/scalar": np.float32(3.5).reshape(()),
    "model/empty": np.zeros((0, 4), np.float32),
    "model/count": np.arange(3),
}
TREE = {
    "model": {
        "a": VALUES["model/a"],
        "layer": {str(i): {"b": VALUES[f"model/layer/{i}/b"]} for i in range(2)},
        "scalar": VALUES["model/scalar"],
        "empty": VALUES["model/empty"],
        "count": VALUES["model/count"],
    }
}


def structs(values):
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in values.items()}


@pytest.fixture
def opened(tmp_path):
    checkpointer = OrbaxCheckpointer.Config(save_every_n_steps=1, keep_last_n=9).instantiate()
    checkpointer.open(tmp_path)
    yield checkpointer
    checkpointer.close()


@pytest.fixture(params=[1 << 26, 100], ids=["one-chunk", "chunks-of-two-rows"])
def written(request, tmp_path, monkeypatch):
    monkeypatch.setattr("axcore.checkpoint._stream._CHUNK_BYTES", request.param)
    writer = CheckpointWriter(tmp_path, 4, structs(VALUES), {"note": "x"})
    hashes = {path: writer.write(path, value) for path, value in VALUES.items()}
    writer.commit()
    return hashes


def test_what_was_written_comes_back(written, opened):
    assert opened.latest_good() == 4
    got, extra = opened.restore(4, TREE)
    assert extra == {"note": "x"}
    for have, want in zip(jax.tree.leaves(got), jax.tree.leaves(TREE), strict=True):
        assert have.dtype == want.dtype and np.array_equal(have, want)
    assert written == {p: hashlib.sha256(x.tobytes()).hexdigest() for p, x in VALUES.items()}


def test_it_restores_sharded_and_stacked(written, opened):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    sharded = NamedSharding(mesh, P(None, "y"))
    whole = NamedSharding(mesh, P())
    want = {
        "a": jax.ShapeDtypeStruct((7, 12), np.float32, sharding=sharded),
        "layer": {"0:2:1": {"b": jax.ShapeDtypeStruct((2, 2, 5), "bfloat16", sharding=whole)}},
    }
    got, _ = opened.restore(4, {"model": want}, allow_unexpected=True)
    assert got["model"]["a"].sharding.is_equivalent_to(sharded, 2)
    np.testing.assert_array_equal(got["model"]["a"], VALUES["model/a"])
    stacked = np.stack([VALUES[f"model/layer/{i}/b"] for i in range(2)])
    np.testing.assert_array_equal(got["model"]["layer"]["0:2:1"]["b"], stacked)


def test_one_array_or_one_row_of_it_is_read_alone(written, opened):
    for path, value in VALUES.items():
        np.testing.assert_array_equal(opened.read(4, path), value)
    for row in range(7):
        np.testing.assert_array_equal(opened.read(4, "model/a", (row,)), VALUES["model/a"][row])
    np.testing.assert_array_equal(opened.read(4, "model/a", (5, 3)), VALUES["model/a"][5, 3])


def test_one_layer_of_what_a_mesh_has_saved(opened):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    value = np.arange(3 * 4 * 8, dtype=np.float32).reshape(3, 4, 8)
    array = jax.device_put(value, NamedSharding(mesh, P(None, "x", "y")))
    opened.save(1, {"model": {"w": array}}, {})
    opened.wait()
    for layer in range(3):
        np.testing.assert_array_equal(opened.read(1, "model/w", (layer,)), value[layer])


def test_a_missing_chunk_is_named(written, opened, tmp_path):
    (tmp_path / "4/arrays/model.count/0").unlink()
    with pytest.raises(CheckpointError, match="count"):
        opened.read(4, "model/count")


def test_a_step_counts_only_when_all_is_written(tmp_path, opened):
    writer = CheckpointWriter(tmp_path, 1, structs(VALUES))
    writer.write("model/a", VALUES["model/a"])
    assert opened.latest_good() is None
    with pytest.raises(CheckpointError, match="5 arrays were not written: model/count"):
        writer.commit()


@pytest.mark.parametrize(
    ("path", "shape"), [("model/other", (7, 12)), ("model/a", (12, 7))], ids=["name", "shape"]
)
def test_only_what_was_announced_can_be_written(tmp_path, path, shape):
    writer = CheckpointWriter(tmp_path, 1, structs(VALUES))
    with pytest.raises(CheckpointError, match="is not an array of this checkpoint"):
        writer.write(path, np.zeros(shape, np.float32))
