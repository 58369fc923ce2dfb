"""Greedy decoding: axcore's Generator beside a hand-written bare-JAX loop of the same model.

The model is the 27.8M-parameter Llama shape of the project's measurements (8 layers, d 512, 8/4
heads of 64, feed-forward 1408, vocabulary 4096, float32), or that of SmolLM2-135M; 128 prompt
tokens, 128 new ones, batch 1 and 8. The bare loop is what a careful person writes for one model and
equal prompts: layers unrolled, heads before positions in the cache, one slice written per token for
all rows, 32 tokens per device call. Both run the same weights and must give the same tokens.

    python benchmarks/decode.py                          # about three minutes
    python benchmarks/decode.py --shape smollm2-135M --rounds 3
    python benchmarks/decode.py --batch 1 --rounds 9 --json

Times on a shared machine are noisy: forms run one after another within a round, the order rotates,
and `ratio` is the median over the rounds of ours over bare, per token. transformers runs the same
weights on torch's CPU when both are installed; vLLM is reported when it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from axcore.inference import Generator
from axcore.layers import (
    QKV,
    Attention,
    CausalLM,
    Decoder,
    FeedForward,
    Linear,
    LMHead,
    RepeatedTransformer,
    RMSNorm,
    StackedTransformer,
    TransformerLayer,
)
from axlearn_rope import RoPE

PROMPT, NEW, CHUNK = 128, 128, 32


class Shape(NamedTuple):
    """A Llama's sizes. Weights are random: the time of a step does not depend on them."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    base: float


SHAPES = {
    "llama-28M": Shape(8, 512, 8, 4, 64, 1408, 4096, 1e-6, 10_000.0),
    "smollm2-135M": Shape(30, 576, 9, 3, 64, 1536, 49_152, 1e-5, 100_000.0),
}


def model(shape: Shape, stack: str) -> CausalLM:
    """The same shape in axcore; ``stack`` says how its layers run."""
    linear, norm = Linear.Config(bias=False), RMSNorm.Config(eps=shape.eps)
    attention = Attention.Config(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        qkv=QKV.Config(query=linear, key=linear, value=linear),
        output=linear,
        query_key_transform=RoPE.Config(base=shape.base),
    )
    feed_forward = FeedForward.Config(
        hidden_dim=shape.ffn, activation="silu", up=linear, gate=linear, down=linear
    )
    layer = TransformerLayer.Config(
        attention_norm=norm,
        attention=attention,
        feed_forward_norm=norm,
        feed_forward=feed_forward,
    )
    form = StackedTransformer.Config() if stack == "layers" else RepeatedTransformer.Config()
    return CausalLM.Config(
        vocab_size=shape.vocab,
        model_dim=shape.dim,
        max_seq_len=1024,
        position=None,
        decoder=Decoder.Config(num_layers=shape.layers, layer=layer, stack=form, final_norm=norm),
        lm_head=LMHead.Config(),
    ).instantiate(name="m")


# -- bare JAX ----------------------------------------------------------------------------------


