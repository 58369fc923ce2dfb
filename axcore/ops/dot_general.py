"""The contraction as a child module, so that a configuration can replace it.

Every weight and attention contraction of :mod:`axcore.layers` is a :class:`DotGeneral` child. A
quantization recipe replaces those children, ``cfg.replace(DotGeneral.Config, Fp8Dot.Config())``,
and changes no layer.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Literal

import jax

from axcore.module import Module, ParameterSpec, no_context
from axcore.ops._dot import dot_general
from axcore.ops._grouped_matmul import grouped_matmul

__all__ = ["BaseDotGeneral", "DimensionNumbers", "DotGeneral"]

#: ((lhs contracting dims, rhs contracting dims), (lhs batch dims, rhs batch dims)).
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class BaseDotGeneral(Module):
    """The role of a weight's contraction: a product, or what wraps one, such as an adapter.

    A replacement of products derives from :class:`DotGeneral` and so takes the place of the product
    inside a wrapper too; a wrapper derives from this role and stays where it is.
    """

    class Config(Module.Config):
        """No fields."""

    @no_context
    def stored_weight(self, spec: ParameterSpec) -> ParameterSpec:
        """Returns how the weight that its layer contracts is stored.

        Args:
            spec: As the layer describes it.

        Returns:
            The same, or another dtype and kind for a product that reads its weight so.
        """
        return spec

    @abc.abstractmethod
    def forward(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        *,
        preferred_element_type: str | jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Contracts two arrays; see :meth:`DotGeneral.forward`."""


class DotGeneral(BaseDotGeneral):
    """``jax.lax.dot_general`` as a module: what replacements derive from, and the default.

    Weight gradients come in the weight's own order, which spares a transposing copy; forward-mode
    differentiation (``jax.jvp``) is not defined for it.

    Example:
        >>> class Int8Dot(DotGeneral):
        ...     def forward(self, lhs, rhs, dimension_numbers, *, preferred_element_type=None):
        ...         ...  # quantize, multiply, scale
    """

    class Config(BaseDotGeneral.Config):
        """How precise the product is."""

        # As in JAX: None is the backend's default (TPU: bfloat16 passes; CPU: float32).
        precision: Literal["default", "high", "highest"] | None = None

    def forward(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        *,
        preferred_element_type: str | jax.typing.DTypeLike | None = None,
    ) -> jax.Array:
        """Contracts two arrays; the result has batch dims, then free dims of lhs, then of rhs.

        Args:
            lhs: Activations, by convention.
            rhs: Weights, by convention; or keys, or values.
            dimension_numbers: As for ``jax.lax.dot_general``.
            preferred_element_type: Dtype of sums and result; default follows the operands.

        Returns:
            The product.
        """
        return dot_general(
            lhs,
            rhs,
            dimension_numbers,
            precision=self.cfg.precision,
            preferred_element_type=preferred_element_type,
        )

    @no_context
    def grouped(
        self,
        rows: jax.Array,
        weights: jax.Array,
        group_sizes: jax.Array,
        state: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Multiplies groups of rows, each with its own matrix, as a mixture's experts do.

        A function of its arguments alone, for it runs where a device has a part of them. A subclass
        that replaces :meth:`forward` replaces this too, or does not serve there.

        Args:
            rows: (M, K), sorted by group.
            weights: (E, K, N), or as :meth:`stored_weight` says.
            group_sizes: (E,) int32, rows in each group.
            state: The product's own arrays, as a call's context has them, each with E in front.

        Returns:
            (M, N); see :func:`axcore.ops.grouped_matmul`.
        """
        del state
        return grouped_matmul(rows, weights, group_sizes)

    @property
    def takes_groups(self) -> bool:
        """Whether :meth:`grouped` stands for :meth:`forward` where rows come in groups."""
        own = type(self)
        replaced = own.forward is not DotGeneral.forward
        return own.grouped is not DotGeneral.grouped if replaced else self.cfg.precision is None
