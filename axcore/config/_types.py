"""The run-time types of fields: an annotation is compiled once to a checker of values.

``checker.convert(value)`` returns the value as it is stored (nodes copied, a list as a tuple, a
mapping frozen or made the record that the field holds, an int in a float field as a float) or
raises :class:`Mismatch`, which carries the path below the field.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, cast

from axcore.config import _names
from axcore.config._tree import (
    ATOMS,
    REQUIRED,
    FrozenMapping,
    Node,
    copy_node,
    error,
    is_config_class,
    is_record,
    parts,
    rebuilt,
    short_name,
)
from axcore.errors import ConfigError, did_you_mean


@dataclass(frozen=True, repr=False)
class Scaled:
    """A number that follows from another field; made by :func:`axcore.config.scaled`."""

    factor: float
    of: str
    multiple_of: int = 1
    minimum: int = 1

    def __post_init__(self):
        if type(self.factor) not in (int, float):
            raise ConfigError(f"scaled() takes a factor that is a number, got {self.factor!r}")
        if type(self.of) is not str or not self.of.isidentifier():
            raise ConfigError(f"scaled(of=) takes the name of a field, got {self.of!r}")
        if {type(self.multiple_of), type(self.minimum)} != {int} or self.multiple_of < 1:
            raise ConfigError("scaled() takes multiple_of >= 1 and minimum as ints")

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

    def error(self, field: str, where: str) -> ConfigError:
        """Returns the user's error; ``field`` is ``Owner.Config.name``, ``where`` its path."""
        message = f"got {self.got}, expected {self.expected} (field {field})"
        return error("AX101", message, ".".join([where, *self.path]), self.hint)


def describe(value: object) -> str:
    """Returns a value in words for an error message: ``'x' (str)``."""
    if isinstance(value, Node):
        return f"a {short_name(type(value))}"
    text = repr(value)
    text = text if len(text) <= 60 else text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def _hint_for(value: object) -> str | None:
    module = type(value).__module__.split(".")[0]
    if hasattr(value, "item") and hasattr(value, "dtype") and not isinstance(value, type):
        return "arrays and array scalars are no config values; .item() or .tolist() makes Python's"
    if module in ("numpy", "jax", "ml_dtypes") or hasattr(value, "dtype"):
        return 'a dtype is given by name, such as "bfloat16"'
    if is_config_class(getattr(value, "Config", None)):
        kind = value if isinstance(value, type) else type(value)
        return f"give its config: {kind.__name__}.Config(...)"
    if callable(value):
        return "config_for(function, ...) is called on instantiation, partial_for is bound"
    return None


class Checker:
    """Accepts the legal values that pass a test; without one (``Any``) every legal value.

    Attributes:
        expected: The accepted values in words.
        number: ``"int"`` or ``"float"`` if exactly that number type is accepted, else None.
        enums: Enum classes among the accepted types, for reading a member by its name.
    """

    number: str | None = None
    enums: tuple[type[enum.Enum], ...] = ()

    def __init__(self, expected: str, accepts: Callable[[Any], bool] | None = None):
        self.expected = expected
        self._accepts = accepts

    def convert(self, value: Any) -> Any:
        """Returns the value as stored. Raises Mismatch."""
        if self._accepts is not None and not self._accepts(value):
            raise self.refuse(value)
        kind = cast(Any, type(value))
        if (kind in ATOMS and value is not REQUIRED) or kind is Scaled:
            return value
        if isinstance(value, Node):
            return copy_node(value)
        if isinstance(value, enum.Enum):
            public(kind, self.expected)
            return value
        if kind in SEQUENCES:
            return tuple([ANY.part(str(i), part) for i, part in enumerate(value)])
        if kind in MAPPINGS:
            return _frozen(value, ANY)
        if is_record(value):
            return _record(value)
        if isinstance(value, functools.partial):
            from axcore.config._call import from_partial

            return from_partial(cast("functools.partial[Any]", value))
        if callable(value) and (isinstance(value, type) or not hasattr(kind, "Config")):
            public(value, self.expected)
            return value
        raise self.refuse(value)

    def part(self, segment: str, value: Any) -> Any:
        """Converts what is at one path segment inside a value."""
        try:
            return self.convert(value)
        except Mismatch as e:
            e.path.insert(0, segment)
            raise

    def refuse(self, value: object) -> Mismatch:
        """Returns the error for a value that is not accepted."""
        return Mismatch(describe(value), self.expected, _hint_for(value))


SEQUENCES = (tuple, list)
MAPPINGS = (FrozenMapping, dict, types.MappingProxyType)
ANY = Checker("a literal, enum, tuple, Mapping, frozen dataclass, config, function or class")


