"""Configs of callables: ``config_for`` is called on instantiation, ``partial_for`` is bound."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from axcore.config import _resolve, _store
from axcore.config._config import Config
from axcore.config._fields import REQUIRED, Field
from axcore.config._provenance import Stamp
from axcore.config._tree import FrozenMapping, Node, State, map_nodes, parts, path_of, set_state
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
        self._name = f"{self.word}({getattr(fn, '__name__', '?')})"
        try:
            found = inspect.signature(fn).parameters
        except (ValueError, TypeError):  # some builtins tell nothing
            kinds = {"args": inspect.Parameter.VAR_POSITIONAL, "kw": inspect.Parameter.VAR_KEYWORD}
            found = {name: inspect.Parameter(name, kind) for name, kind in kinds.items()}
        self.parameters = dict(found)
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

    def bare(self, cls: type[CallConfig]) -> CallConfig:
        """Returns a config of the callable with nothing set."""
        node = object.__new__(cls)
        own = State(self.fields)
        own.call = self
        own.values = dict(self.values)
        set_state(node, own)
        return node

    def _field(self, name: str) -> Field:
        return Field(name, Any, REQUIRED, self._name, self.fn.__module__ or "")

    def extra_field(self, name: str) -> Field | None:
        """Returns a field for a keyword that only ``**kwargs`` takes, or None if there is none."""
        return self._field(name) if self.open and name not in self.parameters else None


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
        cfg = _resolve.prepared(self, None, {}, "")
        call: Call = state_of(cfg).call
        values = dict(state_of(cfg).values)
        where = path_of(self)
        arguments = {name: built(value) for name, value in values.items() if name not in kwargs}
        try:
            if call.partial:
                same = {n for n, p in call.parameters.items() if _is_default(values.get(n), p)}
                bound = {n: v for n, v in arguments.items() if n not in same}
                return functools.partial(
                    call.fn, **{n: v for n, v in bound.items() if v is not REQUIRED}, **kwargs
                )
            args, keywords = _split(call, {**arguments, **kwargs})
            return call.fn(*args, **keywords)
        except Exception as e:
            e.add_note(f"while calling {_store.label(self)}" + (f" at {where}" if where else ""))
            raise


class PartialConfig(CallConfig):
    """The config that ``partial_for`` returns; calling it calls the bound callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the callable with the bound arguments and these."""
        return self.instantiate()(*args, **kwargs)


def _is_default(value: Any, parameter: inspect.Parameter) -> bool:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return value == ()
    default = parameter.default
    if default is parameter.empty:
        return False
    return value is default or (type(value) is type(default) and repr(value) == repr(default))


def built(value: Any) -> Any:
    """Returns a value for a call: configs instantiated, frozen mappings as plain dicts."""
    value = map_nodes(value, _instantiate, "")
    return _plain(value)


def _instantiate(key: str, node: Node) -> Any:
    assert isinstance(node, Config)
    return node.instantiate()


def _plain(value: Any) -> Any:
    kind = cast(Any, type(value))
    if kind is FrozenMapping:
        return {key: _plain(part) for key, part in parts(value)}
    if kind is tuple:
        return tuple([_plain(part) for _, part in parts(value)])
    return value


def _split(call: Call, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Returns the positional and keyword arguments of a call."""
    args: list[Any] = []
    varargs = values.pop(call.varargs, ()) if call.varargs is not None else ()
    for name, parameter in call.parameters.items():
        by_position = parameter.kind is parameter.POSITIONAL_ONLY or (varargs and name in values)
        if parameter.kind in _POSITIONAL and by_position and name in values:
            args.append(values.pop(name))
    return [*args, *varargs], values


def _new(
    cls: type[CallConfig], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    word = "partial_for" if cls is PartialConfig else "config_for"
    if isinstance(fn, functools.partial):
        args, kwargs, fn = (*fn.args, *args), {**fn.keywords, **kwargs}, fn.func
    if not callable(fn) or isinstance(fn, Node):
        raise ConfigError(f"{word} takes a function or class, got {describe(fn)}", code="AX101")
    config = getattr(fn, "Config", None)
    if isinstance(config, type) and issubclass(config, Node):
        name = getattr(fn, "__name__", "X")
        hint = f"write {name}.Config(...)"
        raise ConfigError(f"{name} has a config class of its own", code="AX114", hint=hint)
    try:
        public(fn, "a public path")
    except Mismatch as e:
        raise ConfigError(f"{word}: {e.got}", code="AX107", hint=e.hint) from None
    call = call_of(fn, cls is PartialConfig)
    node = call.bare(cls)
    values = {**_by_name(call, args, kwargs), **kwargs}
    stamp = Stamp()
    for name, value in values.items():
        if name in call.fields or call.extra_field(name) is not None:
            _store.assign(node, name, _store.check(node, name, value), stamp)
        else:
            hint = did_you_mean(name, call.fields)
            raise ConfigError(
                f"{_store.label(node)}: the callable takes no argument {name!r}",
                code="AX114",
                hint=hint or f"it takes: {', '.join(call.fields) or 'none'}",
            )
    return node


def _by_name(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Names positional arguments by the signature."""
    names = [n for n, p in call.parameters.items() if p.kind in _POSITIONAL]
    values = dict(zip(names, args, strict=False))
    rest = args[len(names) :]
    twice = [n for n in values if n in kwargs]
    if call.partial and args:
        raise ConfigError(
            f"{call.word} takes named arguments only", code="AX114", hint="name each: f, x=1"
        )
    if twice or (rest and call.varargs is None):
        what = f"{twice[0]!r} twice" if twice else f"at most {len(names)} positional arguments"
        raise ConfigError(f"{call.word}: the callable takes {what}", code="AX114")
    if rest and call.varargs is not None:
        values[call.varargs] = rest
    return values


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