def bare_params(shape: Shape, state: Mapping[str, Any]) -> dict[str, Any]:
    """axcore's parameters (layer by layer) as the matrices that the bare loop uses."""
    layers = []
    for i in range(shape.layers):
        layer = state["decoder"]["layer"][str(i)]
        qkv, feed = layer["attention"]["qkv"], layer["feed_forward"]
        weights = [qkv[n]["weight"].reshape(shape.dim, -1) for n in ("query", "key", "value")]
        layers.append(
            dict(
                norm1=layer["attention_norm"]["scale"],
                norm2=layer["feed_forward_norm"]["scale"],
                q=weights[0],
                k=weights[1],
                v=weights[2],
                out=layer["attention"]["output"]["weight"].reshape(-1, shape.dim),
                gate=feed["gate"]["weight"],
                up=feed["up"]["weight"],
                down=feed["down"]["weight"],
            )
        )
    return dict(
        embedding=state["embedding"]["weight"],
        layers=layers,
        norm=state["decoder"]["final_norm"]["scale"],
        head=state["lm_head"]["weight"],
    )


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rope(shape: Shape, x_bnth: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates the two halves of each head; positions (t,)."""
    inverse = shape.base ** (-jnp.arange(0, shape.head_dim, 2) / shape.head_dim)
    angles = positions[:, None] * inverse
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x_bnth, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def bare_forward(shape: Shape, params: Any, caches: Any, ids: jax.Array, start: jax.Array) -> Any:
    """ids (b, t) at positions start.. -> caches, logits of the last token (b, vocab)."""
    b, t = ids.shape
    x = params["embedding"][ids]
    positions = start + jnp.arange(t)
    group = shape.heads // shape.kv_heads
    new = []
    for p, (keys, values) in zip(params["layers"], caches, strict=True):
        h = rms_norm(x, p["norm1"], shape.eps)
        q = (h @ p["q"]).reshape(b, t, shape.heads, shape.head_dim).transpose(0, 2, 1, 3)
        k = (h @ p["k"]).reshape(b, t, shape.kv_heads, shape.head_dim).transpose(0, 2, 1, 3)
        v = (h @ p["v"]).reshape(b, t, shape.kv_heads, shape.head_dim).transpose(0, 2, 1, 3)
        q, k = rope(shape, q, positions), rope(shape, k, positions)
        keys = jax.lax.dynamic_update_slice(keys, k, (0, 0, start, 0))
        values = jax.lax.dynamic_update_slice(values, v, (0, 0, start, 0))
        new.append((keys, values))
        q = q.reshape(b, shape.kv_heads, group * t, shape.head_dim) * shape.head_dim**-0.5
        scores = jnp.einsum("bkqh,bksh->bkqs", q, keys)
        seen = jnp.arange(keys.shape[2]) <= positions[:, None]
        scores = jnp.where(jnp.tile(seen, (group, 1)), scores, -jnp.inf)
        out = jnp.einsum("bkqs,bksh->bkqh", jax.nn.softmax(scores, axis=-1), values)
        out = out.reshape(b, shape.heads, t, shape.head_dim).transpose(0, 2, 1, 3).reshape(b, t, -1)
        x = x + out @ p["out"]
        h = rms_norm(x, p["norm2"], shape.eps)
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return new, rms_norm(x[:, -1], params["norm"], shape.eps) @ params["head"]


class Bare:
    """The hand-written loop."""

    def __init__(self, shape: Shape, params: Any, batch: int):
        self._params = params
        cache = (batch, shape.kv_heads, PROMPT + NEW, shape.head_dim)

        @jax.jit
        def prefill(params: Any, ids: jax.Array) -> Any:
            caches = [(jnp.zeros(cache), jnp.zeros(cache)) for _ in range(shape.layers)]
            caches, logits = bare_forward(shape, params, caches, ids, jnp.int32(0))
            return caches, jnp.argmax(logits, axis=-1).astype(jnp.int32)

        def decode(params: Any, caches: Any, token: jax.Array, start: jax.Array) -> Any:
            def one(carry: Any, i: jax.Array) -> Any:
                caches, token = carry
                caches, logits = bare_forward(shape, params, caches, token[:, None], start + i)
                token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
                return (caches, token), token

            (caches, _), tokens = jax.lax.scan(one, (caches, token), jnp.arange(CHUNK))
            return caches, tokens.T

        self._prefill, self._decode = prefill, jax.jit(decode, donate_argnums=1)

    def __call__(self, prompts: np.ndarray) -> tuple[np.ndarray, float, float]:
        """Returns (tokens, seconds to the first, seconds per further one)."""
        start = time.perf_counter()
        caches, token = self._prefill(self._params, prompts)
        out = [np.asarray(token)[:, None]]
        first = time.perf_counter()
        made = 1
        while made < NEW:
            caches, tokens = self._decode(self._params, caches, token, jnp.int32(PROMPT + made - 1))
            out.append(np.asarray(tokens))
            token, made = tokens[:, -1], made + CHUNK
        seconds = time.perf_counter() - first
        return np.concatenate(out, axis=1)[:, :NEW], first - start, seconds / (made - 1)


# -- the others --------------------------------------------------------------------------------


def ours(
    shape: Shape, stack: str, state: Any
) -> Callable[[np.ndarray], tuple[np.ndarray, float, float]]:
    """The Generator."""
    generator = Generator(model(shape, stack), state, max_seq_len=1024, chunk=CHUNK)

    def run(prompts: np.ndarray) -> tuple[np.ndarray, float, float]:
        made = generator.generate(prompts.tolist(), NEW)
        return np.asarray(made.tokens), made.ttft_seconds, len(prompts) / made.tokens_per_second

    return run


def transformers_run(
    shape: Shape, bare: Any
) -> Callable[[np.ndarray], tuple[np.ndarray, float, float]] | None:
    """transformers on torch's CPU, or None where either is missing."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        return None
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=shape.eps,
        rope_theta=shape.base,
        max_position_embeddings=1024,
    )
    net = LlamaForCausalLM(config).eval()
    names = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "out": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
    }

    def tensor(x: Any) -> Any:
        return torch.tensor(np.array(x.T if x.ndim == 2 else x))

    weights = {
        f"model.layers.{i}.{name}.weight": tensor(layer[ours_name])
        for i, layer in enumerate(bare["layers"])
        for ours_name, name in names.items()
    }
    weights["model.embed_tokens.weight"] = torch.tensor(np.array(bare["embedding"]))
    weights["model.norm.weight"] = tensor(bare["norm"])
    weights["lm_head.weight"] = tensor(bare["head"])
    net.load_state_dict(weights)

    def run(prompts: np.ndarray) -> tuple[np.ndarray, float, float]:
        ids = torch.tensor(prompts.astype(np.int64))
        shared = dict(do_sample=False, pad_token_id=0, eos_token_id=None)
        with torch.no_grad():
            start = time.perf_counter()
            net.generate(ids, max_new_tokens=1, **shared)
            first = time.perf_counter() - start
            out = net.generate(ids, max_new_tokens=NEW, **shared)
            seconds = time.perf_counter() - start - 2 * first
        return out[:, PROMPT:].numpy(), first, seconds / (NEW - 1)

    return run


