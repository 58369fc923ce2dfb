"""Two real processes share four simulated devices: each feeds its rows of the global batch."""

import json

import pytest

from axcore.testing import run_processes

PROGRAM = """
import json
import numpy as np
from axcore.parallel import (MeshShape, ShardingRules, batch_sharding, build_mesh,
    make_global_array, process_rows, resolve_instance, select_devices)

devices = select_devices(resolve_instance("cpu-4"))
batch = np.arange(8 * 6).reshape(8, 6)
found = {}
for name, sizes in json.loads(args[0]).items():
    sharding = batch_sharding(build_mesh(MeshShape(**sizes), devices), ShardingRules())
    rows = process_rows(sharding, 8)
    array = make_global_array(batch[list(rows)], sharding, batch.shape)
    right = all((shard.data == batch[shard.index]).all() for shard in array.addressable_shards)
    found[name] = dict(rows=rows, right=bool(right), shards=len(array.addressable_shards))
print(json.dumps(dict(devices=len(devices), found=found)))
"""
MESHES = {"data": dict(data=4), "fsdp-seq": dict(fsdp=2, seq=2), "seq": dict(seq=2, model=2)}


@pytest.fixture(scope="module")
def processes():
    return run_processes(PROGRAM, json.dumps(MESHES), num_processes=2, instance="cpu-4")


def test_both_see_all_devices(processes):
    assert [p["devices"] for p in processes] == [4, 4]


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        ("data", ([0, 1, 2, 3], [4, 5, 6, 7])),
        ("fsdp-seq", ([0, 1, 2, 3], [4, 5, 6, 7])),
        ("seq", (list(range(8)), list(range(8)))),
    ],
)
def test_each_feeds_the_rows_of_its_devices(processes, mesh, rows):
    for process, expected in zip(processes, rows, strict=True):
        assert process["found"][mesh] == {"rows": expected, "right": True, "shards": 2}
