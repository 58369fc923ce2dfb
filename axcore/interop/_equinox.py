"""An Equinox module as a layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, Required
from axcore.config import Config as AnyConfig
from axcore.errors import ModuleError
from axcore.interop._foreign import ForeignLayer, ForeignLeaf, imported, segment

__all__ = ["EquinoxLayer"]


class EquinoxLayer(ForeignLayer):
    """A module of Equinox (Kidger & Garcia, arXiv:2111.00254).

    Its float arrays are parameters, other arrays constants. ``inference`` flags follow training and
    evaluation, and a module whose call takes ``key`` gets one in training, a different one for each
    element of the batch. Modules with ``equinox.nn.State`` (such as BatchNorm) are refused.

    Example:
        >>> cfg = EquinoxLayer.Config(
        ...     module=partial_for(
        ...         equinox.nn.MLP, in_size=64, out_size=64, width_size=256, depth=1
        ...     ),
        ...     batch_dims=2,
        ... )  # doctest: +SKIP
    """

    class Config(ForeignLayer.Config):
        """``module`` makes the module; it gets ``key`` when it takes one."""

        module: Required[AnyConfig] = REQUIRED
        # Equinox layers take one example: how many leading dims of the inputs to map over.
        batch_dims: int = 0

    def _describe(self) -> Sequence[ForeignLeaf]:
        eqx = self._eqx = imported("equinox", self)
        key = jax.eval_shape(lambda: jax.random.key(0))
        module = eqx.filter_eval_shape(self._build, key)
        if any(isinstance(x, eqx.nn.StateIndex) for x in _with_indices(eqx, module)):
            raise ModuleError(
                f"{type(module).__name__} keeps an equinox.nn.State, which EquinoxLayer does not "
                "carry",
                code="AX373",
                where=self.config_path or self.path,
                hint="use a layer without running statistics, or write it with FunctionLayer",
            )
        flat, self._tree = jax.tree_util.tree_flatten_with_path(module)
        # What is no array stays in the template; arrays take the place of their descriptions.
        self._template = [leaf for _, leaf in flat]
        self._places = [
            i for i, (_, leaf) in enumerate(flat) if isinstance(leaf, jax.ShapeDtypeStruct)
        ]
        self._takes_key = "key" in inspect.signature(type(module).__call__).parameters
        return [
            ForeignLeaf(
                tuple(map(segment, flat[i][0])),
                flat[i][1].shape,
                flat[i][1].dtype,
                "parameter" if jnp.issubdtype(flat[i][1].dtype, jnp.inexact) else "state",
            )
            for i in self._places
        ]

    def _build(self, key: jax.Array) -> Any:
        make: Any = self.cfg.module.instantiate()
        takes_key = "key" in inspect.signature(make).parameters
        return make(key=key) if takes_key else make()

    def _make(self, key: jax.Array) -> Sequence[jax.Array]:
        leaves = jax.tree.leaves(self._build(key))
        return [jnp.asarray(leaves[i]) for i in self._places]

    def _apply(
        self, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[int, Any]]:
        ctx = self._context
        leaves = list(self._template)
        for place, value in zip(self._places, values, strict=True):
            leaves[place] = value
        module = jax.tree.unflatten(self._tree, leaves)
        module = self._eqx.nn.inference_mode(module, value=not ctx.is_training)
        key = ctx.key() if self._takes_key and ctx.is_training else None
        dims: int = self.cfg.batch_dims
        keys = {} if key is None else {"key": _split(key, jax.tree.leaves(args)[0].shape[:dims])}

        def call(args: tuple[Any, ...], keys: dict[str, Any]) -> Any:
            return module(*args, **keys, **kwargs)

        mapped: Callable[..., Any] = call
        for _ in range(dims):
            mapped = jax.vmap(mapped)
        return mapped(args, keys), {}


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.split(key, shape) if shape else key


def _with_indices(eqx: Any, module: Any) -> list[Any]:
    return jax.tree.leaves(module, is_leaf=lambda x: isinstance(x, eqx.nn.StateIndex))
