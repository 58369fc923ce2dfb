"""Layer: a module with parameters and a precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from axcore.context import InvocationContext, current_context
from axcore.errors import ModuleError
from axcore.module import Module, ParameterSpec

__all__ = ["BETWEEN_BRANCHES", "Layer"]

BETWEEN_BRANCHES = ("batch", "residual_seq", "embed")
"""Logical axes of what lies between a layer's branches: rules may split its positions further."""


class Layer(Module):
    """Base of all layers.

    Precision: parameters are stored in ``param_dtype``, products run in ``compute_dtype``, norms,
    softmax, routers and losses reduce in ``reduce_dtype``. Each is taken from the parent unless
    set; at the root the default is float32.
    """

    class Config(Module.Config):
        """Precision of the layer and, unless they set their own, of its children."""

        param_dtype: str | None = None
        compute_dtype: str | None = None
        reduce_dtype: str | None = None

    inherited_fields = ("param_dtype", "compute_dtype", "reduce_dtype")
    _DTYPES = inherited_fields

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        for name in self._DTYPES:
            value = getattr(cfg, name, None)
            if value is not None and not is_dtype(value, floating=name != "param_dtype"):
                kind = "of a dtype" if name == "param_dtype" else "of a floating-point dtype"
                raise ModuleError(
                    f"{name} is {value!r}, expected the name {kind}",
                    code="AX345",
                    where=self.config_path or self.path,
                    hint="for example float32 or bfloat16",
                )

    @property
    def param_dtype(self) -> str:
        """Dtype name of the stored parameters."""
        return self.cfg.param_dtype or "float32"

    @property
    def compute_dtype(self) -> str:
        """Dtype name of activations and products."""
        return self.cfg.compute_dtype or "float32"

    @property
    def reduce_dtype(self) -> str:
        """Dtype name of reductions in norms, softmax and losses."""
        return self.cfg.reduce_dtype or "float32"

    def _add_weight(
        self,
        name: str,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        initializer: Any,
        **hints: Any,
    ) -> None:
        """Describes a parameter stored in ``param_dtype``."""
        for dim in shape:
            if dim <= 0:
                raise ModuleError(
                    f"{name!r} would have shape {shape}: every dim must be positive",
                    code="AX309",
                    where=self.config_path or self.path,
                )
        spec = ParameterSpec(shape, self.param_dtype, tuple(axes), initializer, **hints)
        self._add_parameter(name, spec)

    def _check_positive(self, name: str, *, zero: bool = False) -> None:
        """Raises ModuleError when a number in the config could only give NaN.

        Args:
            name: The field; None passes.
            zero: Whether 0 is fine too.
        """
        value = getattr(self.cfg, name)
        if value is None or value > 0 or (zero and value == 0):
            return
        raise ModuleError(
            f"{name} is {value}, expected a number {'>= 0' if zero else '> 0'}",
            code="AX337",
            where=f"{self.config_path}.{name}" if self.config_path else name,
        )

    @property
    def _context(self) -> InvocationContext:
        ctx = current_context()
        if ctx is None:  # public methods check this; only a private helper called alone gets here
            raise ModuleError(f"{self.path} has no running call", code="AX302")
        return ctx

    def _param(self, name: str, dtype: str | None = None) -> jax.Array:
        """Returns a parameter of the running call, cast to ``dtype`` or ``compute_dtype``."""
        state = self._context.state
        if name not in state:
            raise ModuleError(
                f"the state given has no {name!r} (it has {sorted(state)})",
                code="AX328",
                where=self.path,
                hint="pass the whole state that module.initialize(key) returned",
            )
        return state[name].astype(jnp.dtype(dtype or self.compute_dtype))

    def _constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        return self._context.constrain(x, axes)

    def _residual(self, x: jax.Array) -> jax.Array:
        """Constrains (batch, seq, embed) between branches where rules split its positions further.

        Where ``residual_seq`` lies like ``seq`` there is nothing to say.
        """
        target = self._context.target
        if target.mesh_axes("residual_seq") == target.mesh_axes("seq"):
            return x
        return self._constrain(x, *BETWEEN_BRANCHES)


def is_dtype(name: str, *, floating: bool) -> bool:
    """Tells whether this is the name of a dtype, and of a floating-point one if it must be."""
    try:
        dtype = jnp.dtype(name)
    except TypeError:
        return False
    return not floating or bool(jnp.issubdtype(dtype, jnp.floating))
