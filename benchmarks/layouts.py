"""Which layout of one training step is fastest here: forms compared in one interleaved run.

The model is the 27.8M-parameter Llama shape of the project's measurements (8 layers, d 512, 8/4
heads, feed-forward 1408, vocabulary 4096, sequence 512, batch 4, float32, AdamW, clip 1.0). The
baseline is what one writes first in bare JAX: a scan over layers, (batch, seq, heads, head_dim)
einsums, keys and values repeated per query head, full logits. The other forms change one thing at a
time, up to `axcore.ops` with unrolled layers.

    python benchmarks/layouts.py                 # all forms, about five minutes
    python benchmarks/layouts.py --rounds 20 --forms naive-scan ops-unrolled

Times on a shared machine are noisy: read the ratios. Each round runs every form once, in an order
that rotates; `min` compares the forms' fastest steps, `median` is the median of the rounds' ratios,
`cpu` compares the least CPU time of a step, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from axcore import ops
from axcore.ops._dot import dot_general

Params = Any


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model's and the batch's sizes."""

    layers: int = 8
    dim: int = 512
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1408
    vocab: int = 4096
    seq: int = 512
    batch: int = 4

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def matmul_flops(self) -> float:
        """FLOPs of one training step's matmuls, attention counted causally (half)."""
        h, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 2 * self.dim * (2 * h + 2 * k) + 6 * self.dim * self.ffn
        attention = 4 * self.seq * h / 2
        return (
            3
            * self.batch
            * self.seq
            * (self.layers * (layer + attention) + 2 * self.dim * self.vocab)
        )


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to write the step.

    Attributes:
        scan: Scan over stacked layers instead of a Python loop.
        attention: ``naive``, ``heads_first``, ``tall``, ``jax_nn`` or ``ops``.
        loss: ``naive`` (full logits, log_softmax), ``optax`` or ``ops``.
        other: Norms and activation: ``naive`` or ``ops``.
        dots: Weight products: ``naive`` (jnp.einsum) or ``ops`` (as ``ops.DotGeneral``).
        options: XLA compiler options.
    """

    scan: bool
    attention: str = "naive"
    loss: str = "naive"
    other: str = "naive"
    dots: str = "naive"
    options: tuple[tuple[str, Any], ...] = ()


YNN = (("xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_DOT"),)

FORMS: dict[str, Form] = {
    "naive-scan": Form(scan=True),
    "naive-unrolled": Form(scan=False),
    "heads-first-scan": Form(scan=True, attention="heads_first"),
    "heads-first-unrolled": Form(scan=False, attention="heads_first"),
    "tall-unrolled": Form(scan=False, attention="tall"),
    "jax-nn-unrolled": Form(scan=False, attention="jax_nn"),
    "ops-attention-unrolled": Form(scan=False, attention="ops"),
    "ops-loss-unrolled": Form(scan=False, attention="ops", loss="ops"),
    "ops-nodots-unrolled": Form(scan=False, attention="ops", loss="ops", other="ops"),
    "ops-scan": Form(scan=True, attention="ops", loss="ops", other="ops", dots="ops"),
    "ops-unrolled": Form(scan=False, attention="ops", loss="ops", other="ops", dots="ops"),
    "ops-unrolled-ynn": Form(
        scan=False, attention="ops", loss="ops", other="ops", dots="ops", options=YNN
    ),
}


def init_params(shape: Shape, scan: bool) -> Params:
    """Normal weights, (in, out); layers stacked for a scan, a list otherwise."""
    d, n, k, h, f = shape.dim, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn
    shapes = {
        "q": (d, n, h),
        "k": (d, k, h),
        "v": (d, k, h),
        "o": (n, h, d),
        "gate": (d, f),
        "up": (d, f),
        "down": (f, d),
    }

    def layer(key: jax.Array) -> Params:
        keys = jax.random.split(key, len(shapes))
        made = {
            name: jax.random.normal(k, s) / math.sqrt(d)
            for k, (name, s) in zip(keys, shapes.items(), strict=True)
        }
        return {**made, "norm1": jnp.ones(d), "norm2": jnp.ones(d)}

    keys = jax.random.split(jax.random.key(0), shape.layers + 2)
    layers = [layer(k) for k in keys[2:]]
    return {
        "embed": jax.random.normal(keys[0], (shape.vocab, d)) * 0.02,
        "head": jax.random.normal(keys[1], (d, shape.vocab)) / math.sqrt(d),
        "norm": jnp.ones(d),
        "layers": jax.tree.map(lambda *x: jnp.stack(x), *layers) if scan else layers,
    }


def rope(x_btnh: jax.Array) -> jax.Array:
    """Rotary positions, halves convention."""
    half = x_btnh.shape[-1] // 2
    freq = 10000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x_btnh.shape[1])[:, None] * freq
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    a, b = x_btnh[..., :half], x_btnh[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def naive_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def attend(form: Form, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """(B, T, N, H), (B, T, K, H) x 2 -> (B, T, N, H), causal."""
    b, t, n, h = q.shape
    num_kv = k.shape[2]
    g = n // num_kv
    causal = jnp.tril(jnp.ones((t, t), bool))
    if form.attention == "ops":
        return ops.attention(q, k, v)
    if form.attention == "jax_nn":
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)
    if form.attention == "naive":
        k, v = jnp.repeat(k, g, axis=2), jnp.repeat(v, g, axis=2)
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(h)
        weights = jax.nn.softmax(jnp.where(causal, logits, -1e30), axis=-1)
        return jnp.einsum("bnts,bsnh->btnh", weights, v)
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    if form.attention == "heads_first":
        q = q.transpose(0, 2, 1, 3)
        k, v = jnp.repeat(k, g, axis=1), jnp.repeat(v, g, axis=1)
        logits = jnp.einsum("bnth,bnsh->bnts", q, k) / math.sqrt(h)
        weights = jax.nn.softmax(jnp.where(causal, logits, -1e30), axis=-1)
        return jnp.einsum("bnts,bnsh->bnth", weights, v).transpose(0, 2, 1, 3)
    q = q.reshape(b, t, num_kv, g, h).transpose(0, 2, 3, 1, 4)  # tall: (b, k, g * t, h)
    logits = jnp.einsum("bkgth,bksh->bkgts", q, k) / math.sqrt(h)
    weights = jax.nn.softmax(jnp.where(causal, logits, -1e30), axis=-1)
    out = jnp.einsum("bkgts,bksh->bkgth", weights, v)
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)


def loss_fn(form: Form, params: Params, ids: jax.Array, targets: jax.Array) -> jax.Array:
    norm = ops.rms_norm if form.other == "ops" else naive_norm

    def project(x: jax.Array, w: jax.Array, num_in: int = 1) -> jax.Array:
        """Contracts the last ``num_in`` dims of x with the first of w."""
        last = tuple(range(x.ndim - num_in, x.ndim))
        dims = ((last, tuple(range(num_in))), ((), ()))
        return (dot_general if form.dots == "ops" else jax.lax.dot_general)(x, w, dims)

    def layer(x: jax.Array, p: Params) -> jax.Array:
        y = norm(x, p["norm1"])
        q, k, v = (project(y, p[name]) for name in "qkv")
        x = x + project(attend(form, rope(q), rope(k), v), p["o"], 2)
        y = norm(x, p["norm2"])
        gate, up = project(y, p["gate"]), project(y, p["up"])
        if form.other == "ops":
            hidden = ops.gated_activation(gate, up, "silu")
        else:
            hidden = jax.nn.silu(gate) * up
        return x + project(hidden, p["down"])

    x = params["embed"][ids]
    if form.scan:
        x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = layer(x, p)
    x = norm(x, params["norm"])
    if form.loss == "ops":
        return ops.linear_cross_entropy(x, params["head"], targets, layout="dv").loss.mean()
    logits = x @ params["head"]
    if form.loss == "optax":
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -picked.mean()


class Program:
    """A compiled, donated training step of one form, with its state."""

    def __init__(self, form: Form, shape: Shape):
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
        keys = jax.random.split(jax.random.key(1))
        self.batch = [jax.random.randint(k, (shape.batch, shape.seq), 0, shape.vocab) for k in keys]

        def step(state: Any, ids: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
            params, opt_state = state
            loss, grads = jax.value_and_grad(lambda p: loss_fn(form, p, ids, targets))(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        params = init_params(shape, form.scan)
        self.state = (params, optimizer.init(params))
        start = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=0).lower(self.state, *self.batch)
        self.compiled = lowered.compile(dict(form.options) or None)
        self.compile_seconds = time.perf_counter() - start
        self.losses: list[float] = []

    def step(self) -> tuple[float, float]:
        """Runs one step; returns its wall and CPU seconds."""
        start = time.perf_counter(), time.process_time()
        self.state, loss = self.compiled(self.state, *self.batch)
        jax.block_until_ready(self.state)
        seconds = time.perf_counter() - start[0], time.process_time() - start[1]
        self.losses.append(float(loss))
        return seconds


def compare(
    programs: dict[str, Callable[[], tuple[float, float]]], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each program in each round; the order rotates."""
    names = list(programs)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for i in range(rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            took = programs[name]()
            if i:  # the first round warms up
                seconds[name].append(took)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", nargs="+", choices=sorted(FORMS), default=list(FORMS))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    args = parser.parse_args()

    shape = Shape(vocab=args.vocab)
    programs = {}
    for name in args.forms:
        programs[name] = Program(FORMS[name], shape)
        print(f"compiled {name}: {programs[name].compile_seconds:.0f} s", file=sys.stderr)
    seconds = compare({name: p.step for name, p in programs.items()}, args.rounds)

    base_name = args.forms[0]
    base_wall, base_cpu = zip(*seconds[base_name], strict=True)
    rows = []
    for name, took in seconds.items():
        wall, cpu = zip(*took, strict=True)
        ratios = [a / b for a, b in zip(wall, base_wall, strict=True)]
        rows.append(
            {
                "form": name,
                "min_ratio": min(wall) / min(base_wall),
                "median_ratio": statistics.median(ratios),
                "cpu_ratio": min(cpu) / min(base_cpu),
                "min_seconds": min(wall),
                "min_cpu_seconds": min(cpu),
                "gflops": shape.matmul_flops() / min(wall) / 1e9,
                "compile_seconds": programs[name].compile_seconds,
                "last_loss": programs[name].losses[-1],
            }
        )
    if args.json:
        print(json.dumps({"shape": dataclasses.asdict(shape), "base": base_name, "rows": rows}))
        return
    columns = {"min_ratio": "min", "median_ratio": "median", "cpu_ratio": "cpu"}
    columns |= {"min_seconds": "s/step", "min_cpu_seconds": "cpu s", "gflops": "GFLOP/s"}
    print(f"{'form':<24}", *(f"{title:>7}" for title in columns.values()), "loss")
    for row in rows:
        values = (f"{row[column]:7.2f}" for column in columns)
        print(f"{row['form']:<24}", *values, f"{row['last_loss']:.4f}")


if __name__ == "__main__":
    main()
