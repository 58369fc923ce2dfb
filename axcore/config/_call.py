"""Configs of callables: ``config_for`` is called on instantiation, ``partial_for`` is bound."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from axcore.config import _store, _write
from axcore.config._config import Config
from axcore.config._fields import REQUIRED, Field
from axcore.config._tree import (
    FrozenMapping,
    Node,
    error,
    is_config_class,
    map_nodes,
    parts,
    path_of,
    set_up,
)
from axcore.config._tree import state as state_of
from axcore.config._types import ANY, Mismatch, TupleChecker, describe, public
from axcore.errors import ConfigError, did_you_mean

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Call:
    """A callable and its signature, shared by all configs of it.

    Attributes:
        fn: The callable.
        partial: Whether it is bound instead of called.
        word: ``config_for`` or ``partial_for``.
        parameters: Its parameters; none if its signature is unknown, and then it takes anything.
        varargs: Name of its ``*args``, or None.
        open: Whether it takes any keyword.
        fields: A field per parameter; those whose default has no text form have no value.
    """

    def __init__(self, fn: Callable[..., Any], partial: bool):
        self.fn = fn
        self.partial = partial
        self.word = "partial_for" if partial else "config_for"
        try:
            signature = inspect.signature(fn)
        except (ValueError, TypeError):  # some builtins tell nothing
            signature = inspect.signature(lambda *args, **kwargs: None)
        self.parameters = signature.parameters
        self.varargs: str | None = None
        self.open = False
        self.fields: dict[str, Field] = {}
        self.values: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                self.open = True
                continue
            field = self._field(name)
            self.fields[name] = field
            if parameter.kind is parameter.VAR_POSITIONAL:
                self.varargs = name
                field.checker = TupleChecker((ANY,), variadic=True)
                field.default = ()
            elif parameter.default is not parameter.empty:
                try:
                    field.default = ANY.convert(parameter.default)
                except Mismatch:
                    continue  # cannot be written down: left to the callable
            self.values[name] = field.default

    def _field(self, name: str) -> Field:
        owner = f"{self.word}({getattr(self.fn, '__name__', '?')})"
        return Field(name, Any, REQUIRED, owner, self.fn.__module__ or "")

    def extra_field(self, name: str) -> Field | None:
        """Returns a field for a keyword that only ``**kwargs`` takes, or None if there is none."""
        return self._field(name) if self.open and name not in self.parameters else None

    def bare(self, cls: type[CallConfig]) -> CallConfig:
        """Returns a config of the callable with nothing set."""
        node = object.__new__(cls)
        set_up(node, self.fields, self.values, self)
        return node

    def by_name(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Names positional arguments by the signature."""
        names = [n for n, p in self.parameters.items() if p.kind in _POSITIONAL]
        values = dict(zip(names, args, strict=False))
        rest = args[len(names) :]
        if rest and self.varargs is None:
            message = f"{self.word}: the callable takes at most {len(names)} positional arguments"
            raise error("AX114", message)
        return {**values, str(self.varargs): rest} if rest else values

    def make(self, values: dict[str, Any]) -> Any:
        """Calls the callable, by keyword where it can, or binds what is not its default."""
        if self.partial:
            return functools.partial(self.fn, **values)
        varargs = values.pop(self.varargs, ()) if self.varargs is not None else ()
        args: list[Any] = []
        for name, parameter in self.parameters.items():
            if name in values and parameter.kind in _POSITIONAL:
                if varargs or parameter.kind is parameter.POSITIONAL_ONLY:
                    args.append(values.pop(name))
        return self.fn(*args, *varargs, **values)


_calls: dict[tuple[int, bool], Call] = {}


def call_of(fn: Callable[..., Any], partial: bool) -> Call:
    """Returns the Call of a callable, the same one each time."""
    key = (id(fn), partial)  # not by equality: jnp.float32 == np.float32
    if key not in _calls:
        _calls[key] = Call(fn, partial)
    return _calls[key]


