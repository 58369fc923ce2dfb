"""InvocationContext: where a module call finds its state and puts its side outputs.

Public methods of a :class:`axcore.Module` push a context; code called inside, of whatever library,
reaches it with :func:`current_context`. Contexts reference modules, never the reverse. Storage is a
``contextvars.ContextVar``: each thread and each async task has its own stack.

Three ideas live here:

* A *level* is one JAX trace. Contexts of one level collect together; a transform opens a new level
  (see :mod:`axcore.transforms`). Drawing a key or collecting anything while JAX traces a
  transform that no helper opened raises: the values would leak or silently repeat.
* *Keys* are derived lazily: fold_in over a stable hash of the path, then layer and iteration
  indices, then the draw number. The root's name is not part of the path.
* The *target* (what the program is built for) and ``constrain`` are interfaces; ``axcore.parallel``
  implements them.
"""

from __future__ import annotations

import contextvars
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol

import jax
from jax.extend import core as jax_core

from axcore.collection import OutputCollection, Reduction, make_entry
from axcore.errors import ModuleError

if TYPE_CHECKING:
    from axcore.module import Module

__all__ = [
    "InvocationContext",
    "LocalTarget",
    "Target",
    "current_context",
    "derive_key",
    "functional",
]

Table = Literal["param", "activation"]  # the sharding rules that a question is about


