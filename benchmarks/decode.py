"""Greedy decoding: axcore's Generator beside a hand-written bare-JAX loop of the same model.

The model is the 27.8M-parameter Llama shape of the project's measurements (8 layers, d 512, 8/4
heads of 64, feed-forward 1408, vocabulary 4096, float32); 128 prompt tokens, 128 new ones, batch 1
and 8. The bare loop is what a careful person writes for one model and equal prompts: layers
unrolled, heads before positions in the cache, one slice written per token for all rows, 32 tokens
per device call. Both run the same weights and must give the same tokens.

    python benchmarks/decode.py                          # about three minutes
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
from typing import Any

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

LAYERS, DIM, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 8, 512, 8, 4, 64, 1408, 4096
PROMPT, NEW, CHUNK, EPS, BASE = 128, 128, 32, 1e-6, 10_000.0


def model(stack: str) -> CausalLM:
    """The same shape in axcore; ``stack`` says how its layers run."""
    linear, norm = Linear.Config(bias=False), RMSNorm.Config(eps=EPS)
    attention = Attention.Config(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        qkv=QKV.Config(query=linear, key=linear, value=linear),
        output=linear,
        query_key_transform=RoPE.Config(base=BASE),
    )
    feed_forward = FeedForward.Config(
        hidden_dim=FFN, activation="silu", up=linear, gate=linear, down=linear
    )
    layer = TransformerLayer.Config(
        attention_norm=norm,
        attention=attention,
        feed_forward_norm=norm,
        feed_forward=feed_forward,
    )
    form = StackedTransformer.Config() if stack == "layers" else RepeatedTransformer.Config()
    return CausalLM.Config(
        vocab_size=VOCAB,
        model_dim=DIM,
        max_seq_len=1024,
        position=None,
        decoder=Decoder.Config(num_layers=LAYERS, layer=layer, stack=form, final_norm=norm),
        lm_head=LMHead.Config(),
    ).instantiate(name="m")


# -- bare JAX ----------------------------------------------------------------------------------


def bare_params(state: Mapping[str, Any]) -> dict[str, Any]:
    """axcore's parameters (layer by layer) as the matrices that the bare loop uses."""
    layers = []
    for i in range(LAYERS):
        layer = state["decoder"]["layer"][str(i)]
        qkv, feed = layer["attention"]["qkv"], layer["feed_forward"]
        weights = [qkv[n]["weight"].reshape(DIM, -1) for n in ("query", "key", "value")]
        layers.append(
            dict(
                norm1=layer["attention_norm"]["scale"],
                norm2=layer["feed_forward_norm"]["scale"],
                q=weights[0],
                k=weights[1],
                v=weights[2],
                out=layer["attention"]["output"]["weight"].reshape(-1, DIM),
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


def rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * scale


def rope(x_bnth: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates the two halves of each head; positions (t,)."""
    inverse = BASE ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = positions[:, None] * inverse
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x_bnth, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def bare_forward(params: Any, caches: Any, ids: jax.Array, start: jax.Array) -> Any:
    """ids (b, t) at positions start.. -> caches, logits of the last token (b, vocab)."""
    b, t = ids.shape
    x = params["embedding"][ids]
    positions = start + jnp.arange(t)
    group = HEADS // KV_HEADS
    new = []
    for p, (keys, values) in zip(params["layers"], caches, strict=True):
        h = rms_norm(x, p["norm1"])
        q = (h @ p["q"]).reshape(b, t, HEADS, HEAD_DIM).transpose(0, 2, 1, 3)
        k = (h @ p["k"]).reshape(b, t, KV_HEADS, HEAD_DIM).transpose(0, 2, 1, 3)
        v = (h @ p["v"]).reshape(b, t, KV_HEADS, HEAD_DIM).transpose(0, 2, 1, 3)
        q, k = rope(q, positions), rope(k, positions)
        keys = jax.lax.dynamic_update_slice(keys, k, (0, 0, start, 0))
        values = jax.lax.dynamic_update_slice(values, v, (0, 0, start, 0))
        new.append((keys, values))
        q = q.reshape(b, KV_HEADS, group * t, HEAD_DIM) * HEAD_DIM**-0.5
        scores = jnp.einsum("bkqh,bksh->bkqs", q, keys)
        seen = jnp.arange(keys.shape[2]) <= positions[:, None]
        scores = jnp.where(jnp.tile(seen, (group, 1)), scores, -jnp.inf)
        out = jnp.einsum("bkqs,bksh->bkqh", jax.nn.softmax(scores, axis=-1), values)
        out = out.reshape(b, HEADS, t, HEAD_DIM).transpose(0, 2, 1, 3).reshape(b, t, -1)
        x = x + out @ p["out"]
        h = rms_norm(x, p["norm2"])
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return new, rms_norm(x[:, -1], params["norm"]) @ params["head"]


class Bare:
    """The hand-written loop."""

    def __init__(self, params: Any, batch: int):
        self._params = params
        shape = (batch, KV_HEADS, PROMPT + NEW, HEAD_DIM)

        @jax.jit
        def prefill(params: Any, ids: jax.Array) -> Any:
            caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(LAYERS)]
            caches, logits = bare_forward(params, caches, ids, jnp.int32(0))
            return caches, jnp.argmax(logits, axis=-1).astype(jnp.int32)

        def decode(params: Any, caches: Any, token: jax.Array, start: jax.Array) -> Any:
            def one(carry: Any, i: jax.Array) -> Any:
                caches, token = carry
                caches, logits = bare_forward(params, caches, token[:, None], start + i)
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


def ours(stack: str, state: Any) -> Callable[[np.ndarray], tuple[np.ndarray, float, float]]:
    """The Generator."""
    generator = Generator(model(stack), state, max_seq_len=1024, chunk=CHUNK)

    def run(prompts: np.ndarray) -> tuple[np.ndarray, float, float]:
        made = generator.generate(prompts.tolist(), NEW)
        return np.asarray(made.tokens), made.ttft_seconds, len(prompts) / made.tokens_per_second

    return run


def transformers_run(bare: Any) -> Callable[[np.ndarray], tuple[np.ndarray, float, float]] | None:
    """transformers on torch's CPU, or None where either is missing."""
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")):
        return None
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=EPS,
        rope_theta=BASE,
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


def measure(batch: int, rounds: int, forms: list[str]) -> dict[str, Any]:
    """Runs all forms in turn."""
    layered = model("layers")
    state = jax.tree.map(jnp.asarray, layered.initialize(jax.random.key(0)))
    # Fresh weights give nearly equal scores: sharper ones, so that rounding decides no token.
    state["lm_head"]["weight"] = state["lm_head"]["weight"] * 30
    bare = bare_params(state)
    prompts = np.random.default_rng(0).integers(0, VOCAB, (batch, PROMPT)).astype(np.int32)
    runs: dict[str, Any] = {"bare": Bare(bare, batch)}
    if "layers" in forms:
        runs["axcore layers"] = ours("layers", state)
    if "scan" in forms:
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *state["decoder"]["layer"].values())
        name = next(iter(model("scan").initialize(jax.random.key(0))["decoder"]["layer"]))
        scanned = {**state, "decoder": {**state["decoder"], "layer": {name: stacked}}}
        runs["axcore scan"] = ours("scan", scanned)
    if "transformers" in forms:
        other = transformers_run(bare)
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
    out: dict[str, Any] = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    out["vllm"] = "installed" if importlib.util.find_spec("vllm") else "not installed"
    out["transformers"] = (
        "installed"
        if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers")
        else "not installed"
    )
    for batch in args.batch:
        out[f"batch {batch}"] = results = measure(batch, args.rounds, args.forms)
        if not args.json:
            print(f"batch {batch}: {PROMPT} + {NEW} tokens")
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
