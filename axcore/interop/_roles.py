"""Foreign layers in slots of our models: each checks that the layer keeps the role's promise."""

from __future__ import annotations

from typing import Any

import jax

from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.interop._foreign import ForeignLayer
from axcore.layers.base import Layer
from axcore.layers.roles import BaseFeedForward, BaseNorm, SequenceInfo

__all__ = ["ForeignFeedForward", "ForeignNorm"]


class ForeignFeedForward(BaseFeedForward):
    """A foreign layer as a transformer's feed-forward network.

    The model's dim reaches the foreign layer as ``scaled(1, of="input_dim")``:

    Example:
        >>> ForeignFeedForward.Config(layer=NNXLayer.Config(module=partial_for(
        ...     MyMLP, features=scaled(1, of="input_dim"))))  # doctest: +SKIP
    """

    class Config(BaseFeedForward.Config):
        """The layer maps (batch, seq, input_dim) to the same shape."""

        layer: Required[ForeignLayer.Config] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Any = None):
        super().__init__(cfg, parent=parent)
        self.layer = self._add_child("layer", cfg.layer, ForeignLayer)

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        del info
        return _like(x, self.layer(x), self)


class ForeignNorm(BaseNorm):
    """A foreign layer as a norm over the last dim."""

    class Config(BaseNorm.Config):
        """The layer maps (..., input_dim) to the same shape."""

        layer: Required[ForeignLayer.Config] = REQUIRED

    def __init__(self, cfg: Config, *, parent: Any = None):
        super().__init__(cfg, parent=parent)
        self.layer = self._add_child("layer", cfg.layer, ForeignLayer)

    def forward(self, x: jax.Array) -> jax.Array:
        """Normalizes (..., input_dim)."""
        return _like(x, self.layer(x), self)


def _like(x: jax.Array, y: Any, module: Layer) -> jax.Array:
    """Returns ``y`` in the dtype of ``x``. Raises ModuleError when it has another shape."""
    if getattr(y, "shape", None) != x.shape:
        got = list(y.shape) if hasattr(y, "shape") else type(y).__name__
        raise ModuleError(
            f"the layer made {got} of {list(x.shape)}, its role asks for the same shape",
            code="AX375",
            where=module.path,
            hint="check its sizes, and for EquinoxLayer `batch_dims`",
        )
    return y.astype(x.dtype)
