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
    "BaseAttentionBias",
    "BaseDecoder",
    "BaseDropout",
    "BaseEmbedding",
    "BaseFeedForward",
    "BaseGroupedLinear",
    "BaseHead",
    "BaseKVCache",
    "BaseMultiToken",
    "BaseNorm",
    "BasePooler",
    "BasePosition",
    "BaseQKV",
    "BaseQueryKeyTransform",
    "BaseSharedValues",
    "BaseTransformerLayer",
    "SequenceInfo",
    "with_ids",
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
        token_values: Further values of each token by name, (batch, seq, ...), such as the positions
            on several axes of an image's tokens. Models of tokens give their ids, (batch, seq)
            int32, as ``input_ids``.
        prefix_lengths: (batch,) int32, how many first tokens every token sees, of each document of
            the row; read by attention whose mask is ``PrefixLM(None)``.
        memory: (batch, source, dim) what cross attention reads, an encoder's output. Not needed in
            ``decode``, which reads the cache that ``prefill`` filled.
        memory_segment_ids: (batch, source) int32 segment of each position of ``memory``, 0 for
            padding; None: all of it belongs to the whole row.
        shared: Arrays that a model computes once for all its layers, by name; see
            ``BaseSharedValues``.
        purpose: ``train`` computes whole sequences, ``prefill`` and ``decode`` use the cache.
    """

    positions: jax.Array
    segment_ids: jax.Array | None = None
    layer_values: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    token_values: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    prefix_lengths: jax.Array | None = None
    memory: jax.Array | None = None
    memory_segment_ids: jax.Array | None = None
    shared: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)
    purpose: Literal["train", "prefill", "decode"] = dataclasses.field(
        default="train", metadata=dict(static=True)
    )


def with_ids(
    input_ids: jax.Array, others: Mapping[str, jax.Array] | None = None
) -> dict[str, jax.Array]:
    """Returns ``token_values`` with the tokens' ids, for layers that go by them.

    Args:
        input_ids: int32 (batch, seq).
        others: Further values of each token.
    """
    return {"input_ids": input_ids, **(others or {})}


class BaseGroupedLinear(Layer):
    """Role of linear layers with a matrix for each of several groups of rows.

    Its product is the child ``dot``, and its parameter ``weight`` has the shape (groups, in, out).
    """

    class Config(Layer.Config):
        """No fields."""

    @abc.abstractmethod
    def forward(self, x: jax.Array) -> jax.Array:
        """(groups, rows, in) -> (groups, rows, out)."""


class BaseNorm(Layer):
    """Normalizes over the last dim: ``forward(x: (..., input_dim)) -> (..., input_dim)``."""

    class Config(Layer.Config):
        """The parent sets ``input_dim``, and ``axis`` where it is not the model's dim."""

        input_dim: Required[int] = REQUIRED
        # Logical axis of the parameters.
        axis: str | None = "embed"

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
    """Self- or cross attention: ``forward(x: (batch, seq, input_dim), info) -> same shape``."""

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
        """The attention layer sets all of these."""

        num_heads: Required[int] = REQUIRED
        num_kv_heads: Required[int] = REQUIRED
        head_dim: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(
        self, q: jax.Array, k: jax.Array, info: SequenceInfo
    ) -> tuple[jax.Array, jax.Array]:
        """Returns q (batch, seq, heads, head_dim) and k (batch, seq, kv_heads, head_dim)."""


class BaseAttentionBias(Layer):
    """Makes what is added to the attention logits, from the positions of queries and keys."""

    class Config(Layer.Config):
        """The attention layer sets ``num_heads``."""

        num_heads: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(
        self, q_positions: jax.Array, kv_positions: jax.Array, info: SequenceInfo
    ) -> jax.Array:
        """Returns the bias of a block of logits.

        Args:
            q_positions: (seq,) or (batch, seq) int; negative ones are padding.
            kv_positions: (keys,) or (batch, keys) int; what a query may not see is masked.
            info: Of the queries.

        Returns:
            float32 (1 or batch, num_heads, seq, keys).
        """


class BaseSharedValues(Layer):
    """Makes arrays that all layers of a stack share: ``forward(info) -> {name: array}``.

    The layers read them in ``info.shared``. So a stack owns one parameter that each layer uses, and
    no layer refers to another.
    """

    class Config(Layer.Config):
        """The stack's owner sets ``input_dim``, the model's dim."""

        input_dim: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(self, info: SequenceInfo) -> Mapping[str, jax.Array]:
        """Returns the arrays by the names under which layers read them."""


class BaseKVCache(Layer):
    """Stores the tensors that attention declares and hands back an opaque view of them.

    The cache lives in the state like a parameter does, is read from the running context and written
    as a state update. ``kind`` of the view is what kernels match on.
    """

    class Config(Layer.Config):
        """The attention layer sets all of these; ``tensors`` has each one's per-token shape."""

        tensors: Required[Mapping[str, tuple[int, ...]]] = REQUIRED
        axes: Required[Mapping[str, tuple[str | None, ...]]] = REQUIRED
        # Whether it holds what cross attention reads instead of the sequence itself; such caches
        # have room for the source's length.
        memory: bool = False

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


class BaseEmbedding(BaseHead):
    """Looks tokens up, and scores hidden states against the same vectors (the tied head)."""

    class Config(BaseHead.Config):
        """The model sets ``input_dim`` and ``vocab_size``."""

    @abc.abstractmethod
    def forward(self, ids: jax.Array) -> jax.Array:
        """int32 (batch, seq) -> (batch, seq, input_dim)."""


class BaseDecoder(Layer):
    """The body of a model: ``forward(x: (batch, seq, input_dim), info) -> same shape``."""

    class Config(Layer.Config):
        """The model sets ``input_dim``."""

        input_dim: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """Transforms (batch, seq, input_dim)."""


class BaseDropout(Layer):
    """Noise in training: ``forward(x) -> same shape and dtype``; the identity otherwise."""

    class Config(Layer.Config):
        """No fields."""

    @abc.abstractmethod
    def forward(self, x: jax.Array) -> jax.Array:
        """Returns ``x``, or in training its noisy form."""


class BasePooler(Layer):
    """Makes one vector of a sequence."""

    class Config(Layer.Config):
        """The model sets ``input_dim``."""

        input_dim: Required[int] = REQUIRED

    @abc.abstractmethod
    def forward(self, hidden: jax.Array, valid: jax.Array | None = None) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, input_dim).

        Args:
            hidden: The encoder's output.
            valid: (batch, seq) bool, False for padding; None: there is none.
        """


class BaseMultiToken(Layer):
    """Predicts further tokens than the next in training; see ``CausalLM.Config.multi_token``."""

    class Config(Layer.Config):
        """The model sets ``input_dim``."""

        input_dim: Required[int] = REQUIRED
        # Weight of the mean of the depths' losses (0.3, then 0.1 in arXiv:2412.19437, section 4.2).
        loss_weight: float = 0.3

    @abc.abstractmethod
    def forward(
        self, hidden: jax.Array, embeddings: jax.Array, info: SequenceInfo
    ) -> tuple[jax.Array, ...]:
        """Returns (batch, seq, input_dim) for each depth, from which the model's head predicts.

        Args:
            hidden: (batch, seq, input_dim), the decoder's output.
            embeddings: (batch, seq, input_dim), looked up from the same tokens.
            info: Of the sequence.

        Returns:
            Depth k (from 1) at token i is for token i + k + 1.
        """
