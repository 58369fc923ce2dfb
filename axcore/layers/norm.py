"""RMSNorm and LayerNorm."""

from __future__ import annotations

import dataclasses

import jax

from axcore import ops
from axcore.layers.base import BETWEEN_BRANCHES
from axcore.layers.initializers import Ones, Zeros
from axcore.layers.roles import BaseNorm
from axcore.module import Initializer, ParameterSpec

__all__ = ["LayerNorm", "RMSNorm"]


@dataclasses.dataclass(frozen=True)
class _LessOne:
    """What is stored when ``1 + stored`` shall start as ``of`` says."""

    of: Initializer

    def __call__(self, key: jax.Array, spec: ParameterSpec) -> jax.Array:
        return self.of(key, spec) - 1


class RMSNorm(BaseNorm):
    """``y = x / sqrt(mean(x^2) + eps) * scale`` (Zhang & Sennrich, arXiv:1910.07467).

    Statistics are float32; the output has the compute dtype.
    """

    class Config(BaseNorm.Config):
        """``eps`` is added to the mean square; ``scale_init`` is of the factor that applies."""

        eps: float = 1e-6
        scale_init: Initializer = Ones()
        # Stores scale - 1 (Gemma).
        unit_offset: bool = False

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._check_positive("eps", zero=True)
        init = _LessOne(cfg.scale_init) if cfg.unit_offset else cfg.scale_init
        self._add_weight("scale", (cfg.input_dim,), (cfg.axis,), init, weight_decay=False)

    def forward(self, x: jax.Array) -> jax.Array:
        """Normalizes (..., input_dim)."""
        scale = self._param("scale", self.reduce_dtype)
        if self.cfg.unit_offset:
            scale = 1 + scale
        return ops.rms_norm(x, scale, eps=self.cfg.eps, placed=_placed(self, x)).astype(
            self.compute_dtype
        )


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
        self._check_positive("eps", zero=True)
        shape, axes = (cfg.input_dim,), (cfg.axis,)
        self._add_weight("scale", shape, axes, cfg.scale_init, weight_decay=False)
        if cfg.bias:
            self._add_weight("bias", shape, axes, cfg.bias_init, weight_decay=False)

    def forward(self, x: jax.Array) -> jax.Array:
        """Normalizes (..., input_dim)."""
        bias = self._param("bias", self.reduce_dtype) if self.cfg.bias else None
        scale = self._param("scale", self.reduce_dtype)
        y = ops.layer_norm(x, scale, bias, eps=self.cfg.eps, placed=_placed(self, x))
        return y.astype(self.compute_dtype)


def _placed(norm: BaseNorm, x: jax.Array) -> tuple[str | None, ...] | None:
    """What x lies by where it is the residual stream; None leaves it to the op."""
    return BETWEEN_BRANCHES if x.ndim == 3 and norm.cfg.axis == "embed" else None
