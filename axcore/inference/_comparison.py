"""How far a model that was made of another one computes something else."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.context import functional
from axcore.module import Module

__all__ = ["compare_logits", "logits_inputs"]

_PROBE_TOKENS = 64


def compare_logits(
    before: tuple[Module, Any], after: tuple[Module, Any], ids: jax.Array | None = None
) -> dict[str, float | None]:
    """Compares the logits of two models, which share a vocabulary.

    Args:
        before: Model and state.
        after: Model and state.
        ids: int32 (batch, length) token ids; None takes one fixed sequence of up to 64.

    Returns:
        ``max_abs_logit_difference``, in float32; ``max_abs_logit`` of the model before; and
        ``next_token_agreement``, the share of places where both think the same next token
        likeliest. All None for a model without ``logits``.
    """
    model, _ = before
    size = getattr(getattr(model, "cfg", None), "vocab_size", None)
    if not isinstance(size, int) or not callable(getattr(model, "logits", None)):
        names = ("max_abs_logit_difference", "max_abs_logit", "next_token_agreement")
        return dict.fromkeys(names)
    if ids is None:
        limit = getattr(model.cfg, "max_seq_len", None) or _PROBE_TOKENS
        ids = jnp.arange(min(_PROBE_TOKENS, limit), dtype=jnp.int32)[None] * 7919 % size

    def logits(module: Module, state: Any) -> jax.Array:
        inputs = logits_inputs(module, ids)
        return functional(module, state=state, inputs=inputs, is_training=False, method="logits")[0]

    one, other = (
        np.asarray(jax.jit(lambda s, m=module: logits(m, s))(state), np.float32)
        for module, state in (before, after)
    )
    return {
        "max_abs_logit_difference": float(np.max(np.abs(one - other))),
        "max_abs_logit": float(np.max(np.abs(one))),
        "next_token_agreement": float(np.mean(one.argmax(-1) == other.argmax(-1))),
    }


def logits_inputs(model: Any, ids: jax.Array) -> tuple[jax.Array, ...]:
    """Returns ``ids`` for each sequence that ``model.logits`` cannot do without.

    That is one, and two for an encoder-decoder, which reads what it continues.
    """
    required = [
        p
        for p in inspect.signature(model.logits).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return (ids,) * max(len(required), 1)
