"""Compiling for TPUs that are not there, with libtpu: a training step, two slices, refusals.

What `axcore aot` says of models of full size is measured by ``benchmarks/aot_cases.py``.
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axcore import experiments
from axcore.parallel import resolve_instance
from axcore.parallel.aot import compiler_for
from axcore.train import aot, assemble
from axcore.train._program import Program

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.xdist_group("libtpu"),
    pytest.mark.usefixtures("libtpu"),
]


def lowered(name, fn, *shapes):
    """Returns a function of arrays split over all devices, and the compiler that may build it."""
    instance = resolve_instance(name)
    compiler = compiler_for(instance)
    compiler.prepare()
    mesh = Mesh(np.array(compiler.devices(instance)), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=split) for s in shapes]
    return jax.jit(fn).lower(*args), compiler, instance


def test_a_training_step_compiles_and_says_what_it_needs():
    report = aot(assemble(experiments.get("tiny-lm"), instance="tpu-v5e-8"))
    assert (report.fits, report.devices, report.mesh["fsdp"]) == (True, 8, 8)
    memory = report.hbm_bytes
    # float32 parameters and two moments of 0.12M parameters, an eighth on each chip.
    assert 8 * memory["parameters"] == pytest.approx(4 * 120e3, rel=0.1)
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=0.01)
    assert memory["code"] > 0 and memory["temporaries"] > 0
    assert memory["total"] < report.hbm_limit_bytes == int(15.75 * 2**30)
    assert report.collectives and report.compiler["name"] == "libtpu"


def test_one_process_lowers_for_cpu_for_tpu_and_for_cpu_again():
    """JAX keeps traces by function: what another target left behind must not come back."""

    def text(name):
        assembled = assemble(experiments.get("tiny-lm"), instance=name)
        trainer = assembled.cfg.instantiate(name="trainer")
        rows = trainer.cfg.input.instantiate().example()
        compiler = compiler_for(assembled.instance)
        compiler.prepare()
        program = Program(trainer, assembled.instance, compiler.devices(assembled.instance))
        step = program.lower_train(program.wanted_state(), program.wanted_batch(rows))
        return step.lowered.as_text()

    first, tpu, again = text("cpu"), text("tpu-v5e-8"), text("cpu")
    assert first == again
    assert '"fsdp"=8' in tpu and '"fsdp"=8' not in first


def test_two_slices_are_one_machine():
    """A sum over both: the slices' devices are in one program, which knows who is where."""
    program, _, instance = lowered("tpu-v5e-4-2", lambda x: jnp.sum(x), (8, 128))
    devices = program.compile().input_shardings[0][0].mesh.devices
    assert devices.size == instance.num_devices == 8
    assert [d.slice_index for d in devices.flat] == [0] * 4 + [1] * 4


# 7x takes ten seconds to refuse; the limit of the others is read from their refusals too.
@pytest.mark.parametrize("name", ["tpu-v4-8", "tpu-v5e-4", "tpu-v5p-8", "tpu-v6e-4"])
def test_its_refusals_are_read_and_state_the_limit(name):
    rows = resolve_instance(name).num_devices << 20
    program, compiler, instance = lowered(name, lambda x: jnp.sort(x, axis=1), (rows, 16384))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        program.compile()
    refused = compiler.out_of_memory(caught.value)
    # 64 GiB of argument and of result on each device, and as much again between them.
    assert refused.needed_bytes >= 128 * 2**30
    assert refused.available_bytes == pytest.approx(
        compiler.memory_limit_bytes(instance), abs=0.01 * 2**30
    )


def axcore_aot(arguments, cache, *, exit_code):
    """Returns the report that the command prints."""
    pytest.importorskip("axlearn_models", reason="the catalog is not installed: axlearn-models")
    result = subprocess.run(
        [sys.executable, "-m", "axcore", "aot", *arguments.split(), "--no-advice", "--json"],
        env={**os.environ, "AXCORE_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert result.returncode == exit_code, result.stderr
    return json.loads(result.stdout)


def test_a_step_that_does_not_fit_ends_with_exit_code_3(tmp_path):
    """Seventy billion parameters on sixteen chips of 16 GiB, by the command."""
    command = "fuji-70B-v2 --instance tpu-v5e-16 --set batch_size=16"
    report = axcore_aot(command, tmp_path, exit_code=3)
    assert report["fits"] is False
    # Parameters, gradients and two moments in float32 alone are 16 bytes a parameter.
    assert report["hbm_bytes"]["total"] > 16 * 69e9 / 16 > report["hbm_limit_bytes"]


@pytest.mark.timeout(1200)  # 200 CPU-seconds, on cores that others may use too
def test_a_model_of_full_size_compiles_and_fits(tmp_path):
    """Seven billion parameters on 256 chips, by the command."""
    report = axcore_aot("fuji-7B-v2 --instance tpu-v5p-512", tmp_path, exit_code=0)
    assert (report["devices"], report["mesh"]["fsdp"]) == (256, 256)
    # float32, a 256th on each chip; rows of four sequences keep 20 GiB of activations.
    assert 256 * report["hbm_bytes"]["parameters"] == pytest.approx(4 * 6.74e9, rel=0.02)
    assert 20 < report["hbm_bytes"]["total"] / 2**30 < 40