def measure(shape: Shape, batch: int, rounds: int, forms: list[str]) -> dict[str, Any]:
    """Runs all forms in turn."""
    layered = model(shape, "layers")
    state = jax.tree.map(jnp.asarray, layered.initialize(jax.random.key(0)))
    # Fresh weights give nearly equal scores: sharper ones, so that rounding decides no token.
    state["lm_head"]["weight"] = state["lm_head"]["weight"] * 30
    bare = bare_params(shape, state)
    prompts = np.random.default_rng(0).integers(0, shape.vocab, (batch, PROMPT)).astype(np.int32)
    runs: dict[str, Any] = {"bare": Bare(shape, bare, batch)}
    if "layers" in forms:
        runs["axcore layers"] = ours(shape, "layers", state)
    if "scan" in forms:
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *state["decoder"]["layer"].values())
        name = next(iter(model(shape, "scan").initialize(jax.random.key(0))["decoder"]["layer"]))
        scanned = {**state, "decoder": {**state["decoder"], "layer": {name: stacked}}}
        runs["axcore scan"] = ours(shape, "scan", scanned)
    if "transformers" in forms:
        other = transformers_run(shape, bare)
        if other is not None:
            runs["transformers"] = other
    expected = runs["bare"](prompts)[0]
    agree = {name: float((run(prompts)[0] == expected).mean()) for name, run in runs.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    names = list(runs)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(runs[name](prompts)[1:])
    results = {}
    for name, values in times.items():
        ratios = [ours / base for (_, ours), (_, base) in zip(values, times["bare"], strict=True)]
        results[name] = {
            "ttft_ms": 1e3 * statistics.median(first for first, _ in values),
            "tpot_ms": 1e3 * statistics.median(each for _, each in values),
            "tokens_per_second": batch / statistics.median(each for _, each in values),
            "ratio": statistics.median(ratios),
            "ratio_of_fastest": min(v[1] for v in values) / min(v[1] for v in times["bare"]),
            "tokens_agree": agree[name],
        }
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-28M")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--forms",
        nargs="+",
        default=["layers", "scan", "transformers"],
        choices=["layers", "scan", "transformers"],
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    out: dict[str, Any] = {
        "shape": args.shape,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }
    out["vllm"] = "installed" if importlib.util.find_spec("vllm") else "not installed"
    out["transformers"] = (
        "installed"
        if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
        else "not installed"
    )
    for batch in args.batch:
        out[f"batch {batch}"] = results = measure(
            SHAPES[args.shape], batch, args.rounds, args.forms
        )
        if not args.json:
            print(f"{args.shape}, batch {batch}: {PROMPT} + {NEW} tokens")
            for name, r in results.items():
                print(
                    f"  {name:14} TTFT {r['ttft_ms']:7.1f} ms  TPOT {r['tpot_ms']:6.2f} ms  "
                    f"{r['tokens_per_second']:6.1f} tokens/s  {r['ratio']:.2f}x bare "
                    f"(fastest {r['ratio_of_fastest']:.2f}x)  same tokens "
                    f"{100 * r['tokens_agree']:.0f} %"
                )
    if args.json:
        print(json.dumps(out, indent=2))
    else:
        print(f"vllm: {out['vllm']}; transformers: {out['transformers']}; jax {out['jax']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
