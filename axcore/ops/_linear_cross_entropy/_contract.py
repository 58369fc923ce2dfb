"""The contract of linear cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from axcore.errors import OpError
from axcore.ops._select import Operand, dispatch

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]


class LinearCrossEntropy(NamedTuple):
    """Per-token results, each of the targets' shape; zero (False) where the mask is False.

    Attributes:
        loss: float32 cross-entropy in nats.
        z_loss: float32 squared log-partition, ``logsumexp(logits) ** 2``; weigh it yourself.
        correct: bool, whether the target's logit is the largest (ties count).
    """

    loss: jax.Array
    z_loss: jax.Array
    correct: jax.Array


def linear_cross_entropy(
    hidden: Float[Array, "*B D"],
    weight: Float[Array, "V D"] | Float[Array, "D V"],
    targets: Int[Array, "*B"],
    mask: Bool[Array, "*B"] | Float[Array, "*B"] | None = None,
    *,
    layout: Literal["vd", "dv"] = "vd",
    logit_cap: float | None = None,
    label_smoothing: float = 0.0,
    valid_vocab_size: int | None = None,
    chunk_tokens: int | None = None,
    dot_general: Callable[..., jax.Array] | None = None,
    implementation: str | None = None,
) -> LinearCrossEntropy:
    r"""Cross-entropy of ``hidden @ weight`` against targets, without the full logits.

    .. math::
        l = \mathrm{cap}(h W^\top), \quad \mathrm{loss} = \log\sum_v e^{l_v} - (1 - s)\, l_t
        - \frac{s}{V} \sum_v l_v, \quad z = \Big(\log\sum_v e^{l_v}\Big)^2

    Tokens are taken in chunks; the backward pass computes each chunk's logits once more. Up to
    2**24 logits (64 MiB) or 512 tokens per device there is one chunk and nothing is computed twice.

    Args:
        hidden: (..., D) final hidden states.
        weight: (V, D) as an embedding table (``layout="vd"``) or (D, V) (``"dv"``); neither is
            copied transposed. Multiplied in hidden's dtype; logits, sums and losses are float32.
        targets: (...) int token ids in [0, V). Negative ids are masked; the loss of one past the
            vocabulary, or past ``valid_vocab_size``, is NaN.
        mask: (...) bool, or numbers of which zero means masked. Masked tokens give zeros and no
            gradient, whatever their target.
        layout: Which dim of ``weight`` is the vocabulary.
        logit_cap: Soft cap ``cap * tanh(logit / cap)``, or None.
        label_smoothing: s in the formula, in [0, 1).
        valid_vocab_size: Size of the vocabulary when V is padded; entries past it take no part.
        chunk_tokens: Tokens per chunk on one device; by default such that a chunk has up to 2**24
            logits, and 512 at least.
        dot_general: Replaces ``jax.lax.dot_general`` and is called like it; a function, or a child
            such as :class:`DotGeneral` (quantization).
        implementation: Forces a kernel by name.

    Returns:
        Loss, z-loss and correctness per token.

    Raises:
        OpError: Shapes or options do not fit, or no acceptable kernel serves the call.

    References:
        Cut cross-entropy, arXiv:2411.09009; z-loss: arXiv:2204.02311, section 5.
    """
    _check(hidden, weight, targets, mask, layout, label_smoothing, valid_vocab_size, chunk_tokens)
    vocab_size = weight.shape[0 if layout == "vd" else 1]
    if valid_vocab_size == vocab_size:
        valid_vocab_size = None
    lead = ("batch", "seq") if targets.ndim == 2 else ("batch",) * min(1, targets.ndim)
    lead = (*lead, *(None,) * (targets.ndim - len(lead)))
    static = {
        "layout": layout,
        "logit_cap": logit_cap,
        "label_smoothing": label_smoothing,
        "valid_vocab_size": valid_vocab_size,
    }
    losses: LinearCrossEntropy = dispatch(
        "linear_cross_entropy",
        {
            "hidden": Operand(hidden, (*lead, "embed")),
            "weight": Operand(weight, ("vocab", "embed") if layout == "vd" else ("embed", "vocab")),
            "targets": Operand(targets, lead),
            "mask": Operand(mask, lead),
        },
        output_axes=LinearCrossEntropy(*cast("tuple[Any, Any, Any]", (lead, lead, lead))),
        static={**static, "chunk_tokens": chunk_tokens, "dot_general": dot_general},
        options={**static, "dot_general": "replaced" if dot_general else "default"},
        implementation=implementation,
    )
    # Kernels that compare ids with places, and padding, would give it some number.
    unknown = targets >= (valid_vocab_size or vocab_size)
    if mask is not None:
        unknown &= mask.astype(bool)
    return losses._replace(
        loss=jnp.where(unknown, jnp.nan, losses.loss), correct=losses.correct & ~unknown
    )


def _check(
    hidden: jax.Array,
    weight: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None,
    layout: str,
    label_smoothing: float,
    valid_vocab_size: int | None,
    chunk_tokens: int | None,
) -> None:
    if layout not in ("vd", "dv"):
        raise OpError(f"layout is {layout!r}, expected 'vd' or 'dv'", code="AX402")
    v_dim, d_dim = (0, 1) if layout == "vd" else (1, 0)
    fits = (
        weight.ndim == 2
        and hidden.ndim >= 1
        and weight.shape[d_dim] == hidden.shape[-1]
        and targets.shape == hidden.shape[:-1]
        and (mask is None or mask.shape == targets.shape)
    )
    if not fits:
        raise OpError(
            f"linear_cross_entropy got hidden {hidden.shape}, weight {weight.shape} (layout"
            f" {layout!r}), targets {targets.shape}, mask {None if mask is None else mask.shape}:"
            " expected (..., D), (V, D) or (D, V), (...), (...)",
            code="AX402",
            hint="is the layout right? 'vd' is an embedding table, 'dv' a projection",
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise OpError(f"label_smoothing is {label_smoothing}, expected [0, 1)", code="AX402")
    if valid_vocab_size is not None and not 0 < valid_vocab_size <= weight.shape[v_dim]:
        raise OpError(
            f"valid_vocab_size is {valid_vocab_size}, expected 1 to {weight.shape[v_dim]}",
            code="AX402",
        )
    if chunk_tokens is not None and chunk_tokens < 1:
        raise OpError(f"chunk_tokens is {chunk_tokens}, expected at least 1", code="AX402")
