"""What all adapters of foreign layers share: described parameters, state by path, one call."""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from axcore.context import derive_key
from axcore.errors import ModuleError, did_you_mean
from axcore.layers.base import Layer
from axcore.module import Module, ParameterSpec, no_context

__all__ = ["ForeignLayer", "ForeignLeaf", "imported", "segment"]


@dataclasses.dataclass(frozen=True)
class ForeignLeaf:
    """One array of a foreign layer, before it exists.

    Attributes:
        path: Its place in the foreign layer.
        shape: Shape.
        dtype: Dtype.
        kind: ``parameter`` (trained) or ``state``.
        axes: Logical axes that the foreign layer itself states, or None.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    kind: Literal["parameter", "state"] = "parameter"
    axes: tuple[str | None, ...] | None = None


class ForeignLayer(Layer):
    """A layer written for another library: the role, and what all adapters share.

    Its parameters stand in our state at the foreign layer's own paths (``linear1/kernel``). They
    are made together from one key, the layer's own, as the foreign library makes them. With
    ``param_dtype`` set (here or above) they are stored in that dtype, with ``compute_dtype``
    parameters and inputs are cast to it before the call; else the foreign layer decides.

    Biases, scales and other parameters of fewer than two dims have no weight decay, unless the
    learner's patterns say otherwise.
    """

    class Config(Layer.Config):
        """``axes`` gives parameters logical axes; those it does not name are replicated.

        Keys are globs over the layer's own paths (``*/kernel``; ``*`` crosses components), values
        one logical axis, or None, for each dim.
        """

        axes: Mapping[str, tuple[str | None, ...]] = {}

    def __init__(self, cfg: Config, *, parent: Module | None = None):
        super().__init__(cfg, parent=parent)
        self._leaves = tuple(self._describe())
        self._described = self._specs_of(self._leaves)

    @abc.abstractmethod
    def _describe(self) -> Sequence[ForeignLeaf]:
        """Returns the layer's arrays; nothing is computed."""

    @abc.abstractmethod
    def _make(self, key: jax.Array) -> Sequence[jax.Array]:
        """Returns initial values in the order of the leaves."""

    @abc.abstractmethod
    def _apply(
        self, values: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[int, Any]]:
        """Calls the layer: ``(outputs, {leaf index: new value of a state})``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the foreign layer with these arguments."""
        state = self._context.state
        values = [self._cast(_at(state, leaf.path, self), leaf.kind) for leaf in self._leaves]
        args = tuple(jax.tree.map(self._cast, arg) for arg in args)
        outputs, updates = self._apply(values, args, kwargs)
        for index, value in updates.items():
            leaf = self._leaves[index]
            if (value.shape, value.dtype) != (leaf.shape, leaf.dtype):
                raise ModuleError(
                    f"the state {'/'.join(leaf.path)!r} is {leaf.dtype}{list(leaf.shape)} and was "
                    f"set to {value.dtype}{list(value.shape)}",
                    code="AX322",
                    where=self.path,
                )
            # Microbatches and replicas see different rows of one batch: their statistics average.
            mean = leaf.dtype == jnp.float32
            self._context.set_state(
                "/".join(leaf.path), value, reduction="mean" if mean else "last"
            )
        return outputs

    # The foreign layer's parameters are nested as it nests them and are made together, so these
    # two take the place of the general ones.

    @no_context
    def parameter_specs(self) -> dict[str, Any]:
        """Returns the specs, nested as the foreign layer's arrays are."""
        return _unflatten(self._described)

    def _initial(self, key: jax.Array, key_path: str, indices: tuple[Any, ...]) -> dict[str, Any]:
        made = self._make(derive_key(key, f"init:{key_path}/", indices, 0))
        return _unflatten(
            {
                leaf.path: value.astype(self._described[leaf.path].dtype)
                for leaf, value in zip(self._leaves, made, strict=True)
            }
        )

    def _specs_of(self, leaves: Sequence[ForeignLeaf]) -> dict[tuple[str, ...], ParameterSpec]:
        patterns: Mapping[str, tuple[str | None, ...]] = self.cfg.axes
        names = ["/".join(leaf.path) for leaf in leaves]
        if len(set(names)) < len(names):
            raise ModuleError(
                f"two arrays of the layer have the same path: {sorted(names)}",
                code="AX370",
                where=self.config_path or self.path,
            )
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ModuleError(
                    f"the pattern {pattern!r} matches none of the layer's arrays",
                    code="AX371",
                    where=f"{self.config_path}.axes",
                    hint=did_you_mean(pattern, names) or f"they are: {', '.join(names)}",
                )
        specs: dict[tuple[str, ...], ParameterSpec] = {}
        for index, leaf in enumerate(leaves):
            axes = leaf.axes or (None,) * len(leaf.shape)
            for pattern, wanted in patterns.items():
                if fnmatch.fnmatchcase(names[index], pattern):
                    axes = wanted
            if len(axes) != len(leaf.shape):
                raise ModuleError(
                    f"{names[index]!r} of shape {leaf.shape} got axes {axes}",
                    code="AX301",
                    where=f"{self.config_path}.axes",
                    hint="give one logical axis name, or None, for each dim",
                )
            dtype = jnp.dtype(leaf.dtype)
            if self.cfg.param_dtype is not None and _is_trained(leaf):
                dtype = jnp.dtype(self.cfg.param_dtype)
            specs[leaf.path] = ParameterSpec(
                leaf.shape,
                dtype.name,
                axes,
                _Alone(self, index),
                kind=leaf.kind,
                weight_decay=len(leaf.shape) > 1,
            )
        return specs

    def _cast(self, value: Any, kind: str = "parameter") -> Any:
        dtype = self.cfg.compute_dtype
        if dtype is None or kind == "state" or not hasattr(value, "dtype"):
            return value
        return value.astype(dtype) if jnp.issubdtype(value.dtype, jnp.floating) else value


@dataclasses.dataclass(frozen=True, eq=False)
class _Alone:
    """Initializer of one array, for whoever needs it without the others of its layer."""

    layer: ForeignLayer
    index: int

    def __call__(self, key: jax.Array, spec: ParameterSpec) -> jax.Array:
        """Makes all and returns one; under ``jit`` the others are not computed."""
        return self.layer._make(key)[self.index].astype(spec.dtype)


def imported(package: str, layer: Layer) -> Any:
    """Imports an optional package.

    Raises:
        ModuleError: It is not installed (AX372).
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.split(".")[0]
        raise ModuleError(
            f"{type(layer).__name__} needs the package {name!r}, which cannot be imported: {error}",
            code="AX372",
            where=layer.config_path or layer.path,
            hint=f"pip install {name}",
        ) from error


def segment(key: Any) -> str:
    """Returns a part of a path of ours for a key of a JAX key path."""
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            key = getattr(key, attribute)
            break
    return re.sub(r"\W", "_", str(key)) or "value"


def _is_trained(leaf: ForeignLeaf) -> bool:
    return leaf.kind == "parameter" and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _at(state: Any, path: tuple[str, ...], layer: Layer) -> Any:
    for name in path:
        if not isinstance(state, Mapping) or name not in state:
            raise ModuleError(
                f"the state given has no {'/'.join(path)!r}",
                code="AX328",
                where=layer.path,
                hint="pass the whole state that module.initialize(key) returned",
            )
        state = state[name]
    return state


def _unflatten(flat: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree
