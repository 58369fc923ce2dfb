"""Two real processes share four simulated devices: each feeds its rows of the global batch."""

import json
import socket
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import jax, numpy as np
from axcore.parallel import (MeshShape, ShardingRules, batch_sharding, build_mesh,
    make_global_array, prepare_host, process_rows, resolve_instance, select_devices)

process, port = int(sys.argv[1]), sys.argv[2]
instance = resolve_instance("cpu-4")
prepare_host(instance, num_processes=2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
devices = select_devices(instance)
batch = np.arange(8 * 6).reshape(8, 6)
found = {}
for name, sizes in json.loads(sys.argv[3]).items():
    sharding = batch_sharding(build_mesh(MeshShape(**sizes), devices), ShardingRules())
    rows = process_rows(sharding, 8)
    array = make_global_array(batch[list(rows)], sharding, batch.shape)
    right = all((shard.data == batch[shard.index]).all() for shard in array.addressable_shards)
    found[name] = dict(rows=rows, right=bool(right), shards=len(array.addressable_shards))
print(json.dumps(dict(devices=len(devices), found=found)))
jax.distributed.shutdown()
"""
MESHES = {"data": dict(data=4), "fsdp-seq": dict(fsdp=2, seq=2), "seq": dict(seq=2, model=2)}


@pytest.fixture(scope="module")
def processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(i), port, json.dumps(MESHES)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [p.communicate(timeout=120) for p in started]
    finally:
        for p in started:
            p.kill()
    for p, (_, errors) in zip(started, outputs, strict=True):
        assert p.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


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
