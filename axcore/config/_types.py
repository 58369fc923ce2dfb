"""The run-time types of fields: an annotation is compiled once to a checker of values.

``checker.convert(value)`` returns the value as it is stored (nodes copied, a list as a tuple, a
mapping frozen, an int in a float field as a float) or raises :class:`Mismatch`, which carries the
path below the field.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any, cast

from axcore.config import _names
from axcore.config._tree import ATOMS, FrozenMapping, Node, copy_node, is_record, parts, rebuilt
from axcore.errors import ConfigError


class Unset:
    """Type of REQUIRED."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "REQUIRED"

    def __reduce__(self) -> str:
        return "REQUIRED"


REQUIRED: Any = Unset()


class Scaled:
    """A number that follows from another field; made by :func:`axcore.config.scaled`."""

    __slots__ = ("factor", "minimum", "multiple_of", "of")

    def __init__(self, factor: float, of: str, multiple_of: int = 1, minimum: int = 1):
        if type(factor) not in (int, float):
            raise ConfigError(f"scaled() takes a factor that is a number, got {factor!r}")
        if type(of) is not str or not of.isidentifier():
            raise ConfigError(f"scaled(of=) takes the name of a field, got {of!r}")
        if type(multiple_of) is not int or multiple_of < 1 or type(minimum) is not int:
            raise ConfigError("scaled() takes multiple_of >= 1 and minimum as ints")
        self.factor = factor
        self.of = of
        self.multiple_of = multiple_of
        self.minimum = minimum

    def _key(self) -> tuple[object, ...]:
        return (repr(self.factor), self.of, self.multiple_of, self.minimum)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaled) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple[Any, ...]:
        return (Scaled, (self.factor, self.of, self.multiple_of, self.minimum))

    def __repr__(self) -> str:
        more = f", multiple_of={self.multiple_of}" if self.multiple_of != 1 else ""
        more += f", minimum={self.minimum}" if self.minimum != 1 else ""
        return f'scaled({self.factor!r}, of="{self.of}"{more})'

    def __call__(self, value: float, *, to_int: bool) -> int | float:
        """Returns the scaled value, as an int with the rounding described in ``scaled``."""
        if not to_int:
            return float(self.factor * value)
        from fractions import Fraction  # slow to import, and needed only here

        exact = Fraction(repr(self.factor)) * Fraction(repr(value))
        whole = max(int((exact + Fraction(1, 2)) // 1), self.minimum)
        return -(-whole // self.multiple_of) * self.multiple_of


class Mismatch(Exception):
    """A value that a checker refuses; ``path`` grows on the way up to the field."""

    def __init__(self, got: str, expected: str, hint: str | None = None):
        super().__init__(got, expected)
        self.got = got
        self.expected = expected
        self.hint = hint
        self.path: list[str] = []

    def below(self, segment: str) -> Mismatch:
        """Returns self with one more path segment in front."""
        self.path.insert(0, segment)
        return self

    def error(self, field: str, where: str) -> ConfigError:
        """Returns the user's error; ``field`` is ``Owner.Config.name``, ``where`` its path."""
        return ConfigError(
            f"got {self.got}, expected {self.expected} (field {field})",
            code="AX101",
            where=".".join([where, *self.path]),
            hint=self.hint,
        )


def describe(value: object) -> str:
    """Returns a value in words for an error message: ``'x' (str)``."""
    if isinstance(value, Node):
        return f"a {type(value).__qualname__.rsplit('<locals>.', 1)[-1]}"
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def _hint_for(value: object) -> str | None:
    module = type(value).__module__.split(".")[0]
    if hasattr(value, "item") and hasattr(value, "dtype") and not isinstance(value, type):
        return "arrays and array scalars are no config values; .item() or .tolist() makes Python's"
    if module in ("numpy", "jax", "ml_dtypes") or hasattr(value, "dtype"):
        return 'a dtype is given by name, such as "bfloat16"'
    config = getattr(value, "Config", None)
    if isinstance(config, type) and issubclass(config, Node):
        kind = value if isinstance(value, type) else type(value)
        return f"give its config: {kind.__name__}.Config(...)"
    if callable(value):
        return "config_for(function, ...) is called on instantiation, partial_for is bound"
    return None


class Checker:
    """Accepts every legal value (the checker of ``Any``); subclasses accept less.

    Attributes:
        expected: The accepted values in words.
        number: ``"int"`` or ``"float"`` if exactly that number type is accepted, else None.
        enums: Enum classes among the accepted types, for reading a member by its name.
    """

    expected = "a literal, enum, tuple, Mapping, frozen dataclass, config, function or class"
    number: str | None = None
    enums: tuple[type[enum.Enum], ...] = ()

    def convert(self, value: Any) -> Any:
        """Returns the value as stored. Raises Mismatch."""
        kind = cast(Any, type(value))
        if kind in ATOMS or kind is Scaled:
            return value
        if isinstance(value, Node):
            return copy_node(value)
        if isinstance(value, enum.Enum):
            public(kind, self.expected)
            return value
        if kind is tuple or kind is list:
            return _convert_all(cast("tuple[Any, ...]", value), self)
        if kind is FrozenMapping or kind is dict or kind is types.MappingProxyType:
            return _convert_mapping(cast("Mapping[Any, Any]", value), self)
        if is_record(value):
            return _convert_record(value)
        if isinstance(value, functools.partial):
            from axcore.config._call import from_partial

            return from_partial(cast("functools.partial[Any]", value))
        if callable(value):
            if not isinstance(value, type) and hasattr(type(value), "Config"):
                raise Mismatch(f"a {kind.__name__}", self.expected, _hint_for(value))
            public(value, self.expected)
            return value
        raise self.refuse(value)

    def refuse(self, value: object) -> Mismatch:
        """Returns the error for a value that is not accepted."""
        return Mismatch(describe(value), self.expected, _hint_for(value))


ANY = Checker()


def public(value: Any, expected: str) -> None:
    """Raises Mismatch unless ``value`` has a public path."""
    try:
        _names.public_path(value)
    except _names.NotPublic as e:
        raise Mismatch(str(e), expected, e.hint) from None


def _convert_all(value: tuple[Any, ...], *checkers: Checker) -> tuple[Any, ...]:
    each = checkers if len(checkers) == len(value) else checkers * len(value)
    out: list[Any] = []
    for i, (part, checker) in enumerate(zip(value, each, strict=True)):
        try:
            out.append(checker.convert(part))
        except Mismatch as e:
            raise e.below(str(i)) from None
    return tuple(out)


def _convert_mapping(value: Mapping[Any, Any], checker: Checker) -> FrozenMapping[Any]:
    out: dict[str, Any] = {}
    for key, part in value.items():
        if type(key) is not str:
            raise Mismatch(f"the key {describe(key)}", "keys that are str")
        try:
            out[key] = checker.convert(part)
        except Mismatch as e:
            raise e.below(key) from None
        if not is_leaf(out[key]) and (not key or set(key) & set(". :\n")):
            raise Mismatch(f"the key {key!r}", "a key without dots, colons or spaces")
    return FrozenMapping(out)


def is_leaf(value: Any) -> bool:
    """Whether a value holds no config, so that its text fits on one line."""
    return not isinstance(value, Node) and all(is_leaf(part) for _, part in parts(value))


def _convert_record(value: Any) -> Any:
    kind = cast(Any, type(value))
    if not kind.__dataclass_params__.frozen:
        raise Mismatch(
            f"a {kind.__name__}, a dataclass that can change",
            "a frozen dataclass",
            f"declare it @dataclass(frozen=True), or make {kind.__name__} a Config",
        )
    public(kind, "a frozen dataclass with a public path")
    checkers = record_checkers(kind)

    def convert(name: str, part: Any) -> Any:
        try:
            return checkers[name].convert(part)
        except Mismatch as e:
            raise e.below(name) from None

    return rebuilt(value, convert)


@functools.cache
def record_checkers(cls: type) -> dict[str, Checker]:
    """Returns a checker for each field of a dataclass; unresolvable annotations accept any."""
    try:
        hints = typing.get_type_hints(cls)
    except NameError:
        hints = {}
    names = getattr(cls, "__dataclass_fields__", {})
    return {n: compile_annotation(hints.get(n, Any), f"{cls.__name__}.{n}") for n in names}


class AtomChecker(Checker):
    """Exactly one of bool, int, str, None; a float field takes ints too."""

    def __init__(self, kind: type):
        self.kind = kind
        self.expected = "None" if kind is type(None) else kind.__name__
        self.number = kind.__name__ if kind in (int, float) else None

    def convert(self, value: Any) -> Any:
        if type(value) is self.kind:
            return value
        if self.number is not None:
            if type(value) is Scaled:
                return value
            if type(value) is int and self.kind is float:
                try:
                    return float(value)
                except OverflowError:
                    raise Mismatch("an int too large for a float", self.expected) from None
        raise self.refuse(value)


class LiteralChecker(Checker):
    """One of a few given values, of the same type (True is not 1)."""

    def __init__(self, choices: tuple[Any, ...]):
        self.choices = choices
        self.expected = "one of " + ", ".join(repr(c) for c in choices)

    def convert(self, value: Any) -> Any:
        if any(type(value) is type(c) and value == c for c in self.choices):
            return value
        raise self.refuse(value)


class TupleChecker(Checker):
    """``tuple[X, ...]`` (one checker, variadic) or ``tuple[X, Y]``; a list is stored as a tuple."""

    def __init__(self, checkers: tuple[Checker, ...], variadic: bool):
        self.checkers = checkers
        self.variadic = variadic
        inner = ", ".join(c.expected for c in checkers)
        self.expected = f"a tuple of {inner}" if variadic else f"a tuple ({inner})"

    def convert(self, value: Any) -> Any:
        if type(value) not in (tuple, list):
            raise self.refuse(value)
        if self.variadic:
            return _convert_all(value, self.checkers[0]) if value else ()
        if len(value) != len(self.checkers):
            raise Mismatch(f"{len(value)} elements", f"{len(self.checkers)}: {self.expected}")
        return _convert_all(value, *self.checkers)


class MappingChecker(Checker):
    """``Mapping[str, X]``."""

    def __init__(self, checker: Checker):
        self.checker = checker
        self.expected = f"a Mapping of str to {checker.expected}"

    def convert(self, value: Any) -> Any:
        if type(value) not in (dict, FrozenMapping, types.MappingProxyType):
            raise self.refuse(value)
        return _convert_mapping(value, self.checker)


class UnionChecker(Checker):
    """Any of several; an int stays an int where both int and float are accepted."""

    def __init__(self, options: tuple[Checker, ...]):
        self.options = tuple(sorted(options, key=lambda c: c.number == "float"))
        self.expected = " or ".join(c.expected for c in options)
        self.enums = tuple(e for c in options for e in c.enums)
        numbers = {c.number for c in options} - {None}
        self.number = numbers.pop() if len(numbers) == 1 else None

    def convert(self, value: Any) -> Any:
        deepest: Mismatch | None = None
        for option in self.options:
            try:
                return option.convert(value)
            except Mismatch as e:
                if e.path and (deepest is None or len(e.path) > len(deepest.path)):
                    deepest = e
        raise deepest or self.refuse(value)


class InstanceChecker(Checker):
    """A config class, enum, frozen dataclass, abstract base or runtime protocol."""

    def __init__(self, kind: type):
        self.kind = kind
        name = kind.__qualname__.rsplit("<locals>.", 1)[-1]
        self.expected = f"a {name}" if not name.endswith("Config") else f"a config ({name})"
        if issubclass(kind, enum.Enum):
            self.enums = (kind,)
            self.expected = f"a {name} ({', '.join(m.name for m in kind)})"

    def convert(self, value: Any) -> Any:
        if isinstance(value, self.kind):
            return super().convert(value)
        raise self.refuse(value)


class CallableChecker(Checker):
    """A function or class with a public path, a functools.partial of one, or partial_for."""

    expected = "a function or class with a public path, or partial_for(...)"

    def convert(self, value: Any) -> Any:
        if callable(value):
            return super().convert(value)
        raise self.refuse(value)


class TypeChecker(Checker):
    """``type`` or ``type[X]``: a class with a public path."""

    def __init__(self, bound: type = object):
        self.bound = bound
        self.expected = "a class" if bound is object else f"a subclass of {bound.__name__}"

    def convert(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, self.bound):
            public(value, self.expected)
            return value
        raise self.refuse(value)


def _refuse_annotation(what: str, where: str, hint: str) -> ConfigError:
    return ConfigError(f"a field cannot be a {what}", code="AX105", where=where, hint=hint)


def compile_annotation(annotation: Any, where: str) -> Checker:
    """Returns the checker of an annotation.

    Raises:
        ConfigError: No value of that type could be checked or written down.
        NameError: A postponed part of it names something that is not defined yet.
    """

    def inner(part: Any) -> Checker:
        return compile_annotation(part, where)

    if annotation is Any or annotation is object or isinstance(annotation, typing.TypeVar):
        return ANY
    if annotation is None or annotation in (bool, int, float, str, type(None)):
        return AtomChecker(annotation or type(None))
    if isinstance(annotation, str | typing.ForwardRef):
        raise NameError(f"{annotation!r} inside an annotation; unquote it")
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return inner(args[0])
    if hasattr(annotation, "__supertype__"):  # NewType
        return inner(annotation.__supertype__)
    if hasattr(annotation, "__value__"):  # a `type X = ...` statement
        return inner(annotation.__value__)
    if origin is typing.Literal:
        return LiteralChecker(args)
    if origin is typing.Union or origin is types.UnionType:
        return UnionChecker(tuple(inner(a) for a in args))
    kind: Any = origin or annotation
    if kind in (list, set, frozenset, dict, collections.abc.MutableMapping):
        out = (
            "Mapping[str, X]" if kind in (dict, collections.abc.MutableMapping) else "tuple[X, ...]"
        )
        raise _refuse_annotation(f"{kind.__name__}, which can change", where, f"write {out}")
    if kind is tuple or kind is collections.abc.Sequence:
        if kind is tuple and args and args[-1] is not ...:
            return TupleChecker(tuple(inner(a) for a in args), variadic=False)
        return TupleChecker((inner(args[0]) if args else ANY,), variadic=True)
    if kind is collections.abc.Mapping:
        if args and args[0] is not str:
            raise _refuse_annotation("Mapping with keys other than str", where, "use str keys")
        return MappingChecker(inner(args[1]) if args else ANY)
    if kind is collections.abc.Callable:  # pyright: ignore[reportUnknownMemberType]
        return CallableChecker()
    if kind is type:
        bound = args[0] if args and isinstance(args[0], type) else object
        return TypeChecker(bound)
    if isinstance(kind, type):
        if getattr(kind, "_is_protocol", False) and not getattr(
            kind, "_is_runtime_protocol", False
        ):
            raise _refuse_annotation(
                f"{kind.__name__}, a protocol that cannot be checked at run time",
                where,
                "decorate it with @typing.runtime_checkable",
            )
        fields = getattr(kind, "__dataclass_params__", None)
        if fields is not None and not fields.frozen:
            raise _refuse_annotation(
                f"{kind.__name__}, a dataclass that can change", where, "declare it frozen=True"
            )
        if kind in (bytes, bytearray, complex):
            raise _refuse_annotation(
                f"{kind.__name__}, which has no text form",
                where,
                "use literals, tuples, Mapping, enums, frozen dataclasses, configs, functions",
            )
        return InstanceChecker(kind)
    raise _refuse_annotation(f"{annotation!r}", where, "see axcore.config for what a field can be")
