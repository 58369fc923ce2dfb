"""The real TPU compiler, without a TPU, takes mixtures: ragged exchanges, experts in few bits."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_for_moe_tests import layer, sequence_info

from axcore import functional
from axcore.layers import Linear
from axcore.ops import DotGeneral
from axcore.parallel import MESH_AXES, ProgramTarget
from axcore.quantization import StoredDot

pytestmark = [pytest.mark.aot, pytest.mark.slow, pytest.mark.xdist_group("libtpu")]


@pytest.fixture
def target(monkeypatch):
    """Four chips, over which experts are split."""
    pytest.importorskip("libtpu", reason="needs libtpu: pip install 'axlearn-tpu[aot]'")
    from jax.experimental import topologies

    monkeypatch.setitem(os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
    shape = [4 if axis == "expert" else 1 for axis in MESH_AXES]
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    devices = np.array(topology.devices).reshape(shape)
    mesh = jax.sharding.Mesh(devices, MESH_AXES, axis_types=auto)
    return ProgramTarget("tpu-v5p-8", "tpu", mesh)


def arguments(target, dim, num_experts, seq, dot=None):
    """A layer, and what its state and input would be on the target."""
    bare = Linear.Config(bias=False, dot=dot or DotGeneral.Config())
    fields = dict(input_dim=dim, hidden_dim=dim, num_experts=num_experts)
    module = layer(**fields, up=bare, gate=bare, down=bare).instantiate(name="layer")
    specs = module.parameter_specs()
    state = jax.tree.map(
        lambda spec, place: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=place),
        specs,
        target.shardings(specs),
    )
    spec = target.spec((4, seq, dim), ("batch", "seq", None))
    place = jax.sharding.NamedSharding(target.mesh, spec)
    return module, state, jax.ShapeDtypeStruct((4, seq, dim), jnp.float32, sharding=place)


def test_a_ragged_exchange_compiles_for_tpu(target):
    module, state, x = arguments(target, 128, 8, seq=64)

    def loss(params, x):
        y, _ = functional(
            module,
            state=params,
            inputs=(x, sequence_info(4, 64)),
            is_training=True,
            target=target,
        )
        return jnp.sum(y**2)

    program = jax.jit(jax.grad(loss)).lower(state, x).compile()
    assert "ragged-all-to-all" in program.as_text()


STORED = {
    "int8": StoredDot.Config(dtype="int8"),
    "fp8": StoredDot.Config(dtype="float8_e4m3fn"),
    "int4": StoredDot.Config(dtype="int4", group=32),
    "int8_activations": StoredDot.Config(dtype="int8", activations="int8"),
}


@pytest.mark.parametrize("dot", STORED.values(), ids=STORED)
def test_stored_experts_compile_for_tpu_and_each_chip_keeps_less(target, dot):
    def kept(dot):
        module, state, x = arguments(target, 256, 16, seq=1, dot=dot)

        def decode(state, x):
            inputs = (x, sequence_info(4, 1))
            return functional(module, state=state, inputs=inputs, is_training=False, target=target)[
                0
            ]

        return jax.jit(decode).lower(state, x).compile().memory_analysis().argument_size_in_bytes

    # A quarter or an eighth of float32, the scales, and the router, which stays float32.
    assert kept(dot) < (0.17 if dot.dtype == "int4" else 0.27) * kept(None)
