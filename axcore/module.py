"""Module: a node of the program that owns its children and holds no arrays.

A module knows its children's interfaces only. Its state (parameters, statistics, caches) is
described by :class:`ParameterSpec` before it exists and lives outside, as nested dicts by child
name. Initialization, sharding, optimizer state, ahead-of-time compilation, restore and conversion
share that description.

Layers of a stack: a child named by a number is one layer; a child named ``a:b:c`` stands for
layers ``range(a, b, c)``, and its state has them stacked on a leading axis (logical axis
``layers``). Keys fold in the layer's number, so both forms start from bitwise-equal parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp

from axcore.config import Config, Configurable
from axcore.context import current_context, derive_key, invoke
from axcore.errors import ModuleError

__all__ = ["Initializer", "Module", "ParameterSpec", "flatten_specs", "no_context"]

M = TypeVar("M", bound="Module")
F = TypeVar("F", bound=Callable[..., Any])
# Parts of JAX's signatures are unknown to type checkers; strict mode would report each use.
_jax: Any = jax
_LAYER_NAME = re.compile(r"^\d+$|^(\d+):(\d+):(\d+)$")


@runtime_checkable
class Initializer(Protocol):
    """Makes an initial value: ``(key, spec) -> array`` of the spec's shape and dtype."""

    def __call__(self, key: jax.Array, spec: ParameterSpec) -> jax.Array:
        """Returns the initial value."""
        ...


@dataclasses.dataclass(frozen=True)
class ParameterSpec:
    """What a parameter or state is before it exists.

    Attributes:
        shape: Shape.
        dtype: Dtype name, such as ``"float32"``.
        axes: Logical axis name or None for each dim.
        initializer: Makes the initial value.
        fan_in_dims: Dims whose product is the fan-in.
        fan_out_dims: Dims whose product is the fan-out.
        kind: ``parameter`` (the learner updates it) or ``state`` (the module sets it).
        weight_decay: Hint that decoupled weight decay applies.
        memory: Hint where it lives: None (device) or a JAX memory kind such as ``pinned_host``.
        num_stacked: Leading dims that stack layers.
        optional: Hint that weights without it are still this model's: it then starts anew.
        fixed: State that no step sets, such as a weight stored in few bits.
        padding: How many entries at the end of each dim only fill it up, or empty: they start as
            zeros, mean nothing and stand in no other format.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]
    initializer: Initializer
    fan_in_dims: tuple[int, ...] = ()
    fan_out_dims: tuple[int, ...] = ()
    kind: Literal["parameter", "state"] = "parameter"
    weight_decay: bool = True
    memory: str | None = None
    num_stacked: int = 0
    optional: bool = False
    fixed: bool = False
    padding: tuple[int, ...] = ()

    def __post_init__(self):
        if len(self.axes) != len(self.shape):
            raise ModuleError(
                f"a parameter of shape {self.shape} got {len(self.axes)} axis names {self.axes}",
                code="AX301",
                hint="give one logical axis name, or None, for each dim",
            )

    def struct(self) -> jax.ShapeDtypeStruct:
        """Returns shape and dtype as JAX's abstract array."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    @property
    def valid_shape(self) -> tuple[int, ...]:
        """The shape without padding."""
        if not self.padding:
            return self.shape
        return tuple(size - pad for size, pad in zip(self.shape, self.padding, strict=True))

    def initial(self, key: jax.Array) -> jax.Array:
        """Returns the initial value: what the initializer makes without padding, then zeros."""
        if not self.padding:
            return self.initializer(key, self)
        valid = dataclasses.replace(self, shape=self.valid_shape, padding=())
        value = self.initializer(key, valid)
        zero = _jax.numpy.zeros((), value.dtype)
        return jax.lax.pad(value, zero, [(0, pad, 0) for pad in self.padding])

    def stacked(self, num_layers: int) -> ParameterSpec:
        """Returns the spec of ``num_layers`` of these on a new leading ``layers`` dim."""
        return dataclasses.replace(
            self,
            shape=(num_layers, *self.shape),
            axes=("layers", *self.axes),
            fan_in_dims=tuple(d + 1 for d in self.fan_in_dims),
            fan_out_dims=tuple(d + 1 for d in self.fan_out_dims),
            num_stacked=self.num_stacked + 1,
            padding=(0, *self.padding) if self.padding else (),
        )