def public(value: Any, expected: str) -> None:
    """Raises Mismatch unless ``value`` has a public path."""
    try:
        _names.public_path(value)
    except _names.NotPublic as e:
        raise Mismatch(str(e), expected, e.hint) from None


def _frozen(value: Mapping[Any, Any], checker: Checker) -> FrozenMapping[Any]:
    out: dict[str, Any] = {}
    for key, part in value.items():
        if type(key) is not str:
            raise Mismatch(f"the key {describe(key)}", "keys that are str")
        out[key] = checker.part(key, part)
        if not is_leaf(out[key]) and (not key or set(key) & set(". :\n")):
            raise Mismatch(f"the key {key!r}", "a key without dots, colons or spaces")
    return FrozenMapping(out)


def is_leaf(value: Any) -> bool:
    """Whether a value holds no config, so that its text fits on one line."""
    return not isinstance(value, Node) and all(is_leaf(part) for _, part in parts(value))


def _record(value: Any) -> Any:
    kind = cast(Any, type(value))
    if not kind.__dataclass_params__.frozen:
        raise Mismatch(
            f"a {kind.__name__}, a dataclass that can change",
            "a frozen dataclass",
            f"declare it @dataclass(frozen=True), or make {kind.__name__} a Config",
        )
    public(kind, "a frozen dataclass with a public path")
    checkers = record_checkers(kind)
    return rebuilt(value, lambda name, part: checkers[name].part(name, part))


@functools.cache
def record_checkers(cls: type) -> dict[str, Checker]:
    """Returns a checker for each field of a dataclass; unresolvable annotations accept any."""
    try:
        hints = typing.get_type_hints(cls)
    except NameError:
        hints = {}
    # Class variables are among its annotations and are not its fields.
    names = [field.name for field in fields(cls)]
    return {n: compile_annotation(hints.get(n, Any), f"{cls.__name__}.{n}") for n in names}


class NumberChecker(Checker):
    """An int or a float (which takes ints too), or ``scaled``."""

    def __init__(self, kind: type):
        super().__init__(kind.__name__)
        self.kind = kind
        self.number = kind.__name__

    def convert(self, value: Any) -> Any:
        if type(value) is self.kind or type(value) is Scaled:
            return value
        if type(value) is not int:
            raise self.refuse(value)
        try:
            return self.kind(value)
        except OverflowError:
            raise Mismatch("an int too large for a float", self.expected) from None


class TupleChecker(Checker):
    """``tuple[X, ...]`` (one checker, variadic) or ``tuple[X, Y]``; a list is stored as a tuple."""

    def __init__(self, checkers: tuple[Checker, ...], variadic: bool):
        inner = ", ".join(c.expected for c in checkers)
        super().__init__(f"a tuple of {inner}" if variadic else f"a tuple ({inner})")
        self.checkers = checkers
        self.variadic = variadic

    def convert(self, value: Any) -> Any:
        if type(value) not in SEQUENCES:
            raise self.refuse(value)
        each = self.checkers * len(value) if self.variadic else self.checkers
        if len(value) != len(each):
            raise Mismatch(f"{len(value)} elements", f"{len(each)}: {self.expected}")
        pairs = zip(each, value, strict=True)
        return tuple([checker.part(str(i), part) for i, (checker, part) in enumerate(pairs)])


class MappingChecker(Checker):
    """``Mapping[str, X]``."""

    def __init__(self, checker: Checker):
        super().__init__(f"a Mapping of str to {checker.expected}")
        self.checker = checker

    def convert(self, value: Any) -> Any:
        if type(value) not in MAPPINGS:
            raise self.refuse(value)
        return _frozen(value, self.checker)


class RecordChecker(Checker):
    """A frozen dataclass; a mapping of some of its fields is stored as one, the rest defaults."""

    def __init__(self, kind: type):
        super().__init__(f"a {short_name(kind)}", lambda v: isinstance(v, kind))
        self.kind = kind

    def convert(self, value: Any) -> Any:
        if type(value) in MAPPINGS and not isinstance(value, self.kind):
            value = self._made(value)
        return super().convert(value)

    def _made(self, value: Mapping[Any, Any]) -> Any:
        kind, known = cast(Any, self.kind), [f for f in fields(cast(Any, self.kind)) if f.init]
        names = [f.name for f in known]
        told = f"its fields: {', '.join(names)}"
        for key in value:
            if key not in names:
                near = (did_you_mean(key, names) if type(key) is str else "") or told
                raise Mismatch(f"the key {describe(key)}", f"fields of {self.expected}", near)
        needed = [f.name for f in known if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in needed if name not in value]
        if missing:
            got = f"a mapping without {', '.join(map(repr, missing))}"
            raise Mismatch(got, self.expected, told)
        checkers = record_checkers(kind)
        return kind(**{name: checkers[name].part(name, part) for name, part in value.items()})


