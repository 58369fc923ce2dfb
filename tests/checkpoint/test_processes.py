"""Several processes save one checkpoint, skip a damaged one together; any number restores it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from axcore.checkpoint import OrbaxCheckpointer

BODY = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

rank, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
from axcore.checkpoint import OrbaxCheckpointer

mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
rows, columns, whole = (NamedSharding(mesh, s) for s in (P("a"), P(None, "a"), P()))
value = np.arange(32.0, dtype=np.float32).reshape(8, 4)

def state(step):
    make = lambda: {"w": jnp.asarray(value) + step, "step": jnp.int32(step)}
    return jax.jit(make, out_shardings={"w": rows, "step": whole})()

ckpt = OrbaxCheckpointer.Config(save_every_n_steps=1, keep_last_n=2).instantiate()
ckpt.open(directory)
assert ckpt.latest_good() is None
for step in (1, 2, 3):
    ckpt.save(step, state(step), {"position": step})
assert ckpt.latest_good() == 3
if rank == 0:
    path = next(p for p in ckpt._path(3).glob("arrays/w/*") if p.name != ".zarray")
    path.write_bytes(bytes(path.stat().st_size))
ckpt.close()

ckpt = OrbaxCheckpointer.Config(save_every_n_steps=1, keep_last_n=2).instantiate()
ckpt.open(directory)
step = ckpt.latest_good()
assert step == 2, step
shapes = {
    "w": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=columns),
    "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
}
arrays, extra = ckpt.restore(step, shapes)
assert extra == {"position": 2}
assert int(arrays["step"]) == 2
for shard in arrays["w"].addressable_shards:
    np.testing.assert_array_equal(np.asarray(shard.data), (value + 2)[shard.index])
ckpt.close()
print("done", rank)
"""


def test_two_processes_save_and_one_restores(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BODY, str(rank), str(port), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, err
            assert f"done {rank}" in out
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    ckpt = reader(tmp_path)
    assert ckpt.latest_good() == 2
    shapes = {
        "w": jax.ShapeDtypeStruct((8, 4), jnp.float32),
        "step": jax.ShapeDtypeStruct((), jnp.int32),
    }
    arrays, _ = ckpt.restore(2, shapes)
    np.testing.assert_array_equal(arrays["w"], np.arange(32.0).reshape(8, 4) + 2)
    ckpt.close()


def reader(directory: Path) -> OrbaxCheckpointer:
    ckpt = OrbaxCheckpointer.Config(save_every_n_steps=1).instantiate()
    ckpt.open(directory)
    return ckpt
