"""What a mixture-of-experts layer costs: dispatches beside bare JAX, and more and more experts.

    python benchmarks/moe.py                        # both tables, a few minutes on two cores
    python benchmarks/moe.py --only experts --rounds 15
    python benchmarks/moe.py --instance gpu-h100-8 --json     # larger shapes, bfloat16

`layer`: forward and backward of one gated layer with its router, its two losses and summaries:
axcore's `GroupedDispatch` and `EinsumDispatch`, and layers in plain JAX that compute the same with
the same weights: `ragged` sorts tokens and calls `jax.lax.ragged_dot`; `blocks` sorts them into
blocks of one expert each and multiplies these as one batch of matrices, which is the fastest plain
form that we found where XLA computes `ragged_dot` with every expert (CPU). All give the same loss.

`experts`: the grouped layer with 8 to 128 experts at equal active work (tokens, top_k, widths), for
few and for more tokens a step. `step` adds a plain gradient step in place, which reads and writes
every weight once.

Times on a shared machine are noisy: forms run one after another within a round, the order rotates,
and a ratio is the median over the rounds of that of one round. `cpu` is the ratio of the process's
CPU seconds (all threads), each the least of all rounds: other programs disturb it less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore import functional
from axcore.collection import total_loss
from axcore.context import Target
from axcore.layers import Linear, SequenceInfo
from axcore.parallel import ProgramTarget, resolve_instance
from axlearn_moe import EinsumDispatch, GroupedDispatch, MoE

Params = Any
Loss = Callable[[Params, jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the layer and its input."""

    batch: int
    seq: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    dtype: str

    def flops(self) -> float:
        """Of the experts' products, forward and backward."""
        return 3 * 2 * self.batch * self.seq * self.top_k * 3 * self.dim * self.hidden


# Short rows, since the one-hot tensors of `einsum` grow with the square of their length.
LAYER = {
    "cpu": Shape(4, 512, 256, 512, 8, 2, "float32"),
    "other": Shape(32, 512, 2048, 1408, 64, 8, "bfloat16"),
}
# With 128 experts one has 128 and 512 rows on CPU, 512 and 2,048 elsewhere; the published run of
# Qwen3-30B-A3B has 2,048 (16 million tokens on 512 chips, 8 of 128 experts each).
EXPERTS = {
    "cpu": tuple(Shape(batch, 512, 128, 256, 8, 2, "float32") for batch in (16, 64)),
    "other": tuple(Shape(batch, 4096, 2048, 768, 8, 8, "bfloat16") for batch in (2, 8)),
}
GROWTH = (8, 32, 128)


# -- axcore --------------------------------------------------------------------------------


def layer_loss(shape: Shape, dispatch: Any, target: Target) -> tuple[Loss, Callable[[], Params]]:
    """Returns (loss, init) of the layer."""
    cfg = MoE.Config(
        input_dim=shape.dim,
        hidden_dim=shape.hidden,
        num_experts=shape.experts,
        top_k=shape.top_k,
        activation="silu",
        up=Linear.Config(bias=False),
        gate=Linear.Config(bias=False),
        down=Linear.Config(bias=False),
        dispatch=dispatch,
        compute_dtype=shape.dtype,
    )
    module = cfg.instantiate(name="moe")
    positions = jnp.broadcast_to(jnp.arange(shape.seq), (shape.batch, shape.seq))

    def loss(params: Params, x: jax.Array) -> Any:
        info = SequenceInfo(positions)
        y, collection = functional(
            module, state=params, inputs=(x, info), is_training=True, target=target
        )
        summaries = {name: entry.result() for name, entry in collection.summaries.items()}
        return _of_output(y) + total_loss(collection), summaries

    return loss, lambda: module.initialize(jax.random.key(0))


