"""A new norm: division by the mean magnitude."""
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402, F811

# %% feature
import jax.numpy as jnp

from axcore.layers import BaseNorm, Ones


class MeanNorm(BaseNorm):
    """``y = x / (mean(|x|) + eps) * scale``."""

    class Config(BaseNorm.Config):
        """``eps`` is added to the mean magnitude."""

        eps: float = 1e-6

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._add_weight("scale", (cfg.input_dim,), ("embed",), Ones(), weight_decay=False)

    def forward(self, x):
        """Normalizes (..., input_dim)."""
        x = x.astype(self.reduce_dtype)
        y = x / (jnp.mean(jnp.abs(x), axis=-1, keepdims=True) + self.cfg.eps)
        return (y * self._param("scale", self.reduce_dtype)).astype(self.compute_dtype)


# %% integration
from axcore.layers import BaseNorm

from .feature import MeanNorm


def integrate(cfg):
    """Replaces every norm."""
    cfg.replace(BaseNorm.Config, MeanNorm.Config())


# %% check

from axcore.layers import BaseNorm

from .feature import MeanNorm


def is_present(cfg, model):
    """Whether every norm is the new one."""
    norms = [m for _, m in model.walk() if isinstance(m, BaseNorm)]
    return norms and all(isinstance(m, MeanNorm) for m in norms)


def check(probe):
    """The result is another than before, and depends on the new norms' scales."""
    probe.differ(probe.after_logits, probe.before_logits, "the norm changes the result")
    doubled = probe.scaled(probe.after_params, 2.0, lambda path: path.endswith("norm/scale"))
    probe.differ(
        probe.logits(probe.after_model, doubled), probe.after_logits, "its scales are in use"
    )
