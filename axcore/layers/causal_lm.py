"""CausalLM: embedding, decoder and head; training loss, prefill and cached decode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, Dim, Required, scaled
from axcore.layers.base import Layer
from axcore.layers.decoder import Decoder
from axcore.layers.dropout import Dropout
from axcore.layers.embedding import Embedding, LearnedPositions
from axcore.layers.roles import (
    BaseDecoder,
    BaseDropout,
    BaseEmbedding,
    BaseHead,
    BasePosition,
    SequenceInfo,
)
from axcore.ops import LinearCrossEntropy

__all__ = ["CausalLM"]


class CausalLM(Layer):
    """A decoder-only language model.

    Methods: ``forward`` (training and evaluation loss), ``logits``, ``prefill`` and ``decode``; the
    last two run the same modules through their caches.
    """

    class Config(Layer.Config):
        """``lm_head=None`` ties the head to the embedding; ``position=None`` adds none."""

        vocab_size: Required[int] = REQUIRED
        model_dim: Required[int] = REQUIRED
        # Longest sequence in tokens; the trainer's seq_len unless set.
        max_seq_len: Dim = scaled(1, of="seq_len")
        embedding: BaseEmbedding.Config = Embedding.Config()
        position: BasePosition.Config | None = LearnedPositions.Config()
        dropout: BaseDropout.Config = Dropout.Config()
        decoder: BaseDecoder.Config = Decoder.Config()
        lm_head: BaseHead.Config | None = None
        # Coefficient of mean(logsumexp^2) (PaLM, arXiv:2204.02311, section 5); 0 leaves it out.
        z_loss_weight: float = 0.0

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        dim = cfg.model_dim
        self.embedding = self._add_child(
            "embedding", cfg.embedding, BaseEmbedding, input_dim=dim, vocab_size=cfg.vocab_size
        )
        self.position: BasePosition | None = None
        if cfg.position is not None:
            limit: dict[str, Any] = {}
            if "max_seq_len" in cfg.position.fields():
                limit = {"max_seq_len": cfg.max_seq_len}
            self.position = self._add_child(
                "position", cfg.position, BasePosition, input_dim=dim, **limit
            )
        self.dropout = self._add_child("dropout", cfg.dropout, BaseDropout)
        self.decoder = self._add_child("decoder", cfg.decoder, BaseDecoder, input_dim=dim)
        self.lm_head: BaseHead | None = None
        if cfg.lm_head is not None:
            self.lm_head = self._add_child(
                "lm_head", cfg.lm_head, BaseHead, input_dim=dim, vocab_size=cfg.vocab_size
            )

    @property
    def _head(self) -> BaseHead:
        return self.embedding if self.lm_head is None else self.lm_head

    def forward(
        self,
        input_ids: jax.Array,
        target_ids: jax.Array,
        target_mask: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> LinearCrossEntropy:
        """Adds the cross-entropy over the targets that count, in nats per token.

        Args:
            input_ids: int32 (batch, seq).
            target_ids: int32 (batch, seq), the token after each input.
            target_mask: (batch, seq), False where a target does not count; None: all count.
            segment_ids: int32 (batch, seq) document of each token, 0 for padding; None: one a row.
            positions: int32 (batch, seq) position in the document; None: from 0 in each row.

        Returns:
            Per-token losses; the collection has the losses and the accuracy.
        """
        hidden = self._hidden(input_ids, segment_ids, positions)
        if target_mask is None:
            target_mask = jnp.ones(target_ids.shape, bool)
        result = self._head.cross_entropy(hidden, target_ids, target_mask)
        weights = (target_mask != 0).astype(jnp.float32)
        num_tokens = jnp.sum(weights)
        count = jnp.maximum(num_tokens, 1.0)
        ctx = self._context
        ctx.add_loss("cross_entropy", jnp.sum(result.loss) / count, num_items=num_tokens)
        if self.cfg.z_loss_weight:
            ctx.add_loss(
                "z_loss",
                jnp.sum(result.z_loss) / count,
                weight=self.cfg.z_loss_weight,
                num_items=num_tokens,
            )
        accuracy = jnp.sum(result.correct * weights) / count
        ctx.add_summary("accuracy", accuracy, reduction="weighted_mean", weight=num_tokens)
        ctx.add_summary("num_tokens", num_tokens, reduction="sum")
        return result

    def logits(
        self,
        input_ids: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """int32 (batch, seq) -> float32 (batch, seq, vocab_size)."""
        return self._head.logits(self._hidden(input_ids, segment_ids, positions))

    def prefill(self, input_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Reads prompts into the caches.

        Args:
            input_ids: int32 (batch, seq).
            positions: int32 (batch, seq); -1 marks padding, which is neither stored nor seen.

        Returns:
            float32 (batch, vocab_size): scores after each row's last token. The caches come back as
            state updates.
        """
        return self._through_cache(input_ids, positions, "prefill")

    def decode(self, input_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Like ``prefill`` for the next tokens of each row, int32 (batch, seq), usually seq 1."""
        return self._through_cache(input_ids, positions, "decode")

    def _through_cache(self, input_ids: jax.Array, positions: jax.Array, purpose) -> jax.Array:
        info = SequenceInfo(positions=positions, purpose=purpose)
        hidden = self._run(input_ids, info)
        last = jnp.argmax(positions, axis=1)
        return self._head.logits(hidden[jnp.arange(hidden.shape[0]), last])

    def _hidden(
        self,
        input_ids: jax.Array,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
    ) -> jax.Array:
        if positions is None:
            row = jnp.arange(input_ids.shape[1], dtype=jnp.int32)
            positions = jnp.broadcast_to(row, input_ids.shape)
        return self._run(input_ids, SequenceInfo(positions=positions, segment_ids=segment_ids))

    def _run(self, input_ids: jax.Array, info: SequenceInfo) -> jax.Array:
        x = self.embedding(input_ids)
        if self.position is not None:
            x = self.position(x, info)
        return self.decoder(self.dropout(x), info)
