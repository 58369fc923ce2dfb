"""EncoderModel: token, type and position embeddings, a bidirectional stack, heads on top."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore import ops
from axcore.config import REQUIRED, Dim, Required, scaled
from axcore.errors import ModuleError
from axcore.layers._token_losses import add_token_losses
from axcore.layers.base import Layer
from axcore.layers.decoder import Encoder
from axcore.layers.dropout import Dropout
from axcore.layers.embedding import Embedding, LearnedPositions, add_lm_head, add_position
from axcore.layers.initializers import Normal
from axcore.layers.linear import Linear
from axcore.layers.norm import LayerNorm
from axcore.layers.roles import (
    BaseDecoder,
    BaseDropout,
    BaseEmbedding,
    BaseFeedForward,
    BaseHead,
    BaseNorm,
    BasePooler,
    BasePosition,
    SequenceInfo,
    with_ids,
)
from axcore.module import Initializer
from axcore.ops import LinearCrossEntropy

__all__ = ["EncoderModel", "HeadTransform"]


class HeadTransform(BaseFeedForward):
    """``norm(activation(dense(x)))`` before a masked language model's head (BERT)."""

    class Config(BaseFeedForward.Config):
        """The model sets ``input_dim``."""

        dense: Linear.Config = Linear.Config()
        activation: str = "gelu"
        norm: BaseNorm.Config = LayerNorm.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        dim = cfg.input_dim
        self.dense = self._add_child(
            "dense", cfg.dense, Linear, input_dim=dim, output_dim=dim, axes=("embed", None)
        )
        self.norm = self._add_child("norm", cfg.norm, BaseNorm, input_dim=dim)
        self._activation = ops.activation(cfg.activation)

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        del info
        return self.norm(self._activation(self.dense(x)))


