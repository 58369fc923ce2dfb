"""RMSNorm and LayerNorm."""

from __future__ import annotations

import jax

from axcore import ops
from axcore.layers.initializers import Ones, Zeros
from axcore.layers.roles import BaseNorm
from axcore.module import Initializer

__all__ = ["LayerNorm", "RMSNorm"]


class RMSNorm(BaseNorm):
    """``y = x / sqrt(mean(x^2) + eps) * scale`` (Zhang & Sennrich, arXiv:1910.07467).

    Statistics are float32; the output has the compute dtype.
    """

    class Config(BaseNorm.Config):
        """``eps`` is added to the mean square."""

        eps: float = 1e-6
        scale_init: Initializer = Ones()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        hints = dict(weight_decay=False)
        self._add_weight("scale", (cfg.input_dim,), ("embed",), cfg.scale_init, **hints)

    def forward(self, x: jax.Array) -> jax.Array:
        """Normalizes (..., input_dim)."""
        y = ops.rms_norm(x, self._param("scale", self.reduce_dtype), eps=self.cfg.eps)
        return y.astype(self.compute_dtype)


class LayerNorm(BaseNorm):
    """``y = (x - mean) / sqrt(var + eps) * scale + bias`` (Ba et al., arXiv:1607.06450).

    Statistics are float32; the output has the compute dtype.
    """

    class Config(BaseNorm.Config):
        """``eps`` is added to the variance."""

        eps: float = 1e-5
        bias: bool = True
        scale_init: Initializer = Ones()
        bias_init: Initializer = Zeros()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        shape, axes = (cfg.input_dim,), ("embed",)
        self._add_weight("scale", shape, axes, cfg.scale_init, weight_decay=False)
        if cfg.bias:
            self._add_weight("bias", shape, axes, cfg.bias_init, weight_decay=False)

    def forward(self, x: jax.Array) -> jax.Array:
        """Normalizes (..., input_dim)."""
        bias = self._param("bias", self.reduce_dtype) if self.cfg.bias else None
        y = ops.layer_norm(x, self._param("scale", self.reduce_dtype), bias, eps=self.cfg.eps)
        return y.astype(self.compute_dtype)
