"""A plain JAX function with a pytree of parameters as a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, Required
from axcore.config import Config as AnyConfig
from axcore.interop._foreign import ForeignLayer, ForeignLeaf, segment

__all__ = ["FunctionLayer"]


class FunctionLayer(ForeignLayer):
    """``apply(params, *args)`` with ``params = init(key)``, any pytree of arrays.

    Integer arrays among the parameters are constants: kept, saved, not trained.

    Example:
        >>> cfg = FunctionLayer.Config(
        ...     init=partial_for(mlp.init, sizes=(64, 256, 64)), apply=mlp.apply
        ... )  # doctest: +SKIP
    """

    class Config(ForeignLayer.Config):
        """Functions with a public path, or ``partial_for`` of one."""

        init: Required[Callable[..., Any]] = REQUIRED
        apply: Required[Callable[..., Any]] = REQUIRED
        # What `apply` gets by keyword beside its inputs; the key is None outside training.
        passes: tuple[Literal["key", "is_training"], ...] = ()

    def _describe(self) -> Sequence[ForeignLeaf]:
        key = jax.eval_shape(lambda: jax.random.key(0))
        flat, self._tree = jax.tree_util.tree_flatten_with_path(
            jax.eval_shape(_function(self.cfg.init), key)
        )
        return [
            ForeignLeaf(
                tuple(map(segment, path)) or ("value",),
                leaf.shape,
                leaf.dtype,
                "parameter" if jnp.issubdtype(leaf.dtype, jnp.inexact) else "state",
            )
            for path, leaf in flat
        ]

    def _make(self, key: jax.Array) -> Sequence[jax.Array]:
        return [jnp.asarray(x) for x in jax.tree.leaves(_function(self.cfg.init)(key))]

    def _apply(
        self, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[int, Any]]:
        ctx = self._context
        if "key" in self.cfg.passes:
            kwargs["key"] = ctx.key() if ctx.is_training else None
        if "is_training" in self.cfg.passes:
            kwargs["is_training"] = ctx.is_training
        params = jax.tree.unflatten(self._tree, values)
        return _function(self.cfg.apply)(params, *args, **kwargs), {}


def _function(value: Any) -> Callable[..., Any]:
    return value.instantiate() if isinstance(value, AnyConfig) else value
