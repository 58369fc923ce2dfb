"""EncoderDecoder: a source is encoded once, and a decoder reads it while it writes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, Dim, Required, scaled
from axcore.layers._token_losses import add_token_losses
from axcore.layers.base import Layer
from axcore.layers.decoder import Decoder, Encoder
from axcore.layers.dropout import Dropout
from axcore.layers.embedding import Embedding, LearnedPositions, add_lm_head, add_position
from axcore.layers.roles import (
    BaseDecoder,
    BaseDropout,
    BaseEmbedding,
    BaseHead,
    BasePosition,
    SequenceInfo,
    with_ids,
)
from axcore.layers.transformer import CrossTransformerLayer
from axcore.ops import LinearCrossEntropy

__all__ = ["EncoderDecoder"]


class EncoderDecoder(Layer):
    """A sequence-to-sequence model (Vaswani et al., arXiv:1706.03762; T5, arXiv:1910.10683).

    Methods: ``forward`` (training and evaluation loss), ``logits``, ``encode``, ``prefill`` and
    ``decode``. Source and target share one embedding. Padding of the source is segment 0.
    """

    class Config(Layer.Config):
        """``lm_head=None`` ties the head to the embedding."""

        vocab_size: Required[int] = REQUIRED
        model_dim: Required[int] = REQUIRED
        # Longest source and target in tokens; the trainer's seq_len unless set.
        max_seq_len: Dim = scaled(1, of="seq_len")
        embedding: BaseEmbedding.Config = Embedding.Config()
        encoder_position: BasePosition.Config | None = LearnedPositions.Config()
        decoder_position: BasePosition.Config | None = LearnedPositions.Config()
        dropout: BaseDropout.Config = Dropout.Config()
        encoder: BaseDecoder.Config = Encoder.Config()
        decoder: BaseDecoder.Config = Decoder.Config(layer=CrossTransformerLayer.Config())
        lm_head: BaseHead.Config | None = None
        # Coefficient of mean(logsumexp^2); 0 leaves it out.
        z_loss_weight: float = 0.0

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        dim = cfg.model_dim
        self.embedding = self._add_child(
            "embedding", cfg.embedding, BaseEmbedding, input_dim=dim, vocab_size=cfg.vocab_size
        )
        self.encoder_position = add_position(self, "encoder_position", cfg.encoder_position)
        self.decoder_position = add_position(self, "decoder_position", cfg.decoder_position)
        self.dropout = self._add_child("dropout", cfg.dropout, BaseDropout)
        self.encoder = self._add_child("encoder", cfg.encoder, BaseDecoder, input_dim=dim)
        self.decoder = self._add_child("decoder", cfg.decoder, BaseDecoder, input_dim=dim)
        self.lm_head = add_lm_head(self)

    @property
    def _head(self) -> BaseHead:
        return self.embedding if self.lm_head is None else self.lm_head

    def forward(
        self,
        source_ids: jax.Array,
        input_ids: jax.Array,
        target_ids: jax.Array,
        target_mask: jax.Array | None = None,
        source_segment_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        source_positions: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> LinearCrossEntropy:
        """Adds the cross-entropy over the targets that count, in nats per token.

        Args:
            source_ids: int32 (batch, source).
            input_ids: int32 (batch, seq), what the decoder has written so far.
            target_ids: int32 (batch, seq), the token after each input.
            target_mask: (batch, seq), False where a target does not count; None: all count.
            source_segment_ids: int32 (batch, source), 0 for padding. When targets have segments
                too, equal ids belong together; else targets read all that is not padding.
            segment_ids: int32 (batch, seq) of the targets, 0 for padding; None: one a row.
            source_positions: int32 (batch, source); None: from 0 in each row.
            positions: int32 (batch, seq); None: from 0 in each row.

        Returns:
            Per-token losses; the collection has the losses and the accuracy.
        """
        hidden = self._both(
            source_ids, input_ids, source_segment_ids, segment_ids, source_positions, positions
        )
        if target_mask is None:
            target_mask = jnp.ones(target_ids.shape, bool)
        result = self._head.cross_entropy(hidden, target_ids, target_mask)
        add_token_losses(self._context, result, target_mask, self.cfg.z_loss_weight)
        return result

    def logits(
        self,
        source_ids: jax.Array,
        input_ids: jax.Array,
        source_segment_ids: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        source_positions: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """Returns float32 (batch, seq, vocab_size); arguments as of ``forward``."""
        hidden = self._both(
            source_ids, input_ids, source_segment_ids, segment_ids, source_positions, positions
        )
        return self._head.logits(hidden)

    def encode(
        self,
        source_ids: jax.Array,
        source_segment_ids: jax.Array | None = None,
        source_positions: jax.Array | None = None,
    ) -> jax.Array:
        """int32 (batch, source) -> the memory (batch, source, model_dim) for ``prefill``."""
        return self._encoded(source_ids, source_segment_ids, source_positions)

    def prefill(
        self,
        input_ids: jax.Array,
        positions: jax.Array,
        memory: jax.Array,
        memory_segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Reads the memory and the first tokens of the target into the caches.

        Args:
            input_ids: int32 (batch, seq), at least the start token.
            positions: int32 (batch, seq); -1 marks padding, which is neither stored nor seen.
            memory: (batch, source, model_dim) from ``encode``.
            memory_segment_ids: int32 (batch, source), 0 for padding; None: there is none.

        Returns:
            float32 (batch, vocab_size): scores after each row's last token. The caches come back as
            state updates.
        """
        info = SequenceInfo(
            positions,
            token_values=with_ids(input_ids),
            memory=memory,
            memory_segment_ids=memory_segment_ids,
            purpose="prefill",
        )
        return self._last_logits(input_ids, info)

    def decode(self, input_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Like ``prefill`` for the next tokens of each row; the memory is in the caches."""
        info = SequenceInfo(positions, token_values=with_ids(input_ids), purpose="decode")
        return self._last_logits(input_ids, info)

    def _last_logits(self, input_ids: jax.Array, info: SequenceInfo) -> jax.Array:
        hidden = self._decoded(input_ids, info)
        last = jnp.argmax(info.positions, axis=1)
        return self._head.logits(hidden[jnp.arange(hidden.shape[0]), last])

    def _both(
        self,
        source_ids: jax.Array,
        input_ids: jax.Array,
        source_segment_ids: jax.Array | None,
        segment_ids: jax.Array | None,
        source_positions: jax.Array | None,
        positions: jax.Array | None,
    ) -> jax.Array:
        info = SequenceInfo(
            _or_indices(positions, input_ids),
            segment_ids,
            token_values=with_ids(input_ids),
            memory=self._encoded(source_ids, source_segment_ids, source_positions),
            memory_segment_ids=source_segment_ids,
        )
        return self._decoded(input_ids, info)

    def _encoded(
        self,
        source_ids: jax.Array,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
    ) -> jax.Array:
        info = SequenceInfo(
            _or_indices(positions, source_ids), segment_ids, token_values=with_ids(source_ids)
        )
        x = self.embedding(source_ids)
        if self.encoder_position is not None:
            x = self.encoder_position(x, info)
        return self.encoder(self.dropout(x), info)

    def _decoded(self, input_ids: jax.Array, info: SequenceInfo) -> jax.Array:
        x = self.embedding(input_ids)
        if self.decoder_position is not None:
            x = self.decoder_position(x, info)
        return self.decoder(self.dropout(x), info)


def _or_indices(positions: jax.Array | None, ids: jax.Array) -> jax.Array:
    if positions is not None:
        return positions
    return jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
