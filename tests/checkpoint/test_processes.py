"""Several processes save one checkpoint, skip a damaged one together; any number restores it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from axcore.checkpoint import OrbaxCheckpointer
from axcore.testing import run_processes

BODY = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from axcore.checkpoint import OrbaxCheckpointer

mesh = jax.make_mesh((4,), ("a",), axis_types=(AxisType.Auto,))
rows, columns, whole = (NamedSharding(mesh, s) for s in (P("a"), P(None, "a"), P()))
value = np.arange(32.0, dtype=np.float32).reshape(8, 4)

def state(step):
    make = lambda: {"w": jnp.asarray(value) + step, "step": jnp.int32(step)}
    return jax.jit(make, out_shardings={"w": rows, "step": whole})()

ckpt = OrbaxCheckpointer.Config(save_every_n_steps=1, keep_last_n=2).instantiate()
ckpt.open(args[0])
assert ckpt.latest_good() is None
for step in (1, 2, 3):
    ckpt.save(step, state(step), {"position": step})
assert ckpt.latest_good() == 3
if process == 0:
    path = next(p for p in ckpt._path(3).glob("arrays/w/*") if p.name != ".zarray")
    path.write_bytes(bytes(path.stat().st_size))
ckpt.close()

ckpt = OrbaxCheckpointer.Config(save_every_n_steps=1, keep_last_n=2).instantiate()
ckpt.open(args[0])
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
print(step)
"""


def test_two_processes_save_and_one_restores(tmp_path):
    assert run_processes(BODY, str(tmp_path), num_processes=2, instance="cpu-4") == [2, 2]
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
