"""Roles: the abstract modules that replaceable slots are annotated with.

A role states the call interface and the dims that a parent sets. A slot
``feed_forward: BaseFeedForward.Config = FeedForward.Config()`` accepts any implementation, such as
a third party's mixture of experts.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax

from axcore.config import REQUIRED, Required
from axcore.layers.base import Layer
from axcore.module import no_context
from axcore.ops import LinearCrossEntropy

__all__ = [
    "BaseAttention",
    "BaseFeedForward",
    "BaseHead",
    "BaseKVCache",
    "BaseNorm",
    "BasePosition",
    "BaseQKV",
    "BaseQueryKeyTransform",
    "BaseTransformerLayer",
    "SequenceInfo",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceInfo:
    """What a transformer knows of its tokens beside their embeddings.

    One value, so that a new feature adds a field and changes no signature.

    Attributes:
        positions: (batch, seq) int32 position of each token in its document.
        segment_ids: (batch, seq) int32, tokens attend within equal ids; 0 is padding. None: one
            document a row.
        layer_values: Scalars of the running layer by name (window, rotary base, ...); see
            ``BaseStack.Config.layer_values``.
        purpose: ``train`` computes whole sequences, ``prefill`` and ``decode`` use the cache.
    """

    positions: jax.Array
    segment_ids: jax.Array | None = None
    layer_values: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    purpose: Literal["train", "prefill", "decode"] = dataclasses.field(
        default="train", metadata=dict(static=True)
    )


class BaseNorm(Layer):
    """Normalizes over the last dim: ``forward(x: (..., input_dim)) -> (..., input_dim)``."""

    class Config(Layer.Config):
        """The parent sets ``input_dim``."""

        input_dim: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(self, x: jax.Array) -> jax.Array:
        """Normalizes (..., input_dim)."""


class BaseFeedForward(Layer):
    """Position-wise network: ``forward(x: (batch, seq, input_dim), info) -> same shape``."""

    class Config(Layer.Config):
        """The parent sets ``input_dim``."""

        input_dim: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """Transforms (batch, seq, input_dim)."""


class BaseAttention(Layer):
    """Self-attention: ``forward(x: (batch, seq, input_dim), info) -> same shape``."""

    class Config(Layer.Config):
        """The parent sets ``input_dim``."""

        input_dim: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """Attends over (batch, seq, input_dim)."""


class BaseTransformerLayer(Layer):
    """One layer of a stack: ``forward(x: (batch, seq, input_dim), info) -> same shape``."""

    class Config(Layer.Config):
        """The parent sets ``input_dim``."""

        input_dim: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """Transforms (batch, seq, input_dim)."""


class BasePosition(Layer):
    """Adds position to embeddings: ``forward(x: (batch, seq, input_dim), info) -> same shape``."""

    class Config(Layer.Config):
        """The parent sets ``input_dim``."""

        input_dim: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """Returns embeddings that carry position."""


class BaseQKV(Layer):
    """Makes queries, keys and values of hidden states."""

    class Config(Layer.Config):
        """The attention layer sets all of these."""

        input_dim: Required[int] = REQUIRED
        num_heads: Required[int] = REQUIRED
        num_kv_heads: Required[int] = REQUIRED
        head_dim: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(batch, seq, input_dim) -> q (batch, seq, num_heads, head_dim), k and v with kv heads."""


class BaseQueryKeyTransform(Layer):
    """Transforms queries and keys before attention: rotary embeddings, QK-norm, scaling."""

    class Config(Layer.Config):
        """The attention layer sets ``head_dim``."""

        head_dim: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(
        self, q: jax.Array, k: jax.Array, info: SequenceInfo
    ) -> tuple[jax.Array, jax.Array]:
        """Returns q (batch, seq, heads, head_dim) and k (batch, seq, kv_heads, head_dim)."""


class BaseKVCache(Layer):
    """Stores the tensors that attention declares and hands back an opaque view of them.

    The cache lives in the state like a parameter does, is read from the running context and written
    as a state update. ``kind`` of the view is what kernels match on.
    """

    class Config(Layer.Config):
        """The attention layer sets ``tensors``: per-token shape of each named tensor."""

        tensors: Required[Mapping[str, tuple[int, ...]]] = REQUIRED
        axes: Required[Mapping[str, tuple[str | None, ...]]] = REQUIRED

    @no_context
    @abc.abstractmethod
    def init(self, batch: int, max_len: int) -> dict[str, Any]:
        """Returns the empty cache of this module for ``batch`` rows of up to ``max_len`` tokens."""

    @abc.abstractmethod
    def extend(self, values: Mapping[str, jax.Array], info: SequenceInfo) -> Any:
        """Stores (batch, seq, ...) tensors at ``info.positions`` and returns the view.

        Negative positions are padding and are not stored.
        """

    @abc.abstractmethod
    def rollback(self, lengths: jax.Array) -> None:
        """Forgets all but the first ``lengths`` (batch,) tokens of each row."""


class BaseHead(Layer):
    """Turns hidden states into scores over the vocabulary."""

    class Config(Layer.Config):
        """The model sets both."""

        input_dim: Required[int] = REQUIRED
        vocab_size: Required[int] = REQUIRED

    @abc.abstractmethod
    def logits(self, hidden: jax.Array) -> jax.Array:
        """(..., input_dim) -> float32 (..., vocab_size)."""

    @abc.abstractmethod
    def cross_entropy(
        self, hidden: jax.Array, targets: jax.Array, mask: jax.Array | None = None
    ) -> LinearCrossEntropy:
        """Per-token results of (batch, seq, input_dim) against int32 (batch, seq) targets."""