class EncoderModel(Layer):
    """A bidirectional encoder of text (BERT; Devlin et al., arXiv:1810.04805).

    Methods: ``forward`` (the loss of masked tokens), ``logits``, ``hidden`` and ``pooled``. Padding
    is segment 0.
    """

    class Config(Layer.Config):
        """``lm_head=None`` ties the head to the embedding."""

        vocab_size: Required[int] = REQUIRED
        model_dim: Required[int] = REQUIRED
        # Longest sequence in tokens; the trainer's seq_len unless set.
        max_seq_len: Dim = scaled(1, of="seq_len")
        embedding: BaseEmbedding.Config = Embedding.Config()
        # Kinds of tokens that have a vector each (first and second sentence); 0 for none.
        num_token_types: int = 0
        token_type_init: Initializer = Normal(stddev=0.02)
        position: BasePosition.Config | None = LearnedPositions.Config()
        embedding_norm: BaseNorm.Config | None = LayerNorm.Config()
        dropout: BaseDropout.Config = Dropout.Config()
        encoder: BaseDecoder.Config = Encoder.Config()
        pooler: BasePooler.Config | None = None
        # Runs on what the head reads, before it.
        head_transform: BaseFeedForward.Config | None = None
        lm_head: BaseHead.Config | None = None

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        dim = cfg.model_dim
        self.embedding = self._add_child(
            "embedding", cfg.embedding, BaseEmbedding, input_dim=dim, vocab_size=cfg.vocab_size
        )
        if cfg.num_token_types:
            self._add_weight(
                "token_types",
                (cfg.num_token_types, dim),
                (None, "embed"),
                cfg.token_type_init,
                weight_decay=False,
            )
        self.position = add_position(self, "position", cfg.position)
        self.embedding_norm: BaseNorm | None = None
        if cfg.embedding_norm is not None:
            self.embedding_norm = self._add_child(
                "embedding_norm", cfg.embedding_norm, BaseNorm, input_dim=dim
            )
        self.dropout = self._add_child("dropout", cfg.dropout, BaseDropout)
        self.encoder = self._add_child("encoder", cfg.encoder, BaseDecoder, input_dim=dim)
        self.pooler: BasePooler | None = None
        if cfg.pooler is not None:
            self.pooler = self._add_child("pooler", cfg.pooler, BasePooler, input_dim=dim)
        self.head_transform: BaseFeedForward | None = None
        if cfg.head_transform is not None:
            self.head_transform = self._add_child(
                "head_transform", cfg.head_transform, BaseFeedForward, input_dim=dim
            )
        self.lm_head = add_lm_head(self)

    @property
    def _head(self) -> BaseHead:
        return self.embedding if self.lm_head is None else self.lm_head

    def forward(
        self,
        input_ids: jax.Array,
        target_ids: jax.Array,
        target_mask: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        token_types: jax.Array | None = None,
    ) -> LinearCrossEntropy:
        """Adds the cross-entropy over the masked tokens, in nats per token.

        Args:
            input_ids: int32 (batch, seq), some of them replaced by a mask token.
            target_ids: int32 (batch, seq), the tokens as they were.
            target_mask: (batch, seq), True where a token is to be predicted.
            segment_ids: int32 (batch, seq), 0 for padding; tokens see their own segment. None: all
                see all.
            positions: int32 (batch, seq); None: from 0 in each row.
            token_types: int32 (batch, seq) in [0, num_token_types); None: all 0.

        Returns:
            Per-token losses; the collection has the losses and the accuracy.
        """
        info = _info(input_ids, segment_ids, positions)
        hidden = self._to_head(self._run(input_ids, info, token_types), info)
        result = self._head.cross_entropy(hidden, target_ids, target_mask)
        add_token_losses(self._context, result, target_mask, 0.0)
        return result

    def logits(
        self,
        input_ids: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        token_types: jax.Array | None = None,
    ) -> jax.Array:
        """int32 (batch, seq) -> float32 (batch, seq, vocab_size)."""
        info = _info(input_ids, segment_ids, positions)
        return self._head.logits(self._to_head(self._run(input_ids, info, token_types), info))

    def hidden(
        self,
        input_ids: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        token_types: jax.Array | None = None,
    ) -> jax.Array:
        """int32 (batch, seq) -> (batch, seq, model_dim), the encoder's output."""
        return self._run(input_ids, _info(input_ids, segment_ids, positions), token_types)

    def pooled(
        self,
        input_ids: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        token_types: jax.Array | None = None,
    ) -> jax.Array:
        """int32 (batch, seq) -> (batch, model_dim), one vector per row."""
        if self.pooler is None:
            raise ModuleError(
                "has no pooler",
                code="AX354",
                where=self.config_path or self.path,
                hint="set pooler=MeanPooler.Config() or FirstTokenPooler.Config()",
            )
        info = _info(input_ids, segment_ids, positions)
        valid = None if segment_ids is None else segment_ids != 0
        return self.pooler(self._run(input_ids, info, token_types), valid)

    def _run(
        self, input_ids: jax.Array, info: SequenceInfo, token_types: jax.Array | None
    ) -> jax.Array:
        x = self.embedding(input_ids)
        if self.cfg.num_token_types:
            table = self._param("token_types")
            x = x + (table[0] if token_types is None else jnp.take(table, token_types, axis=0))
        elif token_types is not None:
            raise ModuleError(
                "got token_types, but num_token_types is 0",
                code="AX354",
                where=self.config_path or self.path,
            )
        if self.position is not None:
            x = self.position(x, info)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return self.encoder(self.dropout(x), info)

    def _to_head(self, hidden: jax.Array, info: SequenceInfo) -> jax.Array:
        return hidden if self.head_transform is None else self.head_transform(hidden, info)


def _info(
    input_ids: jax.Array, segment_ids: jax.Array | None, positions: jax.Array | None
) -> SequenceInfo:
    if positions is None:
        row = jnp.arange(input_ids.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(row, input_ids.shape)
    return SequenceInfo(positions, segment_ids, token_values=with_ids(input_ids))
