"""What axcore costs over hand-written JAX: steps, host, compiling, program size, start-up.

The bare model is written out below in plain JAX with the shape, layout (heads first, query groups
as rows of one taller matmul, causal blocks) and stack form of axcore's: pre-norm, RMSNorm, SwiGLU,
grouped queries, learned positions, untied head, AdamW, clip 1.0, steps that are not finite change
nothing. Both run in one process, in turn.

    python benchmarks/overhead.py            # all tables, about five minutes on two cores
    python benchmarks/overhead.py --only step

Times on a shared machine are noisy: read the ratios, which are taken within one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_NULL: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model and its batch."""

    layers: int = 8
    dim: int = 512
    heads: int = 8
    kv_heads: int = 4
    ffn: int = 1408
    vocab: int = 4096
    seq: int = 512
    batch: int = 4


SHAPES = {
    "8 layers, d 512": Shape(),
    "1 layer, d 64": Shape(1, 64, 4, 2, 176, 264, 64, 16),
}


# -- bare JAX ------------------------------------------------------------------------------


def bare_step(shape: Shape) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """Returns (step, init) in plain JAX."""
    import jax
    import jax.numpy as jnp
    import optax

    s, h = shape, shape.dim // shape.heads
    g = s.heads // s.kv_heads
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, weight_decay=0.0))
    shapes = {
        "q": (s.dim, s.heads, h),
        "k": (s.dim, s.kv_heads, h),
        "v": (s.dim, s.kv_heads, h),
        "o": (s.heads, h, s.dim),
        "gate": (s.dim, s.ffn),
        "up": (s.dim, s.ffn),
        "down": (s.ffn, s.dim),
    }

    def init() -> Any:
        keys = iter(jax.random.split(jax.random.key(0), len(shapes) + 3))
        layers = {
            name: jax.random.normal(next(keys), (s.layers, *shape)) / math.sqrt(s.dim)
            for name, shape in shapes.items()
        }
        layers |= {n: jnp.ones((s.layers, s.dim)) for n in ("norm1", "norm2")}
        params = {
            "embed": jax.random.normal(next(keys), (s.vocab, s.dim)) * 0.02,
            "position": jax.random.normal(next(keys), (s.seq, s.dim)) * 0.02,
            "head": jax.random.normal(next(keys), (s.dim, s.vocab)) / math.sqrt(s.dim),
            "norm": jnp.ones(s.dim),
            "layers": layers,
        }
        return params, optimizer.init(params)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        b, t = q.shape[:2]
        q = (q / math.sqrt(h)).reshape(b, t, s.kv_heads, g, h).transpose(0, 2, 3, 1, 4)
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        blocks = max(1, min(4, t // 128))
        size, outs = t // blocks, []
        for lo in range(0, t, size):
            hi = lo + size
            logits = jnp.einsum("bkgth,bksh->bkgts", q[:, :, :, lo:hi], k[:, :, :hi])
            seen = jnp.arange(lo, hi)[:, None] >= jnp.arange(hi)
            same = segments[:, lo:hi, None] == segments[:, None, :hi]
            seen = (seen & same & (segments[:, lo:hi, None] != 0))[:, None, None]
            logits = jnp.where(seen, logits, -1e30)
            weights = jnp.exp(logits - jax.lax.stop_gradient(logits.max(-1, keepdims=True)))
            out = jnp.einsum("bkgts,bksh->bkgth", weights, v[:, :, :hi])
            outs.append(out / weights.sum(-1, keepdims=True))
        out = jnp.concatenate(outs, axis=3)
        return out.transpose(0, 3, 1, 2, 4).reshape(b, t, s.heads, h)

    def loss_fn(params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            y = norm(x, p["norm1"])
            q, k, v = (jnp.einsum("btd,dnh->btnh", y, p[n]) for n in "qkv")
            out = attention(q, k, v, batch["segment_ids"])
            x = x + jnp.einsum("btnh,nhd->btd", out, p["o"])
            y = norm(x, p["norm2"])
            return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

        x = params["embed"][batch["input_ids"]] + params["position"][batch["positions"]]
        x, _ = jax.lax.scan(layer, x, params["layers"])
        logits = norm(x, params["norm"]) @ params["head"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["target_ids"])
        mask = batch["target_mask"]
        return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        finite = jnp.isfinite(optax.global_norm(grads))  # a bad step changes nothing
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state), loss

    return step, init


# -- axcore --------------------------------------------------------------------------------


def axcore_config(shape: Shape, **fields: Any) -> Any:
    """Returns the same model and optimizer as a Trainer.Config."""
    from axcore.config import config_for
    from axcore.layers import (
        Attention,
        CausalLM,
        Decoder,
        FeedForward,
        Linear,
        LMHead,
        RMSNorm,
        TransformerLayer,
    )
    from axcore.train import Learner, Trainer, optimizers

    cfg = Trainer.Config(
        model=CausalLM.Config(
            vocab_size=shape.vocab,
            model_dim=shape.dim,
            decoder=Decoder.Config(
                num_layers=shape.layers,
                layer=TransformerLayer.Config(
                    attention_norm=RMSNorm.Config(),
                    attention=Attention.Config(num_heads=shape.heads, num_kv_heads=shape.kv_heads),
                    feed_forward_norm=RMSNorm.Config(),
                    feed_forward=FeedForward.Config(
                        hidden_dim=shape.ffn, activation="silu", gate=Linear.Config()
                    ),
                ),
                final_norm=RMSNorm.Config(),
            ),
            lm_head=LMHead.Config(),
        ),
        learner=Learner.Config(
            optimizer=config_for(optimizers.adamw, learning_rate=3e-4), clip_global_norm=1.0
        ),
        max_step=10,
        batch_size=shape.batch,
        seq_len=shape.seq,
    )
    for _, linear in cfg.find(Linear.Config).items():
        linear.bias = False
    return cfg.set(**fields)


def batch_of(shape: Shape) -> dict[str, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    size = (shape.batch, shape.seq)
    row = np.broadcast_to(np.arange(shape.seq, dtype=np.int32), size)
    return {
        "input_ids": rng.integers(0, shape.vocab, size, dtype=np.int32),
        "target_ids": rng.integers(0, shape.vocab, size, dtype=np.int32),
        "segment_ids": np.ones(size, np.int32),
        "positions": np.ascontiguousarray(row),
        "target_mask": np.ones(size, bool),
    }


class Side:
    """One side's compiled step and its state."""

    def __init__(self, name: str, shape: Shape):
        import jax

        self.batch = batch_of(shape)
        start = time.perf_counter()
        if name == "bare":
            step, init = bare_step(shape)
            state = jax.eval_shape(init)
        else:
            trainer = axcore_config(shape).instantiate(name="trainer")
            step, init = trainer.train_step, trainer.init_state
            state = jax.eval_shape(init)
        lowered = jax.jit(step, donate_argnums=0).lower(state, self.batch)
        self.trace_seconds = time.perf_counter() - start
        self.compiled = lowered.compile()
        self.compile_seconds = time.perf_counter() - start - self.trace_seconds
        cost = self.compiled.cost_analysis() or {}
        self.flops, self.bytes = cost.get("flops", 0.0), cost.get("bytes accessed", 0.0)
        self.memory = self.compiled.memory_analysis().temp_size_in_bytes
        self.state = jax.jit(init)()

    def step(self) -> float:
        import jax

        start = time.perf_counter()
        self.state, out = self.compiled(self.state, self.batch)
        jax.block_until_ready((self.state, out))
        return time.perf_counter() - start


def measure_step(shape: Shape, rounds: int) -> dict[str, Any]:
    """Returns axcore / bare ratios of one shape."""
    sides = {name: Side(name, shape) for name in ("bare", "axcore")}
    # Compiling again in the other order evens out what the first compilation warms up.
    again = {name: Side(name, shape) for name in ("axcore", "bare")}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(rounds + 2):
        order = list(sides) if i % 2 else list(reversed(sides))
        for name in order:
            took = sides[name].step()
            if i >= 2:
                seconds[name].append(took)

    def ratio(pick: Callable[[Side], float]) -> float:
        return pick(sides["axcore"]) / pick(sides["bare"])

    def compile_total(name: str) -> float:
        both = (sides[name], again[name])
        return min(s.trace_seconds + s.compile_seconds for s in both)

    pairs = zip(seconds["axcore"], seconds["bare"], strict=True)
    return {
        "step ratio (fastest)": min(seconds["axcore"]) / min(seconds["bare"]),
        "step ratio (median of pairs)": statistics.median(a / b for a, b in pairs),
        "bare step ms": min(seconds["bare"]) * 1e3,
        "trace + compile ratio": compile_total("axcore") / compile_total("bare"),
        "bare trace + compile s": compile_total("bare"),
        "FLOPs ratio": ratio(lambda s: s.flops),
        "bytes ratio": ratio(lambda s: s.bytes),
        "temporaries ratio": ratio(lambda s: s.memory),
    }


def measure_host(shape: Shape, steps: int) -> dict[str, Any]:
    """Returns the host's cost per step of the whole loop over a bare compiled call."""
    import jax

    from axcore.parallel import resolve_instance
    from axcore.train import train

    side = Side("bare", shape)
    for _ in range(20):
        side.step()
    start = time.perf_counter()
    for _ in range(steps):
        side.state, out = side.compiled(side.state, side.batch)
    jax.block_until_ready(out)
    bare = (time.perf_counter() - start) / steps
    with tempfile.TemporaryDirectory() as out:
        cfg = axcore_config(
            shape, max_step=steps, evalers=_NULL, writers=_NULL, log_every_n_steps=steps
        )
        cfg.checkpointer.save_every_n_steps = steps
        report = train(cfg, out=Path(out) / "run", instance=resolve_instance("cpu")).report
    whole = report["step_seconds"]
    compiled = Side("axcore", shape)
    for _ in range(20):
        compiled.step()
    start = time.perf_counter()
    for _ in range(steps):
        compiled.state, out = compiled.compiled(compiled.state, compiled.batch)
    jax.block_until_ready(out)
    call = (time.perf_counter() - start) / steps
    return {
        "bare compiled call us": bare * 1e6,
        "axcore compiled call us": call * 1e6,
        "axcore whole loop us": whole * 1e6,
        "host overhead us (loop - its own compiled call)": (whole - call) * 1e6,
    }


# -- start-up ------------------------------------------------------------------------------

BARE_SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
import jax
import overhead
shape = overhead.Shape()
step, init = overhead.bare_step(shape)
state = jax.jit(init)()
batch = overhead.batch_of(shape)
state, loss = jax.jit(step, donate_argnums=0)(state, batch)
jax.block_until_ready(loss)
"""

AXCORE_SCRIPT = """
import sys, pathlib
sys.path.insert(0, {here!r})
import overhead
from axcore.parallel import resolve_instance
from axcore.train import train
cfg = overhead.axcore_config(
    overhead.Shape(vocab=4096), max_step=1, evalers={{}}, writers={{}}
)
report = train(cfg, out=pathlib.Path({out!r}), instance=resolve_instance("cpu")).report
print(report["first_step_seconds"])
"""


def _seconds(command: list[str], repeats: int, env: Mapping[str, str] | None = None) -> float:
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            env={**os.environ, **(env or {}), "JAX_PLATFORMS": "cpu"},
        )
        best = min(best, time.perf_counter() - start)
    return best


def measure_start(repeats: int) -> dict[str, Any]:
    """Returns import and start-up times of fresh processes."""
    python = [sys.executable, "-c"]
    empty = _seconds([*python, "pass"], repeats)
    here = str(Path(__file__).parent)
    rows: dict[str, Any] = {
        "python start s": empty,
        "import axcore s": _seconds([*python, "import axcore"], repeats) - empty,
        "import axcore.config s": _seconds([*python, "import axcore.config"], repeats) - empty,
        "axcore --help s": _seconds([sys.executable, "-m", "axcore", "--help"], repeats),
        "import jax s": _seconds([*python, "import jax"], repeats) - empty,
    }
    with tempfile.TemporaryDirectory() as tmp:
        for state in ("cold", "warm"):
            for name in ("bare", "axcore"):
                cache = str(Path(tmp) / f"cache-{name}")
                env = {
                    "JAX_COMPILATION_CACHE_DIR": cache,
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                }
                out = str(Path(tmp) / f"run-{state}")
                script = BARE_SCRIPT if name == "bare" else AXCORE_SCRIPT
                code = script.format(here=here, out=out)
                rows[f"start to first step, {name}, {state} s"] = _seconds([*python, code], 1, env)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=["step", "host", "start"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    tables: dict[str, dict[str, Any]] = {}
    if args.only in (None, "step"):
        for name, shape in SHAPES.items():
            rounds = args.rounds if shape.dim > 64 else args.rounds * 20
            tables[f"step: {name}, scan"] = measure_step(shape, rounds)
    if args.only in (None, "host"):
        # So small that a step is nearly all host.
        tiny = Shape(1, 8, 2, 1, 16, 264, 8, 2)
        tables["host: 1 layer, d 8"] = measure_host(tiny, 3000)
    if args.only in (None, "start"):
        tables["start-up"] = measure_start(3)
    if args.json:
        print(json.dumps(tables))
        return
    for title, rows in tables.items():
        print(f"\n{title}")
        for name, value in rows.items():
            print(f"  {name:<50} {value:10.3f}")


if __name__ == "__main__":
    main()
