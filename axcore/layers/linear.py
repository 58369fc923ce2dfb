"""Linear: the one weight contraction, over any number of trailing dims."""

from __future__ import annotations

import jax

from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.layers.base import Layer
from axcore.layers.initializers import VarianceScaling, Zeros
from axcore.module import Initializer
from axcore.ops import BaseDotGeneral, DotGeneral
from axcore.remat import weight_product

__all__ = ["Linear", "replacement"]

Dims = int | tuple[int, ...]


def _tuple(dims: Dims) -> tuple[int, ...]:
    return (dims,) if isinstance(dims, int) else dims


class Linear(Layer):
    """``y = x W + b`` contracting the trailing input dims.

    ``input_dim`` and ``output_dim`` are ints or tuples: an attention projection has
    ``output_dim=(num_heads, head_dim)``. The weight has shape ``(*input_dim, *output_dim)``.
    """

    class Config(Layer.Config):
        """Dims are set by the parent."""

        input_dim: Required[int | tuple[int, ...]] = REQUIRED
        output_dim: Required[int | tuple[int, ...]] = REQUIRED
        bias: bool = True
        # Logical axes of the weight, one per dim; the parent sets them.
        axes: tuple[str | None, ...] = ("embed", "mlp")
        weight_init: Initializer = VarianceScaling()
        bias_init: Initializer = Zeros()
        dot: BaseDotGeneral.Config = DotGeneral.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._in, self._out = _tuple(cfg.input_dim), _tuple(cfg.output_dim)
        shape = (*self._in, *self._out)
        if len(cfg.axes) != len(shape):
            raise ModuleError(
                f"weight of shape {shape} got axes {cfg.axes}",
                code="AX301",
                where=f"{self.config_path}.axes",
                hint="give one logical axis name, or None, for each dim",
            )
        num_in = len(self._in)
        self._add_weight(
            "weight",
            shape,
            cfg.axes,
            cfg.weight_init,
            fan_in_dims=tuple(range(num_in)),
            fan_out_dims=tuple(range(num_in, len(shape))),
        )
        if cfg.bias:
            self._add_weight(
                "bias", self._out, cfg.axes[num_in:], cfg.bias_init, weight_decay=False
            )
        self.dot = self._add_child("dot", cfg.dot, BaseDotGeneral)
        spec = self._specs["weight"]
        self._specs["weight"] = self.dot.stored_weight(spec)
        # Such a product reads the weight as it is; others get it in the compute dtype.
        self._reads_stored = self._specs["weight"] is not spec

    def forward(self, x: jax.Array) -> jax.Array:
        """(..., *input_dim) -> (..., *output_dim) in the compute dtype."""
        num_in = len(self._in)
        if x.shape[x.ndim - num_in :] != self._in:
            raise ModuleError(
                f"input of shape {x.shape} does not end in {self._in}",
                code="AX340",
                where=self.path,
                hint=f"the weight is {self._in} x {self._out}; see {self.config_path}",
            )
        lhs = tuple(range(x.ndim - num_in, x.ndim))
        dims = ((lhs, tuple(range(num_in))), ((), ()))
        held = self._context.state.get("weight") if self._reads_stored else None
        weight = self._param("weight") if held is None else held
        y = weight_product(self.dot(x.astype(self.compute_dtype), weight, dims))
        return y + self._param("bias") if self.cfg.bias else y


def replacement(dot: DotGeneral) -> DotGeneral | None:
    """Returns the child when it is not the plain product, which every kernel has built in."""
    plain = type(dot) is DotGeneral and dot.cfg.precision is None
    return None if plain else dot
