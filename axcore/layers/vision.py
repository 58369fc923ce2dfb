"""VisionTransformer: an image's patches as a sequence, and a classifier."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.layers.base import Layer
from axcore.layers.decoder import Encoder
from axcore.layers.dropout import Dropout
from axcore.layers.embedding import LearnedPositions, add_position
from axcore.layers.initializers import Zeros
from axcore.layers.linear import Linear
from axcore.layers.pooling import FirstTokenPooler
from axcore.layers.roles import BaseDecoder, BaseDropout, BasePooler, BasePosition, SequenceInfo
from axcore.module import Initializer

__all__ = ["PatchEmbedding", "VisionTransformer"]


class PatchEmbedding(Layer):
    """Cuts images into square patches, row by row, and projects each.

    A convolution whose stride is its kernel, written as one product; the weight is
    (patch, patch, channels, output_dim).
    """

    class Config(Layer.Config):
        """The model sets all but ``projection``."""

        patch_size: Required[int] = REQUIRED
        num_channels: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        projection: Linear.Config = Linear.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self.projection = self._add_child(
            "projection",
            cfg.projection,
            Linear,
            input_dim=(cfg.patch_size, cfg.patch_size, cfg.num_channels),
            output_dim=cfg.output_dim,
            axes=(None, None, None, "embed"),
        )

    def forward(self, images: jax.Array) -> jax.Array:
        """(batch, height, width, channels) -> (batch, patches, output_dim)."""
        b, height, width, c = images.shape
        p = self.cfg.patch_size
        if height % p or width % p or c != self.cfg.num_channels:
            raise ModuleError(
                f"images of shape {images.shape} do not cut into patches of {p} x {p} with "
                f"{self.cfg.num_channels} channels",
                code="AX355",
                where=self.path,
                hint="expected (batch, height, width, channels), sides multiples of the patch size",
            )
        x = images.reshape(b, height // p, p, width // p, p, c)
        x = jnp.swapaxes(x, 2, 3).reshape(b, -1, p, p, c)
        return self.projection(x)


class VisionTransformer(Layer):
    """A classifier of images (Dosovitskiy et al., arXiv:2010.11929).

    Methods: ``forward`` (training loss), ``logits``, and ``hidden``, the encoder's output.
    """

    class Config(Layer.Config):
        """``num_classes=0`` leaves the classifier out."""

        model_dim: Required[int] = REQUIRED
        # Height and width in pixels, or one number for squares.
        image_size: Required[int | tuple[int, int]] = REQUIRED
        patch_size: Required[int] = REQUIRED
        num_channels: int = 3
        num_classes: int = 0
        patches: PatchEmbedding.Config = PatchEmbedding.Config()
        # A learned vector before the patches, which the classifier reads.
        class_token: bool = True
        class_token_init: Initializer = Zeros()
        position: BasePosition.Config | None = LearnedPositions.Config()
        dropout: BaseDropout.Config = Dropout.Config()
        encoder: BaseDecoder.Config = Encoder.Config()
        pooler: BasePooler.Config = FirstTokenPooler.Config()
        classifier: Linear.Config = Linear.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        dim = cfg.model_dim
        size = cfg.image_size
        height, width = (size, size) if isinstance(size, int) else size
        if cfg.patch_size < 1 or height % cfg.patch_size or width % cfg.patch_size:
            raise ModuleError(
                f"an image of {height} x {width} does not cut into patches of {cfg.patch_size}",
                code="AX355",
                where=f"{self.config_path}.patch_size" if self.config_path else "patch_size",
            )
        num_tokens = (height // cfg.patch_size) * (width // cfg.patch_size) + int(cfg.class_token)
        self.patches = self._add_child(
            "patches",
            cfg.patches,
            PatchEmbedding,
            patch_size=cfg.patch_size,
            num_channels=cfg.num_channels,
            output_dim=dim,
        )
        if cfg.class_token:
            self._add_weight(
                "class_token", (dim,), ("embed",), cfg.class_token_init, weight_decay=False
            )
        self.position = add_position(self, "position", cfg.position, num_tokens)
        self.dropout = self._add_child("dropout", cfg.dropout, BaseDropout)
        self.encoder = self._add_child("encoder", cfg.encoder, BaseDecoder, input_dim=dim)
        self.pooler = self._add_child("pooler", cfg.pooler, BasePooler, input_dim=dim)
        self.classifier: Linear | None = None
        if cfg.num_classes:
            self.classifier = self._add_child(
                "classifier",
                cfg.classifier,
                Linear,
                input_dim=dim,
                output_dim=cfg.num_classes,
                axes=("embed", None),
            )

    def forward(
        self, images: jax.Array, labels: jax.Array, label_mask: jax.Array | None = None
    ) -> jax.Array:
        """Adds the cross-entropy of the labels, in nats per image.

        Args:
            images: (batch, height, width, channels) float.
            labels: int32 (batch,) classes.
            label_mask: (batch,), False where a row is padding; None: all count.

        Returns:
            float32 (batch,) losses, 0 where masked; the collection has the loss and the accuracy.
        """
        logits = self._logits(images)
        weights = jnp.ones(labels.shape, jnp.float32)
        if label_mask is not None:
            weights = (label_mask != 0).astype(jnp.float32)
        log_p = jax.nn.log_softmax(logits)
        losses = -jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0] * weights
        num_images = jnp.sum(weights)
        count = jnp.maximum(num_images, 1.0)
        ctx = self._context
        ctx.add_loss("cross_entropy", jnp.sum(losses) / count, num_items=num_images)
        hits = jnp.sum((jnp.argmax(logits, axis=-1) == labels) * weights)
        ctx.add_summary("accuracy", hits / count, reduction="weighted_mean", weight=num_images)
        ctx.add_summary("num_images", num_images, reduction="sum")
        return losses

    def logits(self, images: jax.Array) -> jax.Array:
        """(batch, height, width, channels) -> float32 (batch, num_classes)."""
        return self._logits(images)

    def hidden(self, images: jax.Array) -> jax.Array:
        """(batch, height, width, channels) -> (batch, tokens, model_dim), class token first."""
        return self._hidden(images)

    def _logits(self, images: jax.Array) -> jax.Array:
        if self.classifier is None:
            raise ModuleError(
                "has no classifier",
                code="AX355",
                where=self.config_path or self.path,
                hint="set num_classes",
            )
        return self.classifier(self.pooler(self._hidden(images))).astype(jnp.float32)

    def _hidden(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        if self.cfg.class_token:
            token = jnp.broadcast_to(self._param("class_token"), (x.shape[0], 1, x.shape[2]))
            x = jnp.concatenate([token, x], axis=1)
        row = jnp.arange(x.shape[1], dtype=jnp.int32)
        info = SequenceInfo(jnp.broadcast_to(row, x.shape[:2]))
        if self.position is not None:
            x = self.position(x, info)
        return self.encoder(self.dropout(x), info)
