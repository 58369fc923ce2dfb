"""Low-rank adapters: a trained correction beside a weight that stays as it is.

An adapter takes the place of a layer's contraction (its ``dot`` child) and wraps it. So the layer,
whatever its class, keeps its own parameters at their own paths and knows nothing of the adapter, a
checkpoint of the base model fits, and a quantized product is adapted like a plain one.
:mod:`axcore.peft` puts adapters into a model's config.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from axcore.errors import ModuleError
from axcore.layers.base import Layer
from axcore.layers.dropout import Dropout
from axcore.layers.initializers import VarianceScaling, Zeros
from axcore.layers.roles import BaseDropout, BaseGroupedLinear
from axcore.module import Initializer, Module, ParameterSpec, no_context
from axcore.ops import BaseDotGeneral, DotGeneral, group_of_rows, grouped_matmul
from axcore.ops._dot import dot_general
from axcore.ops.dot_general import DimensionNumbers

__all__ = ["DoRA", "LoRA", "LowRankAdapter"]

_FACTOR = "factor"  # among what grouped products read


class LowRankAdapter(Layer, BaseDotGeneral):
    """A contraction with a low-rank correction of its weight: the role, and what all forms share.

    The layer that owns it has described a parameter ``weight`` of shape ``(*in, *out)`` that it
    contracts over ``in``. The adapter adds ``lora_a`` (*in, rank) and ``lora_b`` (rank, *out). Of a
    weight for each of several groups of rows, ``(groups, in, out)``, each group's has its own:
    ``lora_a`` (groups, in, rank) and ``lora_b`` (groups, rank, out).
    """

    class Config(Layer.Config, BaseDotGeneral.Config):
        """The size of the correction."""

        rank: int = 8
        # The correction is scaled by alpha / rank, or by alpha / sqrt(rank).
        alpha: float = 16.0
        # rsLoRA (Kalajdzievski, arXiv:2312.03732): large ranks then learn as fast as small ones.
        rank_stabilized: bool = False
        # Applied to the correction's input only.
        dropout: BaseDropout.Config = Dropout.Config()
        a_init: Initializer = VarianceScaling(distribution="normal")
        b_init: Initializer = Zeros()
        # The contraction with the base weight.
        base: BaseDotGeneral.Config = DotGeneral.Config()

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        if cfg.rank < 1:
            raise ModuleError(
                f"rank is {cfg.rank}, expected at least 1",
                code="AX360",
                where=f"{self.config_path}.rank",
            )
        if not math.isfinite(cfg.alpha):
            raise ModuleError(
                f"alpha is {cfg.alpha}, expected a finite number",
                code="AX360",
                where=f"{self.config_path}.alpha",
            )
        weight = _weight_of(self, parent)
        self._in_dims = weight.fan_in_dims
        first, end = self._in_dims[0], self._in_dims[-1] + 1
        self._groups, self._out = weight.shape[:first], weight.shape[end:]
        self._group_axes, self._out_axes = weight.axes[:first], weight.axes[end:]
        rate = getattr(cfg.dropout, "rate", 0.0)
        if self._groups and rate:
            raise ModuleError(
                f"an adapter of groups of rows got dropout={rate}, expected 0: such products run "
                "where a device has a part of the rows and no random key",
                code="AX960",
                where=f"{self.config_path}.dropout",
                hint="set dropout=0, or leave experts out with targets=",
            )
        self._add_weight(
            "lora_a",
            (*weight.shape[:end], cfg.rank),
            (*weight.axes[:end], "lora_rank"),
            cfg.a_init,
            fan_in_dims=self._in_dims,
            fan_out_dims=(end,),
            optional=True,
        )
        self._add_weight(
            "lora_b",
            (*self._groups, cfg.rank, *self._out),
            (*self._group_axes, "lora_rank", *self._out_axes),
            cfg.b_init,
            fan_in_dims=(first,),
            fan_out_dims=tuple(range(first + 1, first + 1 + len(self._out))),
            optional=True,
        )
        self.base = self._add_child("base", cfg.base, BaseDotGeneral)
        self.dropout = self._add_child("dropout", cfg.dropout, BaseDropout)
        self._stored_shape = self.base.stored_weight(weight).shape

    @property
    def scale(self) -> float:
        """What the correction is multiplied by."""
        rank = self.cfg.rank
        return self.cfg.alpha / (math.sqrt(rank) if self.cfg.rank_stabilized else rank)

    @property
    def operand_dtype(self) -> str | None:
        """Dtype that the base's product runs in, where it is another than the layer's."""
        return getattr(self.base, "operand_dtype", None)

    @no_context
    def stored_weight(self, spec: ParameterSpec) -> ParameterSpec:
        """Returns how the base's product stores the weight."""
        return self.base.stored_weight(spec)

    @abc.abstractmethod
    def merge(self, weight: jax.Array) -> jax.Array:
        """Returns the weight whose plain contraction equals this one: same shape, float32."""

    def _correction(self) -> jax.Array:
        """Returns ``scale A B`` in float32, of the weight's shape."""
        a, b = self._param("lora_a", "float32"), self._param("lora_b", "float32")
        return self.scale * jax.lax.dot_general(a, b, self._low_dims(a))

    def _float32(self, weight: jax.Array) -> jax.Array:
        """Returns the base weight's numbers, which a quantized one alone does not hold."""
        if not jnp.issubdtype(weight.dtype, jnp.floating) or weight.dtype.itemsize < 2:
            raise ModuleError(
                f"the weight is stored as {weight.dtype} with scales, expected floats",
                code="AX361",
                where=self.path,
                hint="merge adapters, and train DoRA, before the model is quantized",
            )
        return weight.astype(jnp.float32)

    def _corrected(self, lhs: jax.Array, dimension_numbers: DimensionNumbers) -> jax.Array:
        """Returns ``scale (x A) B``: two thin products instead of one with the weight's shape."""
        a, b = (self._param(name, str(lhs.dtype)) for name in ("lora_a", "lora_b"))
        low = dot_general(self.dropout(lhs), a, dimension_numbers)
        return self.scale * dot_general(low, b, self._low_dims(low))

    def _low_dims(self, low: jax.Array) -> DimensionNumbers:
        """How (*groups, ..., rank) meets ``lora_b``."""
        groups = tuple(range(len(self._groups)))
        return ((low.ndim - 1,), (len(groups),)), (groups, groups)

    @property
    def takes_groups(self) -> bool:
        """Whether :meth:`grouped` stands for :meth:`forward` where rows come in groups."""
        return bool(self._groups) and self.base.takes_groups

    @no_context
    def grouped(
        self,
        rows: jax.Array,
        weights: jax.Array,
        group_sizes: jax.Array,
        state: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Multiplies groups of rows; see :meth:`axcore.ops.DotGeneral.grouped`."""
        assert state is not None
        start = "base/"
        of_base = {n.removeprefix(start): x for n, x in state.items() if n.startswith(start)}
        y = self.base.grouped(rows, weights, group_sizes, of_base)
        a, b = (state[name].astype(rows.dtype) for name in ("lora_a", "lora_b"))
        low = grouped_matmul(rows, a, group_sizes)
        return y + (self.scale * grouped_matmul(low, b, group_sizes)).astype(y.dtype)

    def _check(self, weight: jax.Array, dimension_numbers: DimensionNumbers) -> None:
        (_, contracted), (_, batch) = dimension_numbers
        shape, wanted, groups = self._stored_shape, self._in_dims, range(len(self._groups))
        if weight.shape != shape or tuple(contracted) != wanted or tuple(batch) != tuple(groups):
            raise ModuleError(
                f"an adapter of a weight {shape} contracted over dims {wanted} was called with "
                f"{weight.shape} over dims {tuple(contracted)}",
                code="AX361",
                where=self.path,
            )


class LoRA(LowRankAdapter):
    r"""``y = x W + s (x A) B`` with ``s = alpha / rank``.

    Hu et al., arXiv:2106.09685. ``B`` starts at zero, so training starts from the base model.
    """

    class Config(LowRankAdapter.Config):
        """No further fields."""

    def forward(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        *,
        preferred_element_type: str | jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Contracts (..., *in) with the weight (*in, *out) and adds the correction."""
        self._check(rhs, dimension_numbers)
        y = self.base(lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type)
        return y + self._corrected(lhs, dimension_numbers).astype(y.dtype)

    def merge(self, weight: jax.Array) -> jax.Array:
        """Returns ``W + s A B``."""
        return self._float32(weight) + self._correction()


class DoRA(LowRankAdapter):
    r"""``y = (m / ||V||) (x V)`` with ``V = W + s A B`` and a trained magnitude per output.

    Liu et al., arXiv:2402.09353. Norms are over the input dims. The magnitude is stored as its
    difference from the base weight's norm, ``m = ||W|| + lora_magnitude``: it starts at zero, so no
    initial value depends on a weight that is loaded later, and its gradient is that of ``m``.
    """

    class Config(LowRankAdapter.Config):
        """``norm_gradient`` lets the gradient pass through ``||V||``; the paper cuts it (4.3)."""

        norm_gradient: bool = False

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        self._add_weight(
            "lora_magnitude",
            (*self._groups, *self._out),
            (*self._group_axes, *self._out_axes),
            Zeros(),
            weight_decay=False,
            optional=True,
        )

    def forward(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        *,
        preferred_element_type: str | jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Contracts (..., *in) with the weight (*in, *out), corrected in direction and length."""
        self._check(rhs, dimension_numbers)
        y = self.base(lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type)
        corrected = y + self._corrected(lhs, dimension_numbers).astype(y.dtype)
        return corrected * self._across(self._factor(self._float32(rhs)), y).astype(y.dtype)

    @property
    def group_specs(self) -> dict[str, ParameterSpec]:
        """As of the base class, and the factor ``m / ||V||``."""
        return {**super().group_specs, _FACTOR: self._specs["lora_magnitude"]}

    def group_state(self, weights: jax.Array) -> dict[str, jax.Array]:
        """As of the base class, and the factor: a device may have a part of what norms are over."""
        state = super().group_state(weights)
        return {**state, _FACTOR: self._factor(self._float32(weights))}

    @no_context
    def grouped(
        self,
        rows: jax.Array,
        weights: jax.Array,
        group_sizes: jax.Array,
        state: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Multiplies groups of rows; see :meth:`axcore.ops.DotGeneral.grouped`."""
        assert state is not None
        y = super().grouped(rows, weights, group_sizes, state)
        of_row = group_of_rows(group_sizes, rows.shape[0])
        return y * state[_FACTOR][of_row].astype(y.dtype)

    def merge(self, weight: jax.Array) -> jax.Array:
        """Returns ``m V / ||V||``."""
        weight = self._float32(weight)
        merged = weight + self._correction()
        return merged * self._across(self._factor(weight), merged)

    def _across(self, factor: jax.Array, y: jax.Array) -> jax.Array:
        """Returns (*groups, *out) with dims of size 1 between them, as many as ``y`` has."""
        between = (1,) * (y.ndim - factor.ndim)
        return factor.reshape(*self._groups, *between, *self._out)

    def _factor(self, weight: jax.Array) -> jax.Array:
        """Returns ``m / ||V||`` in float32, of shape (*groups, *out)."""
        norm = self._norm(weight + self._correction())
        if not self.cfg.norm_gradient:
            norm = jax.lax.stop_gradient(norm)
        return (self._norm(weight) + self._param("lora_magnitude", "float32")) / norm

    def _norm(self, weight: jax.Array) -> jax.Array:
        squares = jnp.sum(jnp.square(weight), axis=self._in_dims)
        # A column of zeros has a factor of 1 and a gradient, instead of NaN.
        return jnp.sqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))


def _weight_of(adapter: LowRankAdapter, parent: Module | None) -> ParameterSpec:
    """Returns the spec of the weight that the owner contracts.

    Raises:
        ModuleError: The owner has described none, or contracts other dims than the leading ones.
    """
    spec = parent.parameter_specs().get("weight") if parent is not None else None
    if not isinstance(spec, ParameterSpec):
        raise ModuleError(
            f"{type(adapter).__name__} adapts the weight of the layer that owns it, and "
            f"{'there is none' if parent is None else f'{type(parent).__name__} has none'}",
            code="AX362",
            where=adapter.config_path or adapter.path,
            hint="make it the `dot` of a Linear, or of a layer that describes its parameter "
            "`weight` before it adds this child",
        )
    first, dims = int(isinstance(parent, BaseGroupedLinear)), spec.fan_in_dims
    if not dims or dims != tuple(range(first, first + len(dims))):
        raise ModuleError(
            f"the weight {spec.shape} has fan_in_dims {dims}, expected the leading dims"
            f"{' after that of the groups' if first else ''}, those that are contracted",
            code="AX362",
            where=adapter.config_path or adapter.path,
        )
    return spec
