"""A language model in numpy float64, written from the papers: what seams are compared with."""

from __future__ import annotations

import math

import numpy as np


def _arrays(tree):
    return {
        k: _arrays(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in tree.items()
    }


def _einsum(spec, a, b):
    return np.einsum(spec, a, b)


def _layer_norm(x, p):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def rms_norm(x, p):
    """Root-mean-square normalization."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"]


def _gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def _feed_forward(x, p, dot):
    h = _gelu_tanh(dot("btd,dm->btm", x, p["up"]["weight"]) + p["up"]["bias"])
    return dot("btm,md->btd", h, p["down"]["weight"]) + p["down"]["bias"]


def _attention(x, p, dot, rotate, window):
    def project(name):
        child = p["qkv"][name]
        return dot("btd,dnh->btnh", x, child["weight"]) + child["bias"]

    q, k, v = (project(name) for name in ("query", "key", "value"))
    if rotate is not None:
        q, k = rotate(q), rotate(k)
    repeats = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, repeats, axis=2), np.repeat(v, repeats, axis=2)
    logits = dot("btnh,bsnh->bnts", q, k) / math.sqrt(q.shape[-1])
    ahead = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])[None]
    seen = (ahead >= 0) & (ahead < window)
    logits = np.where(seen, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    out = dot("bnts,bsnh->btnh", weights, v) / weights.sum(-1).swapaxes(1, 2)[..., None]
    return dot("btnh,nhd->btd", out, p["output"]["weight"]) + p["output"]["bias"]


def logits(
    params,
    ids,
    *,
    dot=_einsum,
    rotate=None,
    norm=_layer_norm,
    window=math.inf,
    feed_forward=_feed_forward,
):
    """Logits (batch, seq, vocab) of an unrolled ``CausalLM`` with a tied head.

    Args:
        params: The state, nested dicts.
        ids: (batch, seq) ints.
        dot: ``(einsum spec, lhs, rhs)`` of every product.
        rotate: Transform of queries and of keys, (batch, seq, heads, head_dim).
        norm: ``(x, parameters)`` of every norm.
        window: Number of last tokens that each token sees.
        feed_forward: ``(x, parameters, dot)``.
    """
    p = _arrays(params)
    x = p["embedding"]["weight"][ids]
    if "position" in p:
        x = x + p["position"]["weight"][: ids.shape[1]]
    for i in range(len(p["decoder"]["layer"])):
        layer = p["decoder"]["layer"][str(i)]
        x = x + _attention(
            norm(x, layer["attention_norm"]), layer["attention"], dot, rotate, window
        )
        x = x + feed_forward(norm(x, layer["feed_forward_norm"]), layer["feed_forward"], dot)
    x = norm(x, p["decoder"]["final_norm"])
    return dot("btd,vd->btv", x, p["embedding"]["weight"])


def loss(params, batch, **kwargs):
    """Mean cross-entropy of all targets, nats."""
    z = logits(params, batch["input_ids"], **kwargs)
    top = z.max(-1, keepdims=True)
    log_probs = z - top - np.log(np.exp(z - top).sum(-1, keepdims=True))
    return -np.take_along_axis(log_probs, batch["target_ids"][..., None], -1).mean()
