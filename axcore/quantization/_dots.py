"""Quantized products for training, as replacements of :class:`axcore.ops.DotGeneral`.

Each keeps the operands' own dtype outside: it quantizes what it is given, multiplies, and returns
the dtype that the plain product would. Parameters, optimizer and checkpoints do not know of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax

from axcore.context import current_context
from axcore.errors import ConfigError
from axcore.module import Module, no_context
from axcore.ops import DotGeneral
from axcore.ops.dot_general import DimensionNumbers
from axcore.quantization._grouped import quantized_grouped_product
from axcore.quantization._products import AT_HAND, Magnitudes, Plan, quantized_product
from axcore.quantization._values import Operand

__all__ = [
    "Fp8Dot",
    "Int4Dot",
    "Int8Dot",
    "MxFp8Dot",
    "QuantizedDot",
    "check_float8",
]

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4")


class QuantizedDot(DotGeneral):
    """A product of quantized operands: the base of training recipes' products.

    A subclass states its plan in ``__init__``. Attention's inner products and the head's run it
    inside loops of their kernels, which take no state and no random numbers: see
    :attr:`needs_context`.
    """

    class Config(DotGeneral.Config):
        """``precision`` is that of the products that are not quantized."""

    plan: Plan
    #: Whether it draws random numbers or keeps state, and so cannot run inside a kernel.
    needs_context: bool = False
    #: Whether it multiplies groups of rows too; blocks of scales do not.
    in_groups: bool = True

    @property
    def operand_dtype(self) -> str:
        """Dtype that the forward product runs in, as instances state their peak rates."""
        lhs, rhs = self.plan.lhs, self.plan.rhs
        if lhs is None or rhs is None:
            return "bfloat16"
        return "int8" if lhs.dtype.startswith("int") else lhs.dtype

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        """All dtypes that hardware must multiply, forward and backward."""
        lhs, rhs, grad = self.plan.lhs, self.plan.rhs, self.plan.grad
        if lhs is None or rhs is None:
            return ()
        backward = grad is not None and (self.plan.grad_lhs or self.plan.grad_rhs)
        used = [lhs, rhs, *([grad] if grad is not None and backward else [])]
        return tuple(dict.fromkeys("int8" if o.dtype == "int4" else o.dtype for o in used))

    def forward(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        *,
        preferred_element_type: str | jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Contracts two arrays; see :meth:`axcore.ops.DotGeneral.forward`."""
        ctx = current_context()
        stochastic = self.plan.grad is not None and self.plan.grad.stochastic
        key = ctx.key() if ctx is not None and ctx.is_training and stochastic else None
        plan = self.plan
        if stochastic and key is None:  # no gradient is taken outside of training
            plan = plan._replace(grad=None)
        return quantized_product(
            plan,
            lhs,
            rhs,
            dimension_numbers,
            preferred_element_type=preferred_element_type,
            magnitudes=self._magnitudes(lhs, rhs),
            key=key,
        )

    @no_context
    def grouped(
        self,
        rows: jax.Array,
        weights: jax.Array,
        group_sizes: jax.Array,
        state: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Multiplies groups of rows; see :meth:`axcore.ops.DotGeneral.grouped`."""
        del state
        return quantized_grouped_product(self.plan, rows, weights, group_sizes)

    @property
    def takes_groups(self) -> bool:
        """Whether :meth:`grouped` stands for :meth:`forward` where rows come in groups."""
        return self.in_groups and not self.needs_context

    def _magnitudes(self, lhs: jax.Array, rhs: jax.Array) -> Magnitudes:
        """Returns what the operands' largest values stand for."""
        del lhs, rhs
        return AT_HAND


class Int8Dot(QuantizedDot):
    """int8 with a scale for each channel, taken from the values at hand.

    A channel of the activations is a token, one of the weights an output; int8 products add up in
    int32. Both gradients are int8 products too unless the fields say otherwise.
    """

    class Config(QuantizedDot.Config):
        """What is quantized."""

        # Share of a token's largest activation that is kept; what is beyond saturates.
        activation_clip: float = 1.0
        # Rounds gradients up or down at random, which keeps their mean; costs random numbers.
        stochastic_rounding: bool = False
        quantize_lhs_grad: bool = True
        quantize_rhs_grad: bool = True

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        if not 0.0 < cfg.activation_clip <= 1.0:
            raise ConfigError(
                f"activation_clip is {cfg.activation_clip}, expected a share in (0, 1]",
                code="AX433",
                where=_where(self, "activation_clip"),
                hint="1.0 keeps a token's largest activation, 0.9 nine tenths of it",
            )
        self.needs_context = cfg.stochastic_rounding
        self.plan = Plan(
            lhs=Operand("int8", clip=cfg.activation_clip),
            rhs=Operand("int8"),
            grad=Operand("int8", stochastic=cfg.stochastic_rounding),
            grad_lhs=cfg.quantize_lhs_grad,
            grad_rhs=cfg.quantize_rhs_grad,
            precision=cfg.precision,
        )


class Fp8Dot(QuantizedDot):
    """float8 with scales taken from the values at hand ("current scaling").

    Forward operands are e4m3, gradients e5m2 (Micikevicius et al., arXiv:2209.05433). With one
    scale for a tensor the backward pass keeps the float8 activations: a quarter of float32.
    """

    class Config(QuantizedDot.Config):
        """Formats and what shares a scale."""

        dtype: str = "float8_e4m3fn"
        grad_dtype: str = "float8_e5m2"
        granularity: Literal["tensor", "channel"] = "tensor"
        quantize_lhs_grad: bool = True
        quantize_rhs_grad: bool = True

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        check_float8(self)
        self.plan = Plan(
            lhs=Operand(cfg.dtype, cfg.granularity),
            rhs=Operand(cfg.dtype, cfg.granularity),
            grad=Operand(cfg.grad_dtype, cfg.granularity),
            grad_lhs=cfg.quantize_lhs_grad,
            grad_rhs=cfg.quantize_rhs_grad,
            precision=cfg.precision,
        )


class MxFp8Dot(QuantizedDot):
    """float8 in blocks of 32 along the sum, each with a power of two as its scale (MXFP8).

    OCP Microscaling formats 1.0; all operands are e4m3, as in Mishra et al., arXiv:2506.08027. One
    outlier then costs its block precision, not its tensor.
    """

    class Config(QuantizedDot.Config):
        """Formats; hardware knows blocks of 32."""

        dtype: str = "float8_e4m3fn"
        grad_dtype: str = "float8_e4m3fn"
        block: int = 32

    in_groups = False

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        check_float8(self)
        if cfg.block < 2:
            raise ConfigError(
                f"block is {cfg.block}, expected at least 2",
                code="AX433",
                where=_where(self, "block"),
                hint="hardware knows blocks of 32",
            )
        operand = Operand(cfg.dtype, "block", cfg.block)
        self.plan = Plan(
            lhs=operand,
            rhs=operand,
            grad=Operand(cfg.grad_dtype, "block", cfg.block),
            precision=cfg.precision,
        )


class Int4Dot(QuantizedDot):
    """Training for weights of four bits: they are rounded forward, gradients pass straight through.

    The master weights stay as they are; what they round to is what :mod:`axcore.quantization`
    stores when such a model is converted for serving.
    """

    class Config(QuantizedDot.Config):
        """``activations``: int8 with a scale per token, or None for the layer's own dtype."""

        activations: Literal["int8"] | None = "int8"

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        self.plan = Plan(
            lhs=None if cfg.activations is None else Operand(cfg.activations),
            rhs=Operand("int4"),
            precision=cfg.precision,
        )


def check_float8(module: Module) -> None:
    """Raises ConfigError unless a product's dtype and that of its gradient are float8."""
    cfg: Any = module.cfg
    for name in ("dtype", "grad_dtype"):
        value = getattr(cfg, name)
        if value not in _FLOAT8:
            raise ConfigError(
                f"{name} is {value!r}, expected one of {', '.join(_FLOAT8)}",
                code="AX433",
                where=_where(module, name),
            )


def _where(module: Module, name: str) -> str:
    return f"{module.config_path}.{name}" if module.config_path else name