class CallConfig(Config):
    """The config that ``config_for`` and ``partial_for`` return; its fields are the arguments.

    Arguments whose default can be written down are fields with that default, so a dependency that
    changes a default shows in the text; other defaults are left to the callable.
    """

    def instantiate(self, /, **kwargs: Any) -> Any:
        """Instantiates the configs among the arguments, then calls (or binds) the callable.

        Args:
            **kwargs: Arguments that take the place of the configured ones, unchecked.
        """
        cfg = _store.prepared(self, None, {}, "")
        call: Call = state_of(cfg).call
        values = {n: v for n, v in state_of(cfg).values.items() if n not in kwargs}
        if call.partial:
            usual = {name: _write.lines(value) for name, value in call.values.items()}
            values = {n: v for n, v in values.items() if usual.get(n) != _write.lines(v)}
        values = {name: _built(value) for name, value in values.items()}
        try:
            return call.make({**values, **kwargs})
        except Exception as e:
            where = path_of(self)
            e.add_note(f"while calling {_store.label(self)}" + (f" at {where}" if where else ""))
            raise


class PartialConfig(CallConfig):
    """The config that ``partial_for`` returns; calling it calls the bound callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the callable with the bound arguments and these."""
        return self.instantiate()(*args, **kwargs)


def _built(value: Any) -> Any:
    """Returns a value for a call: configs instantiated, frozen mappings as plain dicts."""
    kind = cast(Any, type(value))
    if kind is FrozenMapping:
        return {key: _built(part) for key, part in parts(value)}
    if kind is tuple:
        return tuple([_built(part) for _, part in parts(value)])
    return map_nodes(value, lambda _, node: cast(Any, node).instantiate(), "")


def _new(
    cls: type[CallConfig], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    partial = cls is PartialConfig
    word = "partial_for" if partial else "config_for"
    if isinstance(fn, functools.partial):
        args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
    if not callable(fn) or isinstance(fn, Node):
        raise error("AX101", f"{word} takes a function or class, got {describe(fn)}")
    if is_config_class(getattr(fn, "Config", None)):
        name = getattr(fn, "__name__", "X")
        raise error(
            "AX114", f"{name} has a config class of its own", "", f"write {name}.Config(...)"
        )
    try:
        public(fn, "a public path")
    except Mismatch as e:
        raise error("AX107", f"{word}: {e.got}", hint=e.hint) from None
    if partial and args:
        raise error("AX114", f"{word} takes named arguments only", hint="name each: f, x=1")
    call = call_of(fn, partial)
    node = call.bare(cls)
    values = call.by_name(args)
    for name in kwargs:
        if name in values:
            raise error("AX114", f"{word}: the callable takes {name!r} once, got it twice")
        if _store.field_of(node, name) is None:
            hint = (
                did_you_mean(name, call.fields) or f"it takes: {', '.join(call.fields) or 'none'}"
            )
            message = f"{_store.label(node)}: the callable takes no argument {name!r}"
            raise error("AX114", message, hint=hint)
    _store.set_all([node], {**values, **kwargs})
    return node


def config_for(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> CallConfig:
    """Returns a config whose instantiation calls ``fn``; any callable or class, no wrapper.

    Configs among the arguments are instantiated first.

    Args:
        fn: A function or class with a public path.
        *args: Positional arguments, varargs too.
        **kwargs: Keyword arguments.

    Raises:
        ConfigError: An argument that the signature does not have, or a value no config can hold.

    Example:
        >>> config_for(optax.chain, config_for(optax.clip, 1.0), config_for(optax.adamw, 3e-4))
    """
    return _new(CallConfig, fn, args, kwargs)


def partial_for(fn: Callable[..., Any], /, **kwargs: Any) -> PartialConfig:
    """Returns a config whose instantiation is ``functools.partial(fn, **kwargs)``.

    Args:
        fn: A function or class with a public path.
        **kwargs: The arguments to bind.

    Example:
        >>> partial_for(jax.nn.gelu, approximate=False)
    """
    return _new(PartialConfig, fn, (), kwargs)


def from_partial(value: functools.partial[Any]) -> PartialConfig:
    """Returns a ``functools.partial`` as the config it amounts to. Raises Mismatch."""
    try:
        return _new(PartialConfig, value, (), {})
    except ConfigError as e:
        raise Mismatch(f"a functools.partial ({e.message})", "partial_for(...)", e.hint) from None
