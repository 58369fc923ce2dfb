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

from axcore.context import current_context
from axcore.errors import OpError
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

    @property
    def contracted_weight(self) -> ParameterSpec | None:
        """What describes the weight of the layer that owns this product, behind any wrapper.

        None where no owner has described a ``weight`` before it added this child.
        """
        owner = self._parent
        while owner is not None and "weight" not in owner._specs:
            owner = owner._parent
        return None if owner is None else owner._specs["weight"]

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

    @property
    def takes_groups(self) -> bool:
        """Whether :meth:`grouped` stands for :meth:`forward` where rows come in groups."""
        return False

    @property
    def group_specs(self) -> dict[str, ParameterSpec]:
        """What describes the arrays of :meth:`group_state`, by the same paths."""
        specs = dict(self._specs)
        for name, product in self._products.items():
            specs |= {f"{name}/{path}": spec for path, spec in product.group_specs.items()}
        return specs

    def group_state(self, weights: jax.Array) -> dict[str, jax.Array]:
        """Returns what :meth:`grouped` reads beside the weights: its own and its children's arrays.

        Called once for each call of the layer, with the whole weights and in a context: what
        follows from them is computed here, and state is set here.

        Args:
            weights: All groups' matrices.

        Returns:
            Arrays by path, each with the groups in front.
        """
        ctx = current_context()
        assert ctx is not None  # public methods are called in one
        state = {name: ctx.state[name] for name in self._specs}
        for name, product in self._products.items():
            state |= {f"{name}/{path}": x for path, x in product.group_state(weights).items()}
        return state

    @property
    def _products(self) -> dict[str, BaseDotGeneral]:
        children = self.children.items()
        return {name: child for name, child in children if isinstance(child, BaseDotGeneral)}

    @no_context
    def grouped(
        self,
        rows: jax.Array,
        weights: jax.Array,
        group_sizes: jax.Array,
        state: Mapping[str, jax.Array] | None = None,
    ) -> jax.Array:
        """Multiplies groups of rows; see :meth:`DotGeneral.grouped`.

        Raises:
            OpError: Not :attr:`takes_groups`.
        """
        raise OpError(
            f"{type(self).__name__} does not multiply groups of rows",
            code="AX961",
            where=self.config_path or self.path,
        )


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
            state: What :meth:`group_state` gave, or a device's part of it.

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