class UnionChecker(Checker):
    """Any of several; an int stays an int, and a mapping one, where both kinds are accepted."""

    def __init__(self, options: tuple[Checker, ...]):
        super().__init__(" or ".join(c.expected for c in options))
        self.options = sorted(
            options, key=lambda c: c.number == "float" or isinstance(c, RecordChecker)
        )
        self.enums = tuple(e for c in options for e in c.enums)
        numbers = {c.number for c in options} - {None}
        self.number = numbers.pop() if len(numbers) == 1 else None

    def convert(self, value: Any) -> Any:
        deepest: Mismatch | None = None
        for option in self.options:
            try:
                return option.convert(value)
            except Mismatch as e:
                if len(e.path) > (len(deepest.path) if deepest else 0):
                    deepest = e
        raise deepest or self.refuse(value)


def _literal(choices: tuple[Any, ...]) -> Checker:
    """One of a few given values, of the same type (True is not 1)."""
    expected = "one of " + ", ".join(repr(c) for c in choices)
    return Checker(expected, lambda v: any(type(v) is type(c) and v == c for c in choices))


def _instance(kind: type) -> Checker:
    """A config class, enum, frozen dataclass, abstract base or runtime protocol."""
    if "__dataclass_params__" in vars(kind) and not inspect.isabstract(kind):
        return RecordChecker(kind)
    name = short_name(kind)
    expected = f"a config ({name})" if name.endswith("Config") else f"a {name}"
    members = tuple(kind.__members__) if issubclass(kind, enum.Enum) else ()
    expected += f" ({', '.join(members)})" if members else ""
    checker = Checker(expected, lambda v: isinstance(v, kind))
    checker.enums = (kind,) if issubclass(kind, enum.Enum) else ()
    return checker


def _subclass(bound: type) -> Checker:
    expected = "a class" if bound is object else f"a subclass of {bound.__name__}"
    return Checker(expected, lambda v: isinstance(v, type) and issubclass(v, bound))


_CHANGES = "which can change"
#: Types that no field can have: why, and what to write instead.
_REFUSED: dict[type, tuple[str, str]] = {
    **dict.fromkeys((list, set, frozenset), (_CHANGES, "write tuple[X, ...]")),
    **dict.fromkeys((dict, collections.abc.MutableMapping), (_CHANGES, "write Mapping[str, X]")),
    **dict.fromkeys(
        (bytes, bytearray, complex),
        ("which has no text form", "use literals, tuples, Mapping, enums, frozen dataclasses, ..."),
    ),
}


def _refusal(kind: type) -> tuple[str, str] | None:
    if getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False):
        hint = "decorate it with @typing.runtime_checkable"
        return "a protocol that cannot be checked at run time", hint
    record = getattr(kind, "__dataclass_params__", None)
    if record is not None and not record.frozen:
        return "a dataclass that can change", "declare it frozen=True"
    return _REFUSED.get(kind)


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
    if annotation in (int, float):
        return NumberChecker(annotation)
    if annotation in (bool, str, None, type(None)):
        kind = annotation or type(None)
        expected = "None" if kind is type(None) else kind.__name__
        return Checker(expected, lambda v: type(v) is kind)
    if isinstance(annotation, str | typing.ForwardRef):
        raise NameError(f"{annotation!r} inside an annotation; unquote it")
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return inner(args[0])
    for inside in ("__supertype__", "__value__"):  # of a NewType, of a `type X = ...` statement
        if hasattr(annotation, inside):
            return inner(getattr(annotation, inside))
    if origin is typing.Literal:
        return _literal(args)
    if origin is typing.Union or origin is types.UnionType:
        return UnionChecker(tuple(inner(a) for a in args))
    kind: Any = origin or annotation
    if not isinstance(kind, type):
        what, hint = repr(annotation), "see axcore.config for what a field can be"
        raise error("AX105", f"a field cannot be a {what}", where, hint)
    if refused := _refusal(kind):
        why, hint = refused
        raise error("AX105", f"a field cannot be a {kind.__name__}, {why}", where, hint)
    if kind is tuple and args and args[-1] is not ...:
        return TupleChecker(tuple(inner(a) for a in args), variadic=False)
    if kind is tuple or kind is collections.abc.Sequence:
        return TupleChecker((inner(args[0]) if args else ANY,), variadic=True)
    if kind is collections.abc.Mapping:
        if args and args[0] is not str:
            message = "a field cannot be a Mapping with keys other than str"
            raise error("AX105", message, where, "use str keys")
        return MappingChecker(inner(args[1]) if args else ANY)
    if kind is collections.abc.Callable:  # pyright: ignore[reportUnknownMemberType]
        return Checker("a function or class with a public path, or partial_for(...)", callable)
    if kind is type:
        return _subclass(args[0] if args and isinstance(args[0], type) else object)
    return _instance(kind)
