"""Which compiler serves a machine, and that a program is built for one machine only."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from axcore.context import functional
from axcore.errors import AotError
from axcore.layers import RMSNorm
from axcore.parallel import (
    MeshShape,
    ProgramTarget,
    build_mesh,
    lower_step,
    resolve_instance,
)
from axcore.parallel.aot import compile_for, compiler_for
from axcore.plugins import Instance, host


def _lowered(module, instance):
    """Lowers a norm for all devices of an instance; its rows are split."""
    compiler = compiler_for(instance)
    compiler.prepare()
    mesh = build_mesh(MeshShape(fsdp=-1), compiler.devices(instance))
    target = ProgramTarget.for_instance(instance, mesh)
    rows = jax.sharding.NamedSharding(mesh, P("fsdp"))
    x = jax.ShapeDtypeStruct((16, 4, 128), jnp.float32, sharding=rows)
    scale = jax.ShapeDtypeStruct((128,), jnp.float32)

    def step(scale, x):
        return functional(
            module, state={"scale": scale}, inputs=(x,), is_training=True, target=target
        )[0]

    return lower_step(step, scale, x, in_shardings=(jax.NamedSharding(mesh, P()), rows))


@pytest.fixture(scope="module")
def norm():
    return RMSNorm.Config(input_dim=128).instantiate(name="norm")


def test_a_program_is_lowered_anew_for_each_machine(norm):
    texts = [_lowered(norm, resolve_instance(n)).lowered.as_text() for n in ("cpu-8", "cpu-2")]
    again = _lowered(norm, resolve_instance("cpu-8")).lowered.as_text()
    assert texts[0] == again
    assert "num_partitions = 8" in texts[0] and "num_partitions = 2" in texts[1]


def test_an_unknown_platform_names_the_hook_that_provides_a_compiler():
    elsewhere = Instance(
        name="a-1", family="a", platform="a", num_hosts=1, devices_per_host=1, hbm_bytes=1
    )
    with pytest.raises(AotError, match=r"no compiler for platform 'a'; known: .*cpu") as error:
        compiler_for(elsewhere)
    assert error.value.code == "AX482"
    assert "axcore_compilers" in error.value.hint


def test_the_compiler_of_the_cpu_gives_each_simulated_device_its_share():
    compiler = compiler_for(resolve_instance("cpu-8"))
    whole = compiler.memory_limit_bytes(resolve_instance("cpu"))
    assert compiler.memory_limit_bytes(resolve_instance("cpu-8")) == whole // 8
    assert compiler.out_of_memory(RuntimeError("RESOURCE_EXHAUSTED")) is None


@pytest.mark.aot
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None or "tpu" not in host().compilers,
    reason="needs libtpu and the plugin of its platform",
)
def test_one_process_compiles_for_cpu_then_a_machine_that_is_not_here_then_cpu(norm):
    cpu, away = resolve_instance("cpu-8"), resolve_instance("tpu-v5e-8")
    before = _lowered(norm, cpu)
    there = _lowered(norm, away)
    after = _lowered(norm, cpu)
    assert before.lowered.as_text() == after.lowered.as_text()
    result = compile_for(away, compiler_for(away), there, {"fsdp": 8}, {})
    # Its memory is laid out in tiles of its own; nothing moves between devices.
    assert result.memory is not None and result.memory.code > 0
    assert result.collectives == ()
    mean = after.compile()(jnp.ones(128), jnp.full((16, 4, 128), 3.0)).mean()
    np.testing.assert_allclose(mean, 1.0, rtol=1e-5)  # epsilon in the root
