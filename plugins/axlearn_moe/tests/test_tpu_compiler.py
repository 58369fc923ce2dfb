"""The real TPU compiler, without a TPU, takes the exchange of tokens in its ragged form."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_moe_tests import layer, sequence_info

from axcore import functional
from axcore.layers import Linear
from axcore.parallel import MESH_AXES, ProgramTarget


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.xdist_group("libtpu")
def test_a_ragged_exchange_compiles_for_tpu(monkeypatch):
    pytest.importorskip("libtpu", reason="needs libtpu: pip install 'axlearn-tpu[aot]'")
    from jax.experimental import topologies

    monkeypatch.setitem(os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
    shape = [4 if axis == "expert" else 1 for axis in MESH_AXES]
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    devices = np.array(topology.devices).reshape(shape)
    mesh = jax.sharding.Mesh(devices, MESH_AXES, axis_types=auto)
    target = ProgramTarget("tpu-v5p-8", "tpu", mesh)

    bare = Linear.Config(bias=False)
    cfg = layer(input_dim=128, hidden_dim=128, num_experts=8, up=bare, gate=bare, down=bare)
    module = cfg.instantiate(name="layer")
    specs = module.parameter_specs()
    params = jax.tree.map(
        lambda spec, place: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=place),
        specs,
        target.shardings(specs),
    )
    place = jax.sharding.NamedSharding(mesh, target.spec((4, 64, 128), ("batch", "seq", None)))
    x = jax.ShapeDtypeStruct((4, 64, 128), jnp.float32, sharding=place)

    def loss(params, x):
        y, _ = functional(
            module,
            state=params,
            inputs=(x, sequence_info(4, 64)),
            is_training=True,
            target=target,
        )
        return jnp.sum(y**2)

    program = jax.jit(jax.grad(loss)).lower(params, x).compile()
    assert "ragged-all-to-all" in program.as_text()
