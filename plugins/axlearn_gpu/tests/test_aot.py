"""Compiling for GPUs that are not there: what the program moves, and what runs meanwhile.

The schedule is read from the program's text: its computations are in the order in which they run,
and a collective is two instructions, ``...-start`` and ``...-done``. What `axcore aot` says of
models of full size: ``benchmarks/aot_cases.py``.
"""

import json
import math
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from axcore import experiments
from axcore.parallel import MeshShapeModifier, SequenceParallelModifier, resolve_instance
from axcore.parallel.aot import compiler_for
from axcore.train import assemble
from axcore.train._program import Program
from axlearn_gpu._gpus import MACHINES

pytestmark = [
    pytest.mark.aot,
    pytest.mark.slow,
    pytest.mark.xdist_group("gpu-aot"),
    pytest.mark.usefixtures("cuda_compiler"),
]

INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<result>.*?) (?P<op>[\w\-]+)\(")
ARRAY = re.compile(r"\b[a-z]+\d+\[([\d,]*)\]")
KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
# The smallest matrix of tiny-lm: what has as many elements may be a gradient of weights.
MATRIX = 64 * 64


def compiled(name, *modifiers):
    """Returns the text of tiny-lm's training step, two layers in a loop, for GPUs."""
    rules = (("gpu-*", modifiers),) if modifiers else ()
    # Plain products: what moves is looked at, and the rule's FP8 would hide the products' names.
    plain = ("quantize:recipe=none",)
    assembled = assemble(experiments.get("tiny-lm"), instance=name, rules=rules, modifiers=plain)
    compiler = compiler_for(assembled.instance)
    compiler.prepare()
    trainer = assembled.cfg.instantiate(name="trainer")
    rows = trainer.cfg.input.instantiate().example()
    program = Program(trainer, assembled.instance, compiler.devices(assembled.instance))
    assert program.target.platform == "gpu"
    lowered = program.lower_train(program.wanted_state(), program.wanted_batch(rows))
    options = {**compiler.compile_options(assembled.instance), **program.compiler_options}
    return lowered.compile(options).call.as_text()


def computations(text):
    """Returns computation -> [(name, opcode, elements of the result's arrays, line)] in order."""
    found, current = {}, []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            found[line.split(" ")[0]] = current = []
        elif match := INSTRUCTION.match(line):
            sizes = [
                math.prod(map(int, filter(None, d.split(","))))
                for d in ARRAY.findall(match["result"])
            ]
            current.append((match["name"], match["op"], sizes, line))
    return found


def collectives(text):
    """Yields (kind, largest array, whether in a loop, what runs between start and done)."""
    bodies = set(re.findall(r"body=(%[\w.\-]+)", text))
    for computation, instructions in computations(text).items():
        for i, (name, op, sizes, _) in enumerate(instructions):
            assert op not in KINDS, f"{name} is not asynchronous"
            kind = op.removesuffix("-start")
            if op == f"{kind}-start" and kind in KINDS:
                rest = instructions[i + 1 :]
                done = next(
                    j
                    for j, (_, other, _, line) in enumerate(rest)
                    if other == f"{kind}-done" and f"(%{name})" in line
                )
                yield kind, max(sizes), computation in bodies, rest[:done]


def work(instructions):
    """Returns what computes: "product" for cuBLAS's, "fusion" for generated kernels."""
    names = {"fusion": "fusion", "custom-call": "product"}
    return [names[op] for _, op, _, line in instructions
            if op == "fusion" or (op == "custom-call" and "__cublas" in line)]  # fmt: skip


def test_full_sharding_gathers_while_it_computes_and_scatters_gradients():
    """Eight GPUs with parameters sharded: ZeRO-3 as XLA schedules it."""
    found = list(collectives(compiled("gpu-h100-8")))
    gathers = [work(between) for kind, size, loop, between in found
               if kind == "all-gather" and loop and size >= MATRIX]  # fmt: skip
    # One loop forward and one backward, each gathering a layer for the next iteration.
    assert len(gathers) == 2
    assert all(len(done) >= 5 for done in gathers)
    assert any("product" in done for done in gathers)
    scatters = [work(between) for kind, size, loop, between in found
                if kind == "reduce-scatter" and loop and size >= MATRIX]  # fmt: skip
    assert len(scatters) == 1 and scatters[0]
    # No gradient of weights is summed whole on every GPU.
    assert max(size for kind, size, _, _ in found if kind == "all-reduce") < MATRIX


def test_tensor_parallel_sums_whole_and_sequence_parallel_scatters():
    """Two rows of devices with tensors split over four each; activations are (8, 64, 64)."""
    activation = 8 * 64 * 64
    mesh = MeshShapeModifier.Config(mesh_shape={"fsdp": 2, "model": 4})

    def kinds(text):
        return {kind for kind, size, loop, _ in collectives(text) if loop and size == activation}

    assert kinds(compiled("gpu-h100-8", mesh)) == {"all-reduce"}
    assert kinds(compiled("gpu-h100-8", mesh, SequenceParallelModifier.Config())) == {
        "all-gather",
        "reduce-scatter",
    }


@pytest.mark.parametrize("gpu", sorted({machine.gpu for machine in MACHINES.values()}))
def test_code_of_every_gpu_is_generated(gpu):
    """From PTX to machine code, by the compiler of each architecture; and its name is its own."""
    instance = resolve_instance(f"gpu-{gpu}-8")
    compiler = compiler_for(instance)
    compiler.prepare()
    devices = compiler.devices(instance)
    assert {d.platform for d in devices} == {"gpu"}
    assert {d.device_kind for d in devices} == {instance.device_kind}
    mesh = Mesh(np.array(devices), ("x",))
    x = jax.ShapeDtypeStruct(
        (256, 128), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("x"))
    )
    lowered = jax.jit(lambda x: jnp.tanh(x) @ x.T).lower(x)
    program = lowered.compile(compiler_options=dict(compiler.compile_options(instance)))
    assert program.memory_analysis().argument_size_in_bytes == 256 * 128 * 2 // 8
    assert "all-gather-start" in program.as_text()


@pytest.mark.parametrize(
    ("experiment", "instance"),
    [("fuji-7B-v2", "gpu-p5.48xlarge-256"), ("fuji-70B-v2", "gpu-h100-512")],
)
def test_models_of_full_size_compile_and_fit(tmp_path, experiment, instance):
    """The published rule on hundreds of GPUs, by the command: about 20 CPU-seconds each."""
    pytest.importorskip("axlearn_models", reason="the catalog is not installed: axlearn-models")
    result = subprocess.run(
        [sys.executable, "-m", "axcore", "aot", experiment, "--instance", instance, "--json"],
        env={**os.environ, "AXCORE_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["fits"] and report["devices"] == int(instance.rpartition("-")[2])
    assert report["mesh"]["model"] == 8
    assert report["hbm_bytes"]["total"] < report["hbm_limit_bytes"] < 80 * 2**30
