import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axcore.errors import ShardingError
from axcore.parallel import (
    MeshShape,
    ShardingRules,
    batch_sharding,
    build_mesh,
    make_global_array,
    process_rows,
)


class _Process:
    """A sharding that pretends each pair of devices is a process of its own."""

    class Device:
        def __init__(self, device):
            self.process_index = device.id // 2

    def __init__(self, sharding):
        self._sharding = sharding

    def devices_indices_map(self, shape):
        return {self.Device(d): i for d, i in self._sharding.devices_indices_map(shape).items()}

    def shard_shape(self, shape):
        return self._sharding.shard_shape(shape)


def _sharding(**sizes):
    mesh = build_mesh(MeshShape(**sizes), jax.devices())
    return batch_sharding(mesh, ShardingRules())


def _rows_by_process(sizes, batch_size):
    sharding = _sharding(**sizes)
    rows_only = NamedSharding(sharding.mesh, P(sharding.spec[0]))
    return [
        process_rows(_Process(rows_only), batch_size, process_index=p)  # pyright: ignore
        for p in range(4)
    ]


def test_one_process_owns_every_row():
    assert process_rows(_sharding(data=4, seq=2), 8) == tuple(range(8))


def test_rows_are_dealt_in_order_of_devices():
    assert _rows_by_process(dict(data=2, fsdp=4), 16) == [
        tuple(range(0, 4)),
        tuple(range(4, 8)),
        tuple(range(8, 12)),
        tuple(range(12, 16)),
    ]


def test_rows_that_several_processes_need_belong_to_each():
    assert _rows_by_process(dict(data=2, model=4), 4) == [(0, 1), (0, 1), (2, 3), (2, 3)]


def test_every_row_has_an_owner():
    for sizes in (dict(data=8), dict(fsdp=2, seq=4), dict(expert=4, model=2)):
        owned = {row for rows in _rows_by_process(sizes, 8) for row in rows}
        assert owned == set(range(8))


def test_a_global_array_holds_each_row_where_it_belongs():
    sharding = _sharding(data=2, fsdp=2, seq=2)
    batch = np.arange(8 * 6, dtype=np.int32).reshape(8, 6)
    array = make_global_array(batch, sharding, batch.shape)
    np.testing.assert_array_equal(array, batch)
    assert array.sharding == sharding and array.dtype == np.int32
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, batch[shard.index])


def test_other_rows_than_the_process_owns_are_refused():
    sharding = _sharding(data=2, seq=4)
    with pytest.raises(ShardingError, match=r"got rows of shape \(3, 8\), expected \(4, 8\)"):
        make_global_array(np.zeros((3, 8)), sharding, (4, 8))


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(ShardingError, match="batch: a batch of shape"):
        process_rows(_sharding(data=8), 6)
    with pytest.raises(ShardingError, match="make seq_len 2 or 4"):
        make_global_array(np.zeros((8, 3)), _sharding(data=4, seq=2), (8, 3))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((16, 20), ("dim 1 of size 20", "8 parts (seq=8)", "make seq_len 16 or 24")),
        ((3, 16), ("dim 0 of size 3", "2 parts", "make batch_size 2 or 4")),
    ],
)
def test_a_batch_that_does_not_divide_names_the_dim_and_sizes_that_do(shape, words):
    sharding = _sharding(seq=8) if shape[1] == 20 else _sharding(data=2, seq=4)
    with pytest.raises(ShardingError) as caught:
        make_global_array(np.zeros(shape), sharding, shape)
    said = f"{caught.value.message} {caught.value.hint}"
    assert [word for word in words if word not in said] == [], said
