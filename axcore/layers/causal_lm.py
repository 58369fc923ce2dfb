"""CausalLM: embedding, decoder and head; training loss, prefill and cached decode."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, Dim, Required, scaled
from axcore.layers._token_losses import add_token_losses
from axcore.layers.base import Layer
from axcore.layers.decoder import Decoder
from axcore.layers.dropout import Dropout
from axcore.layers.embedding import Embedding, LearnedPositions, add_lm_head, add_position
from axcore.layers.roles import (
    BaseDecoder,
    BaseDropout,
    BaseEmbedding,
    BaseHead,
    BaseMultiToken,
    BasePosition,
    SequenceInfo,
    with_ids,
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
        # Modules that predict further tokens in training; None has none and no parameters.
        multi_token: BaseMultiToken.Config | None = None

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        dim = cfg.model_dim
        self.embedding = self._add_child(
            "embedding", cfg.embedding, BaseEmbedding, input_dim=dim, vocab_size=cfg.vocab_size
        )
        self.position = add_position(self, "position", cfg.position)
        self.dropout = self._add_child("dropout", cfg.dropout, BaseDropout)
        self.decoder = self._add_child("decoder", cfg.decoder, BaseDecoder, input_dim=dim)
        self.lm_head = add_lm_head(self)
        self.multi_token: BaseMultiToken | None = None
        if cfg.multi_token is not None:
            self.multi_token = self._add_child(
                "multi_token", cfg.multi_token, BaseMultiToken, input_dim=dim
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
        prefix_lengths: jax.Array | None = None,
        token_values: Mapping[str, jax.Array] | None = None,
    ) -> LinearCrossEntropy:
        """Adds the cross-entropy over the targets that count, in nats per token.

        Args:
            input_ids: int32 (batch, seq).
            target_ids: int32 (batch, seq), the token after each input.
            target_mask: (batch, seq), False where a target does not count; None: all count.
            segment_ids: int32 (batch, seq) document of each token, 0 for padding; None: one a row.
            positions: int32 (batch, seq) position in the document; None: from 0 in each row.
            prefix_lengths: int32 (batch,) how many first tokens all tokens see, of each document of
                the row; for layers whose mask is ``PrefixLM(None)``.
            token_values: Further values of each token, (batch, seq, ...), for layers that read
                them.

        Returns:
            Per-token losses; the collection has the losses and the accuracy.
        """
        info = _info(input_ids, segment_ids, positions, prefix_lengths, token_values)
        embeddings = self.embedding(input_ids)
        hidden = self._body(embeddings, info)
        if target_mask is None:
            target_mask = jnp.ones(target_ids.shape, bool)
        result = self._head.cross_entropy(hidden, target_ids, target_mask)
        ctx = self._context
        add_token_losses(ctx, result, target_mask, self.cfg.z_loss_weight)
        if self.multi_token is not None and ctx.is_training:
            outputs = self.multi_token(hidden, embeddings, info)
            for depth, output in enumerate(outputs, start=1):
                self._add_depth_loss(depth, len(outputs), output, target_ids, target_mask, info)
        return result

    def _add_depth_loss(
        self,
        depth: int,
        num_depths: int,
        output: jax.Array,
        target_ids: jax.Array,
        target_mask: jax.Array,
        info: SequenceInfo,
    ) -> None:
        """Adds the loss of the token ``depth`` after the next, within each document."""

        def later(x: jax.Array) -> jax.Array:  # what belongs to token i + depth; 0 past the end
            return jnp.pad(x[:, depth:], ((0, 0), (0, depth)))

        counts = later(target_mask)
        if info.segment_ids is not None:
            counts = jnp.where(later(info.segment_ids) == info.segment_ids, counts, 0)
        result = self._head.cross_entropy(output, later(target_ids), counts)
        num_tokens = jnp.sum((counts != 0).astype(jnp.float32))
        assert self.multi_token is not None
        self._context.add_loss(
            f"multi_token_{depth}",
            jnp.sum(result.loss) / jnp.maximum(num_tokens, 1.0),
            weight=self.multi_token.cfg.loss_weight / num_depths,
            num_items=num_tokens,
        )

    def logits(
        self,
        input_ids: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        prefix_lengths: jax.Array | None = None,
        token_values: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """int32 (batch, seq) -> float32 (batch, seq, vocab_size); arguments as of ``forward``."""
        info = _info(input_ids, segment_ids, positions, prefix_lengths, token_values)
        return self._head.logits(self._body(self.embedding(input_ids), info))

    def prefill(
        self,
        input_ids: jax.Array,
        positions: jax.Array,
        prefix_lengths: jax.Array | None = None,
        token_values: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Reads prompts into the caches.

        Args:
            input_ids: int32 (batch, seq).
            positions: int32 (batch, seq); -1 marks padding, which is neither stored nor seen.
            prefix_lengths: int32 (batch,) as of ``forward``; None: the whole prompt is the prefix
                of layers whose mask is ``PrefixLM(None)``.
            token_values: As of ``forward``.

        Returns:
            float32 (batch, vocab_size): scores after each row's last token. The caches come back as
            state updates.
        """
        if prefix_lengths is None:
            prefix_lengths = jnp.max(positions, axis=1) + 1
        info = SequenceInfo(
            positions,
            token_values=with_ids(input_ids, token_values),
            prefix_lengths=prefix_lengths,
            purpose="prefill",
        )
        return self._last_logits(input_ids, info)

    def decode(
        self,
        input_ids: jax.Array,
        positions: jax.Array,
        token_values: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Like ``prefill`` for the next tokens of each row, int32 (batch, seq), usually seq 1."""
        info = SequenceInfo(
            positions, token_values=with_ids(input_ids, token_values), purpose="decode"
        )
        return self._last_logits(input_ids, info)

    def _last_logits(self, input_ids: jax.Array, info: SequenceInfo) -> jax.Array:
        hidden = self._body(self.embedding(input_ids), info)
        last = jnp.argmax(info.positions, axis=1)
        return self._head.logits(hidden[jnp.arange(hidden.shape[0]), last])

    def _body(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """From embeddings to what the head reads, (batch, seq, model_dim)."""
        if self.position is not None:
            x = self.position(x, info)
        return self.decoder(self.dropout(x), info)


def _info(
    input_ids: jax.Array,
    segment_ids: jax.Array | None,
    positions: jax.Array | None,
    prefix_lengths: jax.Array | None,
    token_values: Mapping[str, jax.Array] | None,
) -> SequenceInfo:
    """What whole sequences of (batch, seq) tokens are known by; positions default to indices."""
    if positions is None:
        row = jnp.arange(input_ids.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(row, input_ids.shape)
    return SequenceInfo(
        positions,
        segment_ids,
        token_values=with_ids(input_ids, token_values),
        prefix_lengths=prefix_lengths,
    )