def _of_output(y: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


# -- bare JAX ------------------------------------------------------------------------------


def bare_loss(shape: Shape, product: Callable[..., jax.Array]) -> Loss:
    """Returns the loss of the same layer in plain JAX, with the same parameters."""
    k, num = shape.top_k, shape.experts

    def loss(params: Params, x: jax.Array) -> Any:
        x = x.reshape(-1, shape.dim)
        logits = jnp.matmul(
            x.astype(jnp.float32), params["router"]["weight"], precision=jax.lax.Precision.HIGHEST
        )
        probs = jax.nn.softmax(logits)
        gates, experts = jax.lax.top_k(probs, k)
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        flat = experts.reshape(-1)
        sizes = jnp.bincount(flat, length=num)
        order = jnp.argsort(flat, stable=True)
        weights = [
            params["experts"][n]["weight"].astype(shape.dtype) for n in ("up", "gate", "down")
        ]
        made = product(x.astype(shape.dtype)[order // k], *weights, sizes, flat[order])
        back = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
        by_token = made[back].reshape(-1, k, shape.dim)
        y = jnp.einsum("tkd,tk->td", by_token, gates, preferred_element_type=jnp.float32)
        balance = num * jnp.sum(sizes / flat.size * jnp.mean(probs, axis=0))
        z = jnp.mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)))
        return _of_output(y.astype(shape.dtype)) + 0.01 * balance + 0.001 * z, sizes

    return loss


def ragged(rows: Any, up: Any, gate: Any, down: Any, sizes: Any, expert: Any) -> jax.Array:
    """The experts by three ragged products."""
    del expert

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(a, b, sizes.astype(jnp.int32))

    return dot(jax.nn.silu(dot(rows, gate)) * dot(rows, up), down)


