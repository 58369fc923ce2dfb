"""Token embedding, tied and untied heads, learned positions."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

from axcore import ops
from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.layers.base import BETWEEN_BRANCHES, Layer
from axcore.layers.initializers import Normal, VarianceScaling, Zeros
from axcore.layers.linear import replacement
from axcore.layers.roles import BaseEmbedding, BaseHead, BasePosition, SequenceInfo
from axcore.module import Initializer
from axcore.ops import DotGeneral, LinearCrossEntropy

__all__ = ["Embedding", "LMHead", "LearnedPositions", "add_lm_head", "add_position"]


class Embedding(BaseEmbedding):
    """Token embedding that is also the tied output head: look-up and head are one module.

    The weight is (vocab_size, input_dim); ``logits(h) = h W^T`` (Press & Wolf, arXiv:1608.05859).
    """

    class Config(BaseEmbedding.Config):
        """The model sets ``input_dim`` and ``vocab_size``."""

        # Pads the weight's vocabulary to a multiple, so that it can be split; nothing else changes.
        vocab_multiple_of: int = 1
        weight_init: Initializer = Normal(stddev=0.02)
        # Multiplies the looked-up embeddings (Gemma: sqrt(input_dim)); the head is not scaled.
        embedding_scale: float = 1.0
        # Multiplies the hidden states that the tied head reads (T5: input_dim ** -0.5).
        head_scale: float = 1.0
        # Whether the tied head has a bias (vocab_size,) of its own (BERT).
        head_bias: bool = False
        logit_cap: float | None = None
        dot: DotGeneral.Config = DotGeneral.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._check_positive("logit_cap")
        self._padding = padding = _vocab_padding(self)
        self._add_weight(
            "weight",
            (cfg.vocab_size + padding, cfg.input_dim),
            ("vocab", "embed"),
            cfg.weight_init,
            fan_in_dims=(1,),
            fan_out_dims=(0,),
            padding=(padding, 0) if padding else (),
        )
        if cfg.head_bias:
            _add_bias(self, "head_bias", padding)
        self.dot = self._add_child("dot", cfg.dot, DotGeneral)

    def forward(self, ids: jax.Array) -> jax.Array:
        """int32 (batch, seq) -> (batch, seq, input_dim); unknown ids give NaN rows."""
        if self._padding:  # an unknown id must not find the padding
            vocab_size = self.cfg.vocab_size
            ids = jnp.where(ids < 0, ids + vocab_size, ids)
            known = (ids >= 0) & (ids < vocab_size)
            ids = jnp.where(known, ids, vocab_size + self._padding)
        x = jnp.take(self._param("weight"), ids, axis=0, mode="fill")
        if self.cfg.embedding_scale != 1.0:
            x = x * jnp.asarray(self.cfg.embedding_scale, x.dtype)
        return self._constrain(x, *BETWEEN_BRANCHES)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """(..., input_dim) -> float32 (..., vocab_size)."""
        dims = (((hidden.ndim - 1,), (1,)), ((), ()))
        return _logits(self, self._scaled(hidden), dims, self._bias())

    def cross_entropy(
        self, hidden: jax.Array, targets: jax.Array, mask: jax.Array | None = None
    ) -> LinearCrossEntropy:
        """Returns per-token losses of (batch, seq, input_dim); full logits never exist."""
        return _cross_entropy(self, self._scaled(hidden), targets, mask, "vd", self._bias())

    def _scaled(self, hidden: jax.Array) -> jax.Array:
        scale = self.cfg.head_scale
        return hidden if scale == 1.0 else hidden * jnp.asarray(scale, hidden.dtype)

    def _bias(self) -> jax.Array | None:
        return self._param("head_bias", "float32") if self.cfg.head_bias else None


class LMHead(BaseHead):
    """An output head of its own, ``logits(h) = h W``, with a weight of (input_dim, vocab_size)."""

    class Config(BaseHead.Config):
        """The model sets ``input_dim`` and ``vocab_size``."""

        bias: bool = False
        # Pads the weight's vocabulary to a multiple, so that it can be split; nothing else changes.
        vocab_multiple_of: int = 1
        weight_init: Initializer = VarianceScaling()
        logit_cap: float | None = None
        dot: DotGeneral.Config = DotGeneral.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._check_positive("logit_cap")
        self._padding = padding = _vocab_padding(self)
        self._add_weight(
            "weight",
            (cfg.input_dim, cfg.vocab_size + padding),
            ("embed", "vocab"),
            cfg.weight_init,
            fan_in_dims=(0,),
            fan_out_dims=(1,),
            padding=(0, padding) if padding else (),
        )
        if cfg.bias:
            _add_bias(self, "bias", padding)
        self.dot = self._add_child("dot", cfg.dot, DotGeneral)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """(..., input_dim) -> float32 (..., vocab_size)."""
        return _logits(self, hidden, (((hidden.ndim - 1,), (0,)), ((), ())), self._bias())

    def cross_entropy(
        self, hidden: jax.Array, targets: jax.Array, mask: jax.Array | None = None
    ) -> LinearCrossEntropy:
        """Returns per-token losses of (batch, seq, input_dim); full logits never exist."""
        return _cross_entropy(self, hidden, targets, mask, "dv", self._bias())

    def _bias(self) -> jax.Array | None:
        return self._param("bias", "float32") if self.cfg.bias else None


def _logits(
    head: Embedding | LMHead, hidden: jax.Array, dims: Any, bias: jax.Array | None
) -> jax.Array:
    hidden = hidden.astype(head.compute_dtype)
    weight = head._param("weight")
    logits = head.dot(hidden, weight, dims, preferred_element_type=jnp.float32)
    if bias is not None:
        logits = logits + bias
    if head._padding:
        logits = logits[..., : head.cfg.vocab_size]
    cap = head.cfg.logit_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def _cross_entropy(
    head: Embedding | LMHead,
    hidden: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None,
    layout: Literal["vd", "dv"],
    bias: jax.Array | None,
) -> LinearCrossEntropy:
    hidden = hidden.astype(head.compute_dtype)
    weight = head._param("weight")
    if bias is not None:
        # One more dim that is always 1, so that every kernel serves a head with a bias.
        axis = layout.index("d")
        hidden = jnp.concatenate([hidden, jnp.ones_like(hidden[..., :1])], axis=-1)
        column = jnp.expand_dims(bias.astype(weight.dtype), axis)
        weight = jnp.concatenate([weight, column], axis=axis)
    return ops.linear_cross_entropy(
        hidden,
        weight,
        targets,
        mask,
        layout=layout,
        logit_cap=head.cfg.logit_cap,
        valid_vocab_size=head.cfg.vocab_size,
        dot_general=replacement(head.dot),
    )


def _vocab_padding(head: Embedding | LMHead) -> int:
    """Entries that make the vocabulary a multiple of ``vocab_multiple_of``."""
    cfg = head.cfg
    if cfg.vocab_multiple_of < 1:
        raise ModuleError(
            f"vocab_multiple_of is {cfg.vocab_multiple_of}, expected at least 1",
            code="AX475",
            where=head.config_path,
            hint="the number of devices that split the vocabulary, or a multiple of it",
        )
    return -cfg.vocab_size % cfg.vocab_multiple_of


def _add_bias(head: Embedding | LMHead, name: str, padding: int) -> None:
    shape = (head.cfg.vocab_size + padding,)
    padded = (padding,) if padding else ()
    head._add_weight(name, shape, ("vocab",), Zeros(), weight_decay=False, padding=padded)


class LearnedPositions(BasePosition):
    """Adds a learned vector per position (GPT-2)."""

    class Config(BasePosition.Config):
        """The model sets ``max_seq_len``, in tokens."""

        max_seq_len: Required[int] = REQUIRED
        weight_init: Initializer = Normal(stddev=0.02)

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        shape = (cfg.max_seq_len, cfg.input_dim)
        self._add_weight("weight", shape, (None, "embed"), cfg.weight_init, weight_decay=False)

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) plus vectors of ``info.positions``; padding (-1) adds row 0."""
        if x.shape[1] > self.cfg.max_seq_len:
            raise ModuleError(
                f"a sequence of {x.shape[1]} tokens exceeds the {self.cfg.max_seq_len} positions",
                code="AX344",
                where=self.path,
                hint="shorten the sequence (seq_len) or raise the model's max_seq_len",
            )
        positions = jnp.maximum(info.positions, 0)
        return x + jnp.take(self._param("weight"), positions, axis=0, mode="fill")


def add_lm_head(model: Layer) -> BaseHead | None:
    """Adds a model's own head; None where its embedding is the head."""
    cfg = model.cfg
    if cfg.lm_head is None:
        return None
    dims = {"input_dim": cfg.model_dim, "vocab_size": cfg.vocab_size}
    return model._add_child("lm_head", cfg.lm_head, BaseHead, **dims)


def add_position(
    model: Layer, name: str, cfg: BasePosition.Config | None, max_seq_len: int | None = None
) -> BasePosition | None:
    """Adds a model's positions, telling those that have a limit the model's ``max_seq_len``."""
    if cfg is None:
        return None
    limit: dict[str, Any] = {}
    if "max_seq_len" in cfg.fields():
        limit = {"max_seq_len": model.cfg.max_seq_len if max_seq_len is None else max_seq_len}
    return model._add_child(name, cfg, BasePosition, input_dim=model.cfg.model_dim, **limit)
