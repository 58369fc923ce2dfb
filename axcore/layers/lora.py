"""Low-rank adapters: a trained correction beside a weight that stays as it is.

An adapter takes the place of a layer's contraction (its ``dot`` child) and wraps it. So the layer,
whatever its class, keeps its own parameters at their own paths and knows nothing of the adapter, a
checkpoint of the base model fits, and a quantized product is adapted like a plain one.
:mod:`axcore.peft` puts adapters into a model's config.
"""

from __future__ import annotations

import abc
import math

import jax
import jax.numpy as jnp

from axcore.errors import ModuleError
from axcore.layers.base import Layer
from axcore.layers.dropout import Dropout
from axcore.layers.initializers import VarianceScaling, Zeros
from axcore.layers.roles import BaseDropout
from axcore.module import Initializer, Module, ParameterSpec, no_context
from axcore.ops import BaseDotGeneral, DotGeneral
from axcore.ops._dot import dot_general
from axcore.ops.dot_general import DimensionNumbers

__all__ = ["DoRA", "LoRA", "LowRankAdapter"]


class LowRankAdapter(Layer, BaseDotGeneral):
    """A contraction with a low-rank correction of its weight: the role, and what all forms share.

    The layer that owns it has described a parameter ``weight`` of shape ``(*in, *out)`` that it
    contracts over ``in``. The adapter adds ``lora_a`` (*in, rank) and ``lora_b`` (rank, *out).
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
        num_in = len(weight.fan_in_dims)
        self._in, self._out = weight.shape[:num_in], weight.shape[num_in:]
        self._out_axes = weight.axes[num_in:]
        self._add_weight(
            "lora_a",
            (*self._in, cfg.rank),
            (*weight.axes[:num_in], "lora_rank"),
            cfg.a_init,
            fan_in_dims=tuple(range(num_in)),
            fan_out_dims=(num_in,),
            optional=True,
        )
        self._add_weight(
            "lora_b",
            (cfg.rank, *self._out),
            ("lora_rank", *self._out_axes),
            cfg.b_init,
            fan_in_dims=(0,),
            fan_out_dims=tuple(range(1, 1 + len(self._out))),
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
        return self.scale * jnp.tensordot(a, b, axes=1)

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
        (contracted, _), _ = dimension_numbers
        inner = (tuple(range(len(self._in))), (0,))
        a, b = (self._param(name, str(lhs.dtype)) for name in ("lora_a", "lora_b"))
        low = dot_general(self.dropout(lhs), a, ((contracted, inner[0]), ((), ())))
        return self.scale * dot_general(low, b, (((low.ndim - 1,), inner[1]), ((), ())))

    def _check(self, weight: jax.Array, dimension_numbers: DimensionNumbers) -> None:
        (_, contracted), (_, batch) = dimension_numbers
        shape = self._stored_shape
        wanted = tuple(range(len(self._in)))
        if weight.shape != shape or tuple(contracted) != wanted or tuple(batch):
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
            self._out,
            self._out_axes,
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
        return corrected * self._factor(self._float32(rhs)).astype(y.dtype)

    def merge(self, weight: jax.Array) -> jax.Array:
        """Returns ``m V / ||V||``."""
        weight = self._float32(weight)
        return (weight + self._correction()) * self._factor(weight)

    def _factor(self, weight: jax.Array) -> jax.Array:
        """Returns ``m / ||V||`` in float32, of shape (*out,)."""
        norm = self._norm(weight + self._correction())
        if not self.cfg.norm_gradient:
            norm = jax.lax.stop_gradient(norm)
        return (self._norm(weight) + self._param("lora_magnitude", "float32")) / norm

    def _norm(self, weight: jax.Array) -> jax.Array:
        squares = jnp.sum(jnp.square(weight), axis=tuple(range(len(self._in))))
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
    if spec.fan_in_dims != tuple(range(len(spec.fan_in_dims))) or not spec.fan_in_dims:
        raise ModuleError(
            f"the weight {spec.shape} has fan_in_dims {spec.fan_in_dims}, expected the leading "
            "dims, those that are contracted",
            code="AX362",
            where=adapter.config_path or adapter.path,
        )
    return spec