def blocks(rows: Any, up: Any, gate: Any, down: Any, sizes: Any, expert: Any) -> jax.Array:
    """The experts by batched products of blocks of up to 128 rows of one expert each."""
    block = min(128, rows.shape[0] // sizes.size)
    counts = -(-sizes // block)
    firsts = jnp.cumsum(counts) - counts
    number = rows.shape[0] // block + sizes.size
    of_block = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(number), side="right")
    within = jnp.arange(rows.shape[0]) - (jnp.cumsum(sizes) - sizes)[expert]
    place = firsts[expert] * block + within
    padded = jnp.zeros((number * block, rows.shape[1]), rows.dtype)
    padded = padded.at[place].set(rows, unique_indices=True).reshape(number, block, -1)
    up, gate, down = (w[jnp.minimum(of_block, sizes.size - 1)] for w in (up, gate, down))
    hidden = jax.nn.silu(padded @ gate) * (padded @ up)
    return (hidden @ down).reshape(number * block, -1)[place]


# -- measuring -----------------------------------------------------------------------------


def _compiled(loss: Loss, params: Params, x: jax.Array, rate: float | None = None) -> Any:
    """Returns the compiled gradients, or with a rate the step that changes ``params`` in place."""

    def both(params: Params, x: jax.Array) -> Any:
        (value, extra), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        if rate is None:
            return value, extra, grads
        return value, extra, jax.tree.map(lambda p, g: p - rate * g, params, grads[0])

    donated = () if rate is None else (0,)
    return jax.jit(both, donate_argnums=donated).lower(params, x).compile()


@dataclasses.dataclass
class Times:
    """Seconds of each round, by the clock and of the process's threads."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)


def interleaved(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Times]:
    """Returns the times by name; the first two rounds are not counted."""
    times = {name: Times() for name in calls}
    names = list(calls)
    for number in range(rounds + 2):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            wall, cpu = time.perf_counter(), time.process_time()
            jax.block_until_ready(calls[name]())
            if number >= 2:
                times[name].wall.append(time.perf_counter() - wall)
                times[name].cpu.append(time.process_time() - cpu)
    return times


def _row(times: Times, base: Times, **more: Any) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(times.wall, base.wall, strict=True)]
    return {
        "ms": statistics.median(times.wall) * 1e3,
        "ratio": statistics.median(ratios),
        "cpu": min(times.cpu) / min(base.cpu),
        **more,
    }


def _input(shape: Shape) -> jax.Array:
    x = np.random.default_rng(0).normal(size=(shape.batch, shape.seq, shape.dim))
    return jnp.asarray(x, shape.dtype)


def measure_layer(shape: Shape, target: Target, rounds: int, forms: list[str]) -> dict[str, Any]:
    """Returns times of the forms, and ratios to the faster of the bare ones."""
    losses: dict[str, Loss] = {}
    losses["grouped"], init = layer_loss(shape, GroupedDispatch.Config(), target)
    losses["einsum"], _ = layer_loss(shape, EinsumDispatch.Config(), target)
    losses |= {"bare ragged": bare_loss(shape, ragged), "bare blocks": bare_loss(shape, blocks)}
    params, x = jax.jit(init)(), _input(shape)
    programs = {name: _compiled(losses[name], params, x) for name in forms}
    values = {name: float(program(params, x)[0]) for name, program in programs.items()}
    times = interleaved(
        {name: lambda p=program: p(params, x) for name, program in programs.items()}, rounds
    )
    bare = [name for name in programs if name.startswith("bare")]
    fastest = min(bare, key=lambda name: statistics.median(times[name].wall))
    return {
        name: _row(
            times[name],
            times[fastest],
            loss=values[name],
            temporary_mib=program.memory_analysis().temp_size_in_bytes / 2**20,
        )
        for name, program in programs.items()
    }


def measure_experts(shape: Shape, target: Target, rounds: int) -> dict[str, Any]:
    """Returns times by number of experts, and ratios to the fewest."""
    calls: dict[str, Callable[[], Any]] = {}
    for num in GROWTH:
        sized = dataclasses.replace(shape, experts=num)
        loss, init = layer_loss(sized, GroupedDispatch.Config(), target)
        params, x = jax.jit(init)(), _input(sized)
        program = _compiled(loss, params, x)
        calls[f"layer, {num}"] = lambda p=program, w=params, x=x: p(w, x)
        step = _compiled(loss, params, x, rate=1e-3)
        holder = [jax.tree.map(jnp.copy, params)]

        def train(step: Any = step, holder: Any = holder, x: Any = x) -> Any:
            value, _, holder[0] = step(holder[0], x)
            return value, holder[0]

        calls[f"step, {num}"] = train
    times = interleaved(calls, rounds)
    rows = {}
    for kind in ("layer", "step"):
        for num in GROWTH:
            name, base = f"{kind}, {num}", f"{kind}, {GROWTH[0]}"
            rows[name] = _row(times[name], times[base])
    return rows


def _print(title: str, rows: dict[str, Any]) -> None:
    sys.stdout.write(f"\n{title}\n")
    for name, row in rows.items():
        figures = "  ".join(f"{key} {value:9.4g}" for key, value in row.items())
        sys.stdout.write(f"  {name:<14} {figures}\n")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("layer", "experts"))
    parser.add_argument("--instance", default="cpu")
    parser.add_argument("--rounds", type=int, default=11)
    all_forms = ["grouped", "einsum", "bare ragged", "bare blocks"]
    parser.add_argument("--forms", nargs="*", choices=all_forms, default=all_forms)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    instance = resolve_instance(args.instance)
    target = ProgramTarget.for_instance(instance, None)
    size = "cpu" if instance.platform == "cpu" else "other"
    tables: dict[str, Any] = {}
    if args.only in (None, "layer"):
        rows = measure_layer(LAYER[size], target, args.rounds, args.forms)
        tables["layer"] = {"shape": dataclasses.asdict(LAYER[size]), "rows": rows}
    if args.only in (None, "experts"):
        for shape in EXPERTS[size]:
            title = f"experts, {shape.batch * shape.seq} tokens"
            rows = measure_experts(shape, target, args.rounds)
            tables[title] = {"shape": dataclasses.asdict(shape), "rows": rows}
    if args.json:
        sys.stdout.write(json.dumps(tables) + "\n")
        return
    for title, table in tables.items():
        _print(f"{title}: {table['shape']}", table["rows"])


if __name__ == "__main__":
    main()
