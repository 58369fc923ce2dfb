"""Position-wise feed-forward network, plain or gated."""

from __future__ import annotations

from typing import Any

import jax

from axcore import ops
from axcore.config import Dim, scaled
from axcore.layers.linear import Linear
from axcore.layers.roles import BaseFeedForward, SequenceInfo
from axcore.remat import site

__all__ = ["FeedForward"]


class FeedForward(BaseFeedForward):
    r"""``down(act(up(x)))``, or with a gate ``down(act(gate(x)) * up(x))``.

    Plain GELU: Hendrycks & Gimpel, arXiv:1606.08415. With ``gate`` and ``silu`` it is SwiGLU
    (Shazeer, arXiv:2002.05202).
    """

    class Config(BaseFeedForward.Config):
        """``gate=Linear.Config(bias=False)`` makes it gated."""

        hidden_dim: Dim = scaled(4, of="input_dim")
        activation: str = "gelu_tanh"
        up: Linear.Config = Linear.Config()
        gate: Linear.Config | None = None
        down: Linear.Config = Linear.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        into: dict[str, Any] = dict(
            input_dim=cfg.input_dim, output_dim=cfg.hidden_dim, axes=("embed", "mlp")
        )
        self.up = self._add_child("up", cfg.up, Linear, **into)
        self.gate: Linear | None = None
        if cfg.gate is not None:
            self.gate = self._add_child("gate", cfg.gate, Linear, **into)
        self.down = self._add_child(
            "down",
            cfg.down,
            Linear,
            input_dim=cfg.hidden_dim,
            output_dim=cfg.input_dim,
            axes=("mlp", "embed"),
        )
        self._activation = ops.activation(cfg.activation)

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        del info
        up = self._constrain(site(self.up(x), "ffn_hidden"), "batch", "seq", "mlp")
        if self.gate is None:
            return self.down(self._activation(up))
        gate = self._constrain(site(self.gate(x), "ffn_gate"), "batch", "seq", "mlp")
        return self.down(ops.gated_activation(gate, up, self.cfg.activation))
