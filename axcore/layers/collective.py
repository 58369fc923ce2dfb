"""Weight products that move positions between devices while they multiply."""

from __future__ import annotations

import math

import jax

from axcore import ops
from axcore.layers.linear import Linear
from axcore.module import Module
from axcore.ops import DotGeneral
from axcore.ops.dot_general import DimensionNumbers

__all__ = ["CollectiveDot"]


class CollectiveDot(DotGeneral):
    """The product of a :class:`Linear` at the border of a branch, as a collective product.

    Into the branch (``embed`` to ``mlp`` or heads) it is :func:`axcore.ops.all_gather_matmul`, out
    of it :func:`axcore.ops.matmul_reduce_scatter`; any other product is the plain one. A kernel
    that overlaps serves under sequence parallelism (``residual_seq`` split further than ``seq``);
    the reference, everywhere else, is the plain product too.

    Several products of one input, such as those of a gated feed-forward, each gather it: XLA shares
    one gather among them. So this pays where a product takes longer than the transfers it hides.
    """

    class Config(DotGeneral.Config):
        """As :class:`DotGeneral`; with a precision set it is that."""

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        owner = parent
        while owner is not None and not isinstance(owner, Linear):
            owner = owner._parent
        self._num_in = 0
        self._into: str | None = None  # the axis of outputs, or
        self._out_of: str | None = None  # of inputs
        if owner is None or cfg.precision is not None:
            return
        weight = owner._specs["weight"]
        self._num_in = len(weight.fan_in_dims)
        inputs, outputs = weight.axes[: self._num_in], weight.axes[self._num_in :]
        if inputs == ("embed",) and outputs != ("embed",):
            self._into = outputs[0]
        elif outputs == ("embed",):
            self._out_of = inputs[0]

    def forward(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        *,
        preferred_element_type: str | jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Contracts (batch, seq, *in) with (*in, *out); see :meth:`DotGeneral.forward`."""
        axis, num_in = self._into or self._out_of, self._num_in
        fits = lhs.ndim == 2 + num_in and lhs.dtype == rhs.dtype and preferred_element_type is None
        if axis is None or not fits:
            return super().forward(
                lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type
            )
        shape = rhs.shape[num_in:]
        x = lhs.reshape(*lhs.shape[:2], -1)
        weight = rhs.reshape(x.shape[2], math.prod(shape))
        product = ops.all_gather_matmul if self._into else ops.matmul_reduce_scatter
        return product(x, weight, axis=axis).reshape(*lhs.shape[:2], *shape)