def no_context(fn: F) -> F:
    """Marks a public method that describes or builds and so runs without a context."""
    fn._axcore_no_context = True  # type: ignore[attr-defined]
    return fn


def _with_context(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a public method so that a call of it pushes a context; the signature is kept."""

    @functools.wraps(fn)
    def method(self: Module, *args: Any, **kwargs: Any) -> Any:
        ctx = current_context()
        if ctx is None:
            raise ModuleError(
                f"{self.path}.{fn.__name__} was called outside of `functional`",
                code="AX302",
                hint="run it with axcore.functional(module, state=..., inputs=..., "
                f"is_training=..., method={fn.__name__!r})",
            )
        if ctx.module is self:
            return fn(self, *args, **kwargs)
        inner, ancestor = ctx.enter(self)
        with jax.named_scope(self.name):
            outputs = invoke(inner, fn.__name__, functools.partial(fn, self), args, kwargs)
        inner.leave(ancestor)
        return outputs

    return method


class Module(Configurable):
    """A node of the program: children, described state, and methods that run in a context.

    A subclass states its fields in a nested ``Config``, creates children in ``__init__`` and
    defines public methods; ``module(x)`` is ``module.forward(x)``. Public methods push an
    :class:`axcore.InvocationContext`; properties, ``_private`` methods and methods marked
    :func:`no_context` do not.

    Example:
        >>> class Twice(Module):
        ...     class Config(Module.Config):
        ...         inner: Module.Config = REQUIRED
        ...     def __init__(self, cfg, *, parent=None):
        ...         super().__init__(cfg, parent=parent)
        ...         self.inner = self._add_child("inner", cfg.inner)
        ...     def forward(self, x):
        ...         return self.inner(self.inner(x))
    """

    class Config(Configurable.Config):
        """Fields of every module: none."""

    # Config fields that a child takes from its parent when it leaves them None.
    inherited_fields: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name, value in list(vars(cls).items()):
            if name.startswith("_") or name in _FRAMEWORK_NAMES or not inspect.isfunction(value):
                continue
            if not getattr(value, "_axcore_no_context", False):
                setattr(cls, name, _with_context(value))

    @classmethod
    def from_config(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls,
        cfg: Any,
        *,
        name: str | None = None,
        parent: Module | None = None,
        config_path: str | None = None,
    ) -> Any:
        """Builds the module tree of a frozen config: no device, array, file or thread.

        Args:
            cfg: The frozen config.
            name: Name in messages; default the class's name in lower case.
            parent: The owning module.
            config_path: Path of ``cfg`` in the root config, for messages; default the root.
        """
        module = cls.__new__(cls)
        module.name = module.path = name or cls.__name__.lower()
        module.config_path = config_path or ""
        if parent is not None:
            join = "/" if _LAYER_NAME.match(module.name) else "."
            module.path = f"{parent.path}{join}{module.name}"
        missing = [n for n in dir(cls) if getattr(getattr(cls, n), "__isabstractmethod__", False)]
        if missing:
            raise ModuleError(
                f"{cls.__qualname__} does not define {', '.join(missing)}, which its role asks for",
                code="AX335",
                where=module.config_path or module.path,
            )
        module.__init__(cfg, parent=parent)
        if not hasattr(module, "_specs"):
            raise ModuleError(
                f"{cls.__qualname__}.__init__ does not call super().__init__",
                code="AX336",
                where=module.config_path or module.path,
                hint="start it with super().__init__(cfg, parent=parent)",
            )
        return module

    name: str
    path: str
    config_path: str

    def __init__(self, cfg: Any, *, parent: Module | None = None):
        if not hasattr(self, "name"):
            raise ModuleError(
                f"{type(self).__name__} was constructed directly",
                code="AX303",
                hint="use cfg.instantiate(name='m'), or self._add_child inside a module",
            )
        self.cfg = cfg
        self.children: dict[str, Module] = {}
        self.layers: range | int | None = None  # the layer or layers this module stands for
        self._parent = parent
        self._specs: dict[str, ParameterSpec] = {}
        if found := _LAYER_NAME.match(self.name):
            bounds = found.groups()
            self.layers = range(*map(int, bounds)) if bounds[0] else int(self.name)

    def __setattr__(self, name: str, value: Any):
        if isinstance(value, jax.Array):
            raise ModuleError(
                f"{getattr(self, 'path', type(self).__name__)}.{name} was set to an array; "
                "a module holds none",
                code="AX304",
                hint="describe it with self._add_parameter and read it from the context's state",
            )
        object.__setattr__(self, name, value)

    # -- building --------------------------------------------------------------------------

    def _add_child(
        self,
        name: str,
        cfg: Config,
        role: type[M] | None = None,
        *,
        config_path: str | None = None,
        **overrides: Any,
    ) -> M:
        """Creates a child from a copy of ``cfg`` with this module's say in ``overrides``.

        Args:
            name: Attribute and state name: an identifier, a layer number, or ``a:b:c`` for the
                layers ``range(a, b, c)`` that run as a scan over stacked state.
            cfg: The child's config; copied, checked, resolved and frozen, never changed.
            role: The abstract module whose interface is expected; for type checkers and checked.
            config_path: Path of ``cfg`` from the root when it is not this module's path + name.
            **overrides: Fields that the parent sets.

        Raises:
            ModuleError: The name is taken or no identifier, or the child is not of the role.
        """
        is_layer = bool(_LAYER_NAME.match(name))
        if not (name.isidentifier() or is_layer) or name.startswith("_"):
            raise ModuleError(
                f"child name {name!r} is not an identifier or layer number",
                code="AX305",
                where=self.path,
            )
        self._check_free(name, hasattr(type(self), name))
        if config_path is None:
            config_path = f"{self.config_path}.{name}" if self.config_path else name
        for field in self.inherited_fields:
            if field not in overrides and getattr(cfg, field, ...) is None:
                overrides[field] = getattr(self.cfg, field)
        line = tuple(module.cfg for module in self._ancestry())
        prepared = cfg.prepared(line, overrides, self.config_path)
        child = prepared.instantiate(name=name, parent=self, config_path=config_path)
        if not isinstance(child, role or Module):
            raise ModuleError(
                f"{config_path} makes a {type(child).__name__}, "
                f"expected a {(role or Module).__name__}",
                code="AX307",
                where=self.path,
            )
        self.children[name] = child
        if not is_layer:
            setattr(self, name, child)
        return child  # pyright: ignore[reportReturnType]

    def _add_parameter(self, name: str, spec: ParameterSpec) -> None:
        """Describes a parameter or state; ``ctx.state[name]`` is its value in a call."""
        if not name.isidentifier():
            raise ModuleError(f"parameter name {name!r} is not an identifier", where=self.path)
        self._check_free(name)
        self._specs[name] = spec

    def _check_free(self, name: str, taken: bool = False) -> None:
        if taken or name in self._specs or name in self.children:
            raise ModuleError(
                f"name {name!r} is taken in {type(self).__name__}", code="AX306", where=self.path
            )

    # -- structure -------------------------------------------------------------------------

    def line_from(self, ancestor: Module) -> tuple[Module, ...]:
        """Returns the modules from below ``ancestor`` down to self, or () when it is none."""
        line = list(self._ancestry())
        return tuple(reversed(line[: line.index(ancestor)])) if ancestor in line else ()

    def _ancestry(self) -> Iterator[Module]:
        """Yields this module, its parent, and so on up to the root."""
        module: Module | None = self
        while module is not None:
            yield module
            module = module._parent

    def walk(self) -> Iterator[tuple[str, Module]]:
        """Yields ``(state path, module)`` of self (path ``""``) and all below, pre-order."""
        yield "", self
        for name, child in self.children.items():
            for path, module in child.walk():
                yield (f"{name}/{path}" if path else name), module

    def parameter_specs(self) -> dict[str, Any]:
        """Returns the specs of all state below, nested as the state is."""
        specs: dict[str, Any] = dict(self._specs)
        for name, child in self.children.items():
            child_specs = child.parameter_specs()
            if isinstance(child.layers, range):
                num = len(child.layers)
                child_specs = _map_specs(child_specs, lambda s, n=num: s.stacked(n))
            if child_specs:
                specs[name] = child_specs
        return specs

    def initialize(self, key: jax.Array) -> dict[str, Any]:
        """Returns the initial state: nested dicts by child name.

        A parameter's key depends on the root key and the parameter's path only, so adding a sibling
        changes no other weight. Stacked and unrolled layers get bitwise-equal parameters.

        Args:
            key: Typed key or ``PRNGKey``, threefry or rbg.
        """
        # Compiled as a whole: run op by op, the same formula rounds differently.
        return _jax.jit(functools.partial(self._initial, key_path="", indices=()))(key)

    def _initial(self, key: jax.Array, key_path: str, indices: tuple[Any, ...]) -> dict[str, Any]:
        """Returns the initial state of one of the layers that this module stands for."""
        state: dict[str, Any] = {}
        for name, spec in self._specs.items():
            draw_key = derive_key(key, f"init:{key_path}/{name}", indices, 0)
            value = spec.initial(draw_key)
            if value.shape != spec.shape or value.dtype != jnp.dtype(spec.dtype):
                raise ModuleError(
                    f"the initializer of {name!r} made {value.dtype}{list(value.shape)}, "
                    f"expected {spec.dtype}{list(spec.shape)}",
                    code="AX308",
                    where=self.path,
                )
            state[name] = value
        for name, child in self.children.items():
            if child_state := child._initial_layers(key, key_path, indices):
                state[name] = child_state
        return state

    def _initial_layers(
        self, key: jax.Array, parent_path: str, indices: tuple[Any, ...]
    ) -> dict[str, Any]:
        """Returns the initial state of all layers that this module stands for."""
        if self.layers is None:
            return self._initial(key, f"{parent_path}/{self.name}", indices)

        def layer(number: Any) -> dict[str, Any]:
            return self._initial(key, f"{parent_path}/*", (*indices, number))

        if isinstance(self.layers, int):
            return layer(self.layers)
        # Not vmap, which over rbg keys draws other bits.
        return _jax.lax.map(layer, _jax.numpy.asarray(self.layers))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls ``self.forward``."""
        forward: Callable[..., Any] = getattr(self, "forward")  # noqa: B009 - subclasses define it
        return forward(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{type(self).__qualname__} {self.path}>"


_FRAMEWORK_NAMES = frozenset(vars(Module))


def _map_specs(
    specs: Mapping[str, Any], fn: Callable[[ParameterSpec], ParameterSpec]
) -> dict[str, Any]:
    return {
        k: fn(v) if isinstance(v, ParameterSpec) else _map_specs(v, fn) for k, v in specs.items()
    }


def flatten_specs(specs: Mapping[str, Any], prefix: str = "") -> dict[str, ParameterSpec]:
    """Returns ``{path: spec}`` of nested specs; paths are joined with ``/``."""
    flat: dict[str, ParameterSpec] = {}
    for name, value in specs.items():
        path = f"{prefix}/{name}" if prefix else name
        if isinstance(value, ParameterSpec):
            flat[path] = value
        else:
            flat.update(flatten_specs(value, path))
    return flat
