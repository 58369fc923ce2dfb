"""What splash attention saves beside XLA's own attention, from compiling alone: no TPU is needed.

    python benchmarks/tpu_kernels.py [--instance tpu-v5e-8 tpu-v5p-8 ...]
        [--tokens 4096 32768 131072] [--attention xla pallas_splash tokamax]

Needs ``axlearn-tpu[aot]``, and ``tokamax`` (0.0.12 with Python 3.11) where it is asked for, which
this package does not register: ``docs/kernels.md`` says why.

One causal layer of attention, forward and backward, of one sequence on one device: 8 query heads of
128, as many key/value heads, bfloat16. Prints a table: temporary memory as the TPU compiler gives
it, floating-point operations, and seconds to compile.

Operations of XLA's attention are counted from the traced program, loops as often as they run. The
kernel's are those of the blocks that its mask does not hide: 4, 6 and 8 per pair of positions and
head dim in the forward kernel, that of the queries' gradient and that of the keys' and values'.
A compiler's own count would leave out the kernel and all but one turn of a loop.
"""

from __future__ import annotations

import argparse
import itertools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from axcore import Module, functional, ops
from axcore.parallel import ProgramTarget, resolve_instance
from axcore.parallel.aot import compiler_for
from axcore.parallel.cost import count_function
from axlearn_tpu.pallas_splash import visited_pairs

HEADS, HEAD_DIM = 8, 128
MACHINES = ("tpu-v5e-8", "tpu-v5p-8", "tpu-v6e-8", "tpu-7x-8")
COLUMNS = ("machine", "tokens", "attention", "temporaries MiB", "TFLOP", "compile s")


class Attend(Module):
    """One call of attention, so that the target is known."""

    class Config(Module.Config):
        implementation: str = "xla"

    def forward(self, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ops.attention(q, k, v, implementation=self.cfg.implementation)


def measure(instance: str, tokens: int, implementation: str) -> tuple[Any, ...]:
    """Compiles one case and returns a row of the table."""
    machine = resolve_instance(instance)
    compiler = compiler_for(machine)
    compiler.prepare()
    target = ProgramTarget.for_instance(machine, None)
    module = Attend.Config(implementation=implementation).instantiate(name="attend")

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, cotangent: jax.Array) -> jax.Array:
        inputs = (q, k, v)
        if implementation == "tokamax":
            out = _tokamax(*inputs)
        else:
            out, _ = functional(module, state={}, inputs=inputs, is_training=True, target=target)
        return jnp.sum((out * cotangent).astype(jnp.float32))

    step = jax.value_and_grad(loss, (0, 1, 2))
    device = compiler.devices(machine)[0]
    shape = (1, tokens, HEADS, HEAD_DIM)
    array = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device))
    start = time.perf_counter()
    try:
        with jax.default_device(device):  # where tokamax looks; it refuses a host's
            compiled = jax.jit(step).lower(*[array] * 4).compile()
    except jax.errors.JaxRuntimeError as error:
        reason = re.search(r"HLO temporaries \(([^)]*)\)", str(error))
        told = "does not fit" + (f": {reason[1]}" if reason else "")
        return machine.name, tokens, implementation, told, "", f"{time.perf_counter() - start:.1f}"
    seconds = time.perf_counter() - start
    if implementation == "pallas_splash":
        forward, queries, keys = visited_pairs(ops.Causal(), tokens, tokens, instance)
        flops = HEADS * HEAD_DIM * (4 * forward + 6 * queries + 8 * keys)
    elif implementation == "tokamax":
        flops = None  # in a kernel that is not ours to count
    else:
        flops = count_function(step, *[array] * 4).flops
    sizes = compiled.memory_analysis()
    memory = "?" if sizes is None else f"{sizes.temp_size_in_bytes / 2**20:,.0f}"
    counted = "" if flops is None else f"{flops / 1e12:.2f}"
    return machine.name, tokens, implementation, memory, counted, f"{seconds:.1f}"


def _tokamax(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention by tokamax's kernel for TPU: named, so that it is never XLA's by surprise."""
    import tokamax  # pyright: ignore[reportMissingImports]
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()  # tokamax would parse this script's command line

    return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation="mosaic")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--instance", nargs="+", default=list(MACHINES))
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--attention", nargs="+", default=["xla", "pallas_splash"])
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)  # a compiler without devices has none
    print("One device of each, compiled by its own compiler; nothing was run\n")
    print("| " + " | ".join(COLUMNS) + " |")
    print("|" + "---|" * len(COLUMNS))
    for case in itertools.product(args.instance, args.tokens, args.attention):
        print("| " + " | ".join(map(str, measure(*case))) + " |", flush=True)


if __name__ == "__main__":
    main()
