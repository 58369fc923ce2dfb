"""Multi-token prediction: further modules that predict the tokens after the next one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.layers.base import Layer
from axcore.layers.linear import Linear
from axcore.layers.norm import RMSNorm
from axcore.layers.roles import (
    BaseMultiToken,
    BaseNorm,
    BaseTransformerLayer,
    SequenceInfo,
)
from axcore.layers.transformer import TransformerLayer

__all__ = ["MultiTokenModule", "MultiTokenPrediction"]


class MultiTokenModule(Layer):
    """``final_norm(layer(M [norm(h); norm(e)]))`` for one depth."""

    class Config(Layer.Config):
        """``MultiTokenPrediction`` sets all of these."""

        input_dim: Required[int] = REQUIRED
        norm: BaseNorm.Config = RMSNorm.Config()
        projection: Linear.Config = Linear.Config(bias=False)
        layer: BaseTransformerLayer.Config = TransformerLayer.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        dim = cfg.input_dim

        def norm(name: str) -> BaseNorm:
            path = f"{self.config_path}.norm"
            return self._add_child(name, cfg.norm, BaseNorm, config_path=path, input_dim=dim)

        self.hidden_norm, self.embedding_norm = norm("hidden_norm"), norm("embedding_norm")
        self.projection = self._add_child(
            "projection",
            cfg.projection,
            Linear,
            input_dim=2 * dim,
            output_dim=dim,
            axes=(None, "embed"),
        )
        self.layer = self._add_child("layer", cfg.layer, BaseTransformerLayer, input_dim=dim)
        self.final_norm = norm("final_norm")

    def forward(
        self, hidden: jax.Array, embeddings: jax.Array, info: SequenceInfo
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what the next depth and what the head reads, both (batch, seq, input_dim)."""
        both = [self.hidden_norm(hidden), self.embedding_norm(embeddings)]
        hidden = self.layer(self.projection(jnp.concatenate(both, axis=-1)), info)
        return hidden, self.final_norm(hidden)


class MultiTokenPrediction(BaseMultiToken):
    r"""Sequential modules, each one token deeper (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    Depth k combines what depth k - 1 made of token i with the embedding of token i + k, and
    predicts token i + k + 1 through the model's own head:

    .. math::
        h^k_i = \mathrm{layer}_k(M_k [\mathrm{norm}(h^{k-1}_i); \mathrm{norm}(e_{i+k})]), \qquad
        L = \frac{\lambda}{D} \sum_k L_k

    The model's dims, embedding and head are shared; the rest is the depth's own. :math:`h^0` is
    the decoder's output. Only training runs it.
    """

    class Config(BaseMultiToken.Config):
        """``layer`` is usually a copy of the decoder's."""

        # D, the number of modules and of further tokens.
        depth: int = 1
        norm: BaseNorm.Config = RMSNorm.Config()
        projection: Linear.Config = Linear.Config(bias=False)
        layer: BaseTransformerLayer.Config = TransformerLayer.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        if cfg.depth < 1:
            raise ModuleError(
                f"depth is {cfg.depth}, expected at least 1",
                code="AX353",
                where=f"{self.config_path}.depth",
                hint="multi_token=None switches the modules off",
            )
        shared: dict[str, Any] = {
            n: getattr(cfg, n)
            for n in ("norm", "projection", "layer", "param_dtype", "compute_dtype", "reduce_dtype")
        }
        self._depths = [
            self._add_child(
                f"depth_{k}",
                MultiTokenModule.Config(**shared),
                MultiTokenModule,
                config_path=self.config_path,
                input_dim=cfg.input_dim,
            )
            for k in range(1, cfg.depth + 1)
        ]

    def forward(
        self, hidden: jax.Array, embeddings: jax.Array, info: SequenceInfo
    ) -> tuple[jax.Array, ...]:
        """Returns (batch, seq, input_dim) for each depth, for the head."""
        outputs: list[jax.Array] = []
        for depth in self._depths:
            # Zeros stand for tokens past the end; causal layers show them to no earlier token.
            embeddings = jnp.pad(embeddings[:, 1:], ((0, 0), (0, 1), (0, 0)))
            hidden, out = depth(hidden, embeddings, info)
            outputs.append(out)
        return tuple(outputs)
