"""Decoder and Encoder: a stack of layers, what they share, and the final norm."""

from __future__ import annotations

import dataclasses

import jax

from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.layers.attention import Attention
from axcore.layers.norm import LayerNorm
from axcore.layers.roles import (
    BaseDecoder,
    BaseNorm,
    BaseSharedValues,
    BaseTransformerLayer,
    SequenceInfo,
)
from axcore.layers.stack import BaseStack, RepeatedTransformer
from axcore.layers.transformer import TransformerLayer
from axcore.ops.masks import Causal, Full

__all__ = ["Decoder", "Encoder"]


class Decoder(BaseDecoder):
    """``final_norm(stack(x))``.

    ``layer`` says what the layers are and ``stack`` how they run, so switching from a scan to an
    unrolled stack is one field and loses no edit of a layer.
    """

    class Config(BaseDecoder.Config):
        """The model sets ``input_dim``."""

        num_layers: Required[int] = REQUIRED
        # One layer, or the layers of a period that repeats.
        layer: BaseTransformerLayer.Config | tuple[BaseTransformerLayer.Config, ...] = (
            TransformerLayer.Config()
        )
        # Layers of another kind that come first, among num_layers.
        prefix: tuple[BaseTransformerLayer.Config, ...] = ()
        stack: BaseStack.Config = RepeatedTransformer.Config()
        # Arrays that all layers read in info.shared, made once.
        shared: BaseSharedValues.Config | None = None
        final_norm: BaseNorm.Config | None = LayerNorm.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        # The stack is named for what it holds, so that layer i is `layer/i` in state and the
        # config path of the layers is that of `layer`.
        self.layer = self._add_child(
            "layer",
            cfg.stack,
            BaseStack,
            input_dim=cfg.input_dim,
            num_layers=cfg.num_layers,
            layer=cfg.layer,
            prefix=cfg.prefix,
        )
        self.shared: BaseSharedValues | None = None
        if cfg.shared is not None:
            self.shared = self._add_child(
                "shared", cfg.shared, BaseSharedValues, input_dim=cfg.input_dim
            )
        self.final_norm: BaseNorm | None = None
        if cfg.final_norm is not None:
            self.final_norm = self._add_child(
                "final_norm", cfg.final_norm, BaseNorm, input_dim=cfg.input_dim
            )

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        if self.shared is not None:
            info = dataclasses.replace(info, shared={**info.shared, **self.shared(info)})
        x = self.layer(x, info)
        return x if self.final_norm is None else self._residual(self.final_norm(x))


class Encoder(Decoder):
    """A decoder whose layers, unless replaced, see the whole sequence.

    An attention of one's own states its mask, ``mask=Full()`` for instance: the mask belongs to the
    attention, whose default is causal and is refused here. A causal mask that is stated is taken.
    """

    class Config(Decoder.Config):
        """The model sets ``input_dim``."""

        layer: BaseTransformerLayer.Config | tuple[BaseTransformerLayer.Config, ...] = (
            TransformerLayer.Config(attention=Attention.Config(mask=Full()))
        )

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        layers = cfg.layer if isinstance(cfg.layer, tuple) else (cfg.layer,)
        for layer in (*cfg.prefix, *layers):
            for path, attention in layer.find(Attention.Config).items():
                is_default = attention.set_by("mask").kind == "default"
                if is_default and Causal() in attention.mask.parts():
                    raise ModuleError(
                        f"{path} of an encoder's layer has the default mask, {attention.mask}, so "
                        "that no token would see a later one",
                        code="AX376",
                        where=self.config_path or self.path,
                        hint="state it: mask=Full(), or mask=Causal() if that is meant",
                    )