class Target(Protocol):
    """What the program is built for; ``axcore.parallel`` has the implementation."""

    @property
    def instance(self) -> str:
        """Instance name, such as ``tpu-v5p-512`` or ``cpu``."""
        ...

    @property
    def platform(self) -> str:
        """JAX platform of the target (never of the host): ``cpu``, ``tpu``, ``cuda``, ..."""
        ...

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The device mesh, or None for a single device."""
        ...

    @property
    def kernels(self) -> Mapping[str, tuple[str, ...]]:
        """Acceptable implementations by op, best first; an op that is absent has no list."""
        ...

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """Constrains ``x`` to the sharding of its logical ``axes``, one name per dim."""
        ...

    def mesh_axes(
        self, logical_axis: str, size: int | None = None, *, table: Table = "activation"
    ) -> tuple[str, ...]:
        """Returns the mesh axes over which a dim of this axis and size is sharded."""
        ...

    def digest(self) -> str:
        """Returns a short text that differs whenever the traced program may differ."""
        ...


class LocalTarget:
    """The target when none is given: one device, XLA reference kernels, no sharding."""

    instance = "local"
    platform = "cpu"
    mesh = None
    kernels: Mapping[str, tuple[str, ...]] = {}

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """Returns ``x``; checks that there is one axis name per dim."""
        check_axes(x, axes)
        return x

    def mesh_axes(
        self, logical_axis: str, size: int | None = None, *, table: Table = "activation"
    ) -> tuple[str, ...]:
        """Returns (): nothing is sharded."""
        del logical_axis, size, table
        return ()

    def digest(self) -> str:
        """Returns the constant ``local``."""
        return "local"


def check_axes(x: jax.Array, axes: tuple[str | None, ...]) -> None:
    """Raises ModuleError unless ``axes`` names each dim of ``x``."""
    if len(axes) != x.ndim:
        raise ModuleError(
            f"constrain got {len(axes)} axis names {axes} for an array of shape {x.shape}",
            code="AX320",
            hint="give one logical axis name, or None, for each dim",
        )


# Parts of JAX's signatures are unknown to type checkers; strict mode would report each use.
_jax: Any = jax
_jax_core: Any = jax_core

_CURRENT: contextvars.ContextVar[InvocationContext | None] = contextvars.ContextVar(
    "axcore_context", default=None
)
# JAX caches traces by function object. One digest per program makes that cache tell training from
# evaluation, and one target, kernel or quantization choice from another.
_PROGRAM = _jax.make_user_context(default_value=None)


def current_context() -> InvocationContext | None:
    """Returns the context of the module call that is running, or None outside of one."""
    return _CURRENT.get()


def derive_key(root: jax.Array, path: str, indices: tuple[Any, ...], draw: int) -> jax.Array:
    """Derives a key: stable hash of the path, then each index, then the draw number.

    Args:
        root: Typed key or ``PRNGKey``; threefry and rbg both work.
        path: Path below the root with layer numbers written ``*``.
        indices: Layer and iteration indices, python ints or traced int32 scalars.
        draw: Number of the draw at this place, from 0.
    """
    # The count of indices is hashed so that a drawn key is never also the parent of others.
    text = f"{path}|{len(indices)}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    key = jax.random.fold_in(root, number)
    for index in indices:
        key = jax.random.fold_in(key, index)
    return jax.random.fold_in(key, draw)


def _trace_state() -> object:
    """Returns a token that differs inside each JAX transform."""
    return _jax_core.get_opaque_trace_state()


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class InvocationContext:
    """One running module call.

    Attributes:
        module: The module whose method runs.
        state: The module's state: parameters, statistics, caches; nested dicts by child name.
        is_training: Whether dropout and the like are active.
        target: What the program is built for.
        parent: The calling module's context, or None at the root.
        path: Path of the call below the root; a second call of child ``d`` is ``d#1``.
        state_path: Path of the module's state below the root; equal for repeated calls.
        collection: What this call and its finished children have collected.
    """

    module: Module
    state: Mapping[str, Any]
    is_training: bool
    target: Target
    _key: jax.Array | None
    _trace: object  # which JAX trace this call belongs to
    parent: InvocationContext | None = None
    path: str = ""
    state_path: str = ""
    collection: OutputCollection = dataclasses.field(default_factory=OutputCollection)
    _key_path: str = ""
    _key_indices: tuple[Any, ...] = ()
    # Iteration of a layer scan: folded in everywhere but in the layers, which have numbers.
    _draw_indices: tuple[Any, ...] = ()
    _draws: int = 0
    _calls: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    # Children of a layer scan: name -> (state slice of this iteration, layer index).
    _layer_slices: Mapping[str, tuple[Any, Any]] = dataclasses.field(
        default_factory=dict[str, tuple[Any, Any]]
    )

    @classmethod
    def current(cls) -> InvocationContext | None:
        """Returns the running context; the same as :func:`current_context`."""
        return _CURRENT.get()

    # -- what a module uses ---------------------------------------------------------------

    def key(self) -> jax.Array:
        """Draws the next PRNG key of this call.

        Raises:
            ModuleError: No key was passed to ``functional``, or a raw JAX transform is running.
        """
        self._check_level("drew a PRNG key")
        if self._key is None:
            raise ModuleError(
                f"{self.module.path} draws a PRNG key but none was given",
                code="AX321",
                hint="pass key=jax.random.key(...) to functional",
            )
        draw, self._draws = self._draws, self._draws + 1
        indices = (*self._key_indices, *self._draw_indices)
        return derive_key(self._key, self._key_path, indices, draw)

    def add_summary(
        self, name: str, value: Any, *, reduction: Reduction = "mean", weight: Any = None
    ) -> None:
        """Adds a value to report.

        Args:
            name: Name within this module.
            value: Array of any shape.
            reduction: How calls, iterations, microbatches and replicas combine.
            weight: For means, what this value weighs (padding: 0); default 1.
        """
        self._add("summaries", name, make_entry(value, reduction, weight))

    def add_loss(
        self, name: str, value: Any, *, weight: float = 1.0, num_items: Any = None
    ) -> None:
        """Adds a loss; the learner minimizes ``sum_k weight_k * mean_k`` over all of them.

        Args:
            name: Name within this module.
            value: Scalar, the mean over ``num_items`` items (such as tokens that count).
            weight: Coefficient of this loss.
            num_items: What the mean was taken over; microbatches then add up exactly. Default 1:
                every call weighs the same.
        """
        self._add("losses", name, make_entry(value, "mean", num_items, float(weight)))

    def set_state(self, name: str, value: Any, *, reduction: Reduction = "last") -> None:
        """Sets a state of this module from the next step on; reads see the state at entry.

        Args:
            name: Name of the state within this module.
            value: The new value; shape and dtype of the old one where there is one.
            reduction: How updates of repeated calls, microbatches and replicas combine.

        Raises:
            ModuleError: The shape or dtype differs from the state's.
        """
        old = self.state.get(name)
        if old is not None and not isinstance(old, Mapping):
            new, was = jax.typeof(value), jax.typeof(old)
            if (new.shape, new.dtype) != (was.shape, was.dtype):
                raise ModuleError(
                    f"state {name!r} is {was.dtype}{list(was.shape)} and was set to "
                    f"{new.dtype}{list(new.shape)}",
                    code="AX322",
                    where=self.module.path,
                )
        entry = make_entry(value, reduction, None)
        self._check_level(f"set the state {name!r}")
        self.collection.add("state_updates", _join(self.state_path, name), entry)

    def add_output(self, name: str, value: Any, *, reduction: Reduction = "last") -> None:
        """Adds a module output, any pytree, for whoever called ``functional``."""
        self._add("outputs", name, make_entry(value, reduction, None))

    def constrain(self, x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """Constrains ``x`` to the sharding of its logical ``axes``; see :class:`Target`."""
        return self.target.constrain(x, axes)

    # -- the stack ------------------------------------------------------------------------

    def _add(self, kind: str, name: str, entry: Any) -> None:
        self._check_level(f"added {kind} {name!r}")
        self.collection.add(kind, _join(self.path, name), entry)

    def _check_level(self, did: str) -> None:
        if _trace_state() != self._trace:
            raise ModuleError(
                f"{self.module.path} {did} inside a JAX transform that axcore does not know of",
                code="AX323",
                hint="use axcore.transforms (scan, vmap, remat, cond, switch, while_loop, "
                "value_and_grad, jit, shard_map) instead of the raw JAX one; outer contexts are "
                "read-only inside a transform",
            )

    def _child(self, module: Module) -> InvocationContext:
        """Returns the context of a call of a direct child."""
        name, layers = module.name, module.layers
        count = self._calls.get(name, 0)
        self._calls[name] = count + 1
        again = f"#{count}" if count else ""
        state: Any = self.state.get(name, {})
        index = self._draw_indices
        if isinstance(layers, int):
            index = (layers,)
        elif layers is not None:
            if name not in self._layer_slices:
                raise ModuleError(
                    f"{module.path} stands for layers {name} of a scan, called outside of it",
                    code="AX324",
                    hint="call it inside axcore.transforms.scan_layers",
                )
            state, number = self._layer_slices[name]
            index = (number,)
        return InvocationContext(
            module,
            state,
            self.is_training,
            self.target,
            self._key,
            self._trace,
            parent=self,
            path=_join(self.path, name + again),
            state_path=_join(self.state_path, name),
            _key_path=_join(self._key_path, ("*" if layers is not None else name) + again),
            _key_indices=(*self._key_indices, *index),
        )

    def enter(self, module: Module) -> tuple[InvocationContext, InvocationContext]:
        """Returns the context of a call of any module and the context it was found under."""
        ancestor: InvocationContext | None = self
        while ancestor is not None:
            line = module.line_from(ancestor.module)
            if line:
                ctx = ancestor
                for step in line:
                    ctx = ctx._child(step)
                return ctx, ancestor
            ancestor = ancestor.parent
        raise ModuleError(
            f"{module.path} was called from {self.module.path}, but belongs to another module tree",
            code="AX325",
            hint="create it with self._add_child in the module that uses it or in a parent of it",
        )

    def leave(self, ancestor: InvocationContext) -> None:
        """Hands what was collected to the callers, up to the context that the call came from."""
        ctx = self
        while ctx is not ancestor and ctx.parent is not None:
            ctx.parent.collection.update(ctx.collection)
            ctx = ctx.parent

    def _fork(
        self, index: tuple[Any, ...], scanned: tuple[Any, ...], slices: Mapping[str, Any]
    ) -> InvocationContext:
        """Returns this context in the JAX trace that has begun, for the body of a transform.

        Args:
            index: Index of the iteration, for keys.
            scanned: Index of the iteration of a layer scan, for keys of this module's own calls.
            slices: Layers of a scan: name -> (state slice of this iteration, layer index).
        """
        return dataclasses.replace(
            self,
            collection=OutputCollection(),
            _trace=_trace_state(),
            _key_indices=(*self._key_indices, *index),
            _draw_indices=(*self._draw_indices, *scanned),
            _calls=dict(self._calls),
            _layer_slices={**self._layer_slices, **slices},
        )


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


@contextmanager
def activated(ctx: InvocationContext):
    """Makes ``ctx`` the current context."""
    token = _CURRENT.set(ctx)
    try:
        yield ctx
    finally:
        _CURRENT.reset(token)


def functional(
    module: Module,
    *,
    state: Mapping[str, Any],
    inputs: tuple[Any, ...] | Mapping[str, Any],
    is_training: bool,
    key: jax.Array | None = None,
    method: str = "forward",
    target: Target | None = None,
) -> tuple[Any, OutputCollection]:
    """Runs a module as a pure function; what ``jax.jit`` sees.

    Args:
        module: The module.
        state: Its state, nested dicts by child name, as ``module.initialize`` returns it.
        inputs: A tuple of positional arguments, or a mapping of keyword arguments.
        is_training: Whether dropout and the like are active.
        key: PRNG key for the calls that draw one.
        method: The public method to run.
        target: What the program is built for; default :class:`LocalTarget`.

    Returns:
        The method's outputs and the collection.

    Raises:
        ModuleError: ``inputs`` is neither a tuple nor a mapping, or there is no such method.

    Example:
        >>> outputs, collection = functional(
        ...     layer, state=params, inputs=(x,), is_training=False)  # doctest: +SKIP
    """
    given: Any = inputs
    if not isinstance(given, (tuple, Mapping)):
        raise ModuleError(
            f"inputs must be a tuple or a mapping, got {type(given).__name__}",
            code="AX326",
            hint="write inputs=(x,) for one positional argument",
        )
    fn = getattr(module, method, None)
    if not callable(fn) or method.startswith("_"):
        raise ModuleError(f"{module.path} has no public method {method!r}", code="AX327")
    args: tuple[Any, ...] = () if isinstance(inputs, Mapping) else inputs
    kwargs: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
    target, is_training = target or LocalTarget(), bool(is_training)
    with _PROGRAM(f"{is_training}|{target.digest()}"):
        ctx = InvocationContext(module, state, is_training, target, key, _trace_state())
        return invoke(ctx, method, fn, args, kwargs), ctx.collection


def invoke(
    ctx: InvocationContext,
    method: str,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs a method in its context; an error gets a note once, at the innermost call.

    The note has the module's path, the arguments' shapes and the config path.
    """
    token = _CURRENT.set(ctx)
    try:
        return fn(*args, **kwargs)
    except Exception as error:
        if not getattr(error, "_axcore_noted", False):
            shapes = [*map(_shape, args), *(f"{k}={_shape(v)}" for k, v in kwargs.items())]
            module = ctx.module
            error.add_note(
                f"in {module.path} ({type(module).__qualname__}.{method}) called with "
                f"({', '.join(shapes)}); config path: {module.config_path or '(root)'}"
            )
            with suppress(AttributeError):  # exceptions with __slots__: repeated, no more
                error._axcore_noted = True  # type: ignore[attr-defined]
        raise
    finally:
        _CURRENT.reset(token)


def _shape(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}{list(x.shape)}"
    return type(x).__name__
