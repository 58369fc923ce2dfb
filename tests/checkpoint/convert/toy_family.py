"""A made-up family of language models with converters for all formats, and a numpy forward pass.

The tests register it as a plugin would; nothing in axcore knows it.
"""

from __future__ import annotations

import numpy as np

from axcore import experiments
from axcore.checkpoint.convert import (
    Flatten,
    Fused,
    Ignored,
    ModelFamily,
    PairsToHalves,
    TensorRule,
    Tied,
    TorchLinear,
)
from axcore.errors import CheckpointError
from axcore.layers import LMHead, StackedTransformer


def experiment(vocab, dim, layers, heads, length, *, tied):
    cfg = experiments.get("tiny-lm")
    cfg.model.set(vocab_size=vocab, model_dim=dim, max_seq_len=length)
    cfg.model.decoder.set(num_layers=layers)
    cfg.model.decoder.layer.attention.set(num_heads=heads)
    cfg.model.decoder.set(stack=StackedTransformer.Config())
    cfg.set(batch_size=2, seq_len=length)
    if not tied:
        cfg.model.set(lm_head=LMHead.Config())
    return cfg


class HuggingFaceToy(ModelFamily):
    architecture = "ToyForCausalLM"

    def config(self, foreign, infos):
        foreign.expect("activation", "gelu_tanh")
        return experiment(
            foreign.require("vocab_size", int),
            foreign.require("hidden_size", int),
            foreign.require("num_layers", int),
            foreign.require("num_heads", int),
            foreign.require("max_length", int),
            tied=foreign.get("tie_word_embeddings", True),
        )

    def foreign_config(self, cfg):
        if cfg.model.decoder.layer.feed_forward.gate is not None:
            raise CheckpointError("it is gated", code="AX622")
        return {
            "activation": "gelu_tanh",
            "vocab_size": cfg.model.vocab_size,
            "hidden_size": cfg.model.model_dim,
            "num_layers": cfg.model.decoder.num_layers,
            "num_heads": cfg.model.decoder.layer.attention.num_heads,
            "max_length": cfg.model.max_seq_len,
            "tie_word_embeddings": cfg.model.lm_head is None,
        }

    query_key = TorchLinear()

    def rules(self, cfg):
        qkv = tuple(f"decoder/layer/{{i}}/attention/qkv/{x}" for x in ("query", "key", "value"))
        return [
            TensorRule("wte", "embedding/weight"),
            TensorRule("wpe", "position/weight"),
            *self.attention(qkv),
            TensorRule(
                "h.{i}.out.weight", "decoder/layer/{i}/attention/output/weight", TorchLinear(2)
            ),
            TensorRule("h.{i}.out.bias", "decoder/layer/{i}/attention/output/bias"),
            *[
                TensorRule(f"h.{{i}}.{theirs}.{part}", f"decoder/layer/{{i}}/{ours}/{kind}")
                for theirs, ours in (("ln1", "attention_norm"), ("ln2", "feed_forward_norm"))
                for part, kind in (("weight", "scale"), ("bias", "bias"))
            ],
            *[
                TensorRule(f"h.{{i}}.{x}.{kind}", f"decoder/layer/{{i}}/feed_forward/{x}/{kind}", t)
                for x in ("up", "down")
                for kind, t in (("weight", TorchLinear()), ("bias", Flatten()))
            ],
            TensorRule("lnf.weight", "decoder/final_norm/scale"),
            TensorRule("lnf.bias", "decoder/final_norm/bias", default=0.0),
            TensorRule("head", "lm_head/weight", TorchLinear()),
            Tied("head", same_as="wte"),
            Ignored("h.{i}.mask", "a constant"),
        ]

    def attention(self, qkv):
        weights = tuple(f"{path}/weight" for path in qkv)
        biases = tuple(f"{path}/bias" for path in qkv)
        return [
            TensorRule("h.{i}.qkv.weight", weights, Fused()),
            TensorRule("h.{i}.qkv.bias", biases, Fused(Flatten())),
        ]

    def oracle(self, source):
        arrays = {name: source.read(name).astype(np.float32) for name in source.infos}
        heads = source.config["num_heads"]
        return lambda ids: forward(arrays, ids, heads)


class NpzToy(HuggingFaceToy):
    architecture = "toy"


class GGUFToy(HuggingFaceToy):
    """Separate projections whose rows have rotary pairs side by side, as such files do."""

    architecture = "toy"

    def config(self, foreign, infos):
        return experiment(
            infos["wte"].shape[0],
            foreign.require("toy.hidden_size", int),
            foreign.require("toy.num_layers", int),
            foreign.require("toy.num_heads", int),
            foreign.require("toy.max_length", int),
            tied="head" not in infos,
        )

    def attention(self, qkv):
        rules = []
        for theirs, path in zip("qkv", qkv, strict=True):
            is_rotated = theirs != "v"
            weight = PairsToHalves() if is_rotated else TorchLinear()
            bias = PairsToHalves(Flatten()) if is_rotated else Flatten()
            rules += [
                TensorRule(f"h.{{i}}.{theirs}.weight", f"{path}/weight", weight),
                TensorRule(f"h.{{i}}.{theirs}.bias", f"{path}/bias", bias),
            ]
        return rules

    def oracle(self, source):
        return None


def forward(w, ids, heads):
    """The model in numpy, from the foreign tensors."""

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    length = ids.shape[1]
    x = w["wte"][ids] + w["wpe"][:length]
    layers = sum(name.endswith(".ln1.weight") for name in w)
    for i in range(layers):
        y = linear(norm(x, f"h.{i}.ln1"), f"h.{i}.qkv")
        q, k, v = (part.reshape(*ids.shape, heads, -1) for part in np.split(y, 3, -1))
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        scores = np.where(np.tri(length, dtype=bool), scores, -1e30)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
        x = x + linear(mixed, f"h.{i}.out")
        up = linear(norm(x, f"h.{i}.ln2"), f"h.{i}.up")
        up = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
        x = x + linear(up, f"h.{i}.down")
    return norm(x, "lnf") @ w.get("head", w["wte"]).T
