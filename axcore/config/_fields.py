"""Fields of a config class: markers for their annotations, and how they are collected.

Annotations are resolved at class creation where possible, and otherwise (postponed annotations
that name something defined later) at first use.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, ForwardRef, TypeVar, get_origin

from axcore.config import _types
from axcore.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

T = TypeVar("T")


class RequiredMarker:
    """Annotation mark of ``Required[T]``."""


class DimMarker:
    """Annotation mark of ``Dim``."""


Required = Annotated[T, RequiredMarker()]
"""``x: Required[int] = REQUIRED``: a value that somebody must set; readers see an int."""

Dim = Annotated[int, DimMarker()]
"""An int that may be given as ``scaled(...)`` until it is known; readers see an int."""

REQUIRED: Any = _types.REQUIRED
"""Stands for a value that is not set yet; still there at instantiation, it is an error."""


def scaled(factor: float, *, of: str, multiple_of: int = 1, minimum: int = 1) -> Any:
    """Returns a value that follows from another field and is resolved on instantiation.

    ``factor * value``; for ints rounded half up, raised to at least ``minimum``, then rounded up to
    a multiple of ``multiple_of``. Floats take none of the three.

    Args:
        factor: What to multiply by; taken as the decimal it prints as, so 0.29 * 50 is 14.5.
        of: A field of the same config or else of the nearest ancestor that has one by that name.
        multiple_of: Granularity, for ints.
        minimum: Smallest result, for ints; the default keeps a dim or an interval from being 0.

    Example:
        >>> hidden_dim: Dim = scaled(8 / 3, of="input_dim", multiple_of=256)
        >>> save_every_n_steps: Dim = scaled(0.1, of="max_step")
    """
    return _types.Scaled(factor, of, multiple_of, minimum)


@dataclasses.dataclass(frozen=True)
class FieldInfo:
    """What ``cfg.fields()`` says about a field.

    Attributes:
        name: The field's name.
        annotation: Its resolved type (Any for arguments of callables).
        default: Its default, or REQUIRED.
        doc: One line from the class docstring, or an empty string.
        expected: The accepted types in words, as in error messages.
    """

    name: str
    annotation: Any
    default: Any
    doc: str
    expected: str


class Field:
    """A declared field; ``ready()`` resolves its annotation and checks its default, once."""

    __slots__ = ("_ready", "_scope", "annotation", "checker", "default", "module", "name", "owner")

    def __init__(self, name: str, annotation: Any, default: Any, owner: str, module: str):
        self.name = name
        self.annotation = annotation
        self.default = default
        self.owner = owner
        self.module = module
        self.checker: _types.Checker = _types.ANY
        self._scope: Mapping[str, Any] | None = None
        self._ready = False

    def redefault(self, default: Any, owner: str) -> Field:
        """Returns this field with another default, stated by the subclass ``owner``."""
        new = Field(self.name, self.annotation, default, owner, self.module)
        new.bind(self._scope)
        return new

    def bind(self, scope: Mapping[str, Any] | None) -> None:
        """Sets the local names that a postponed annotation may use besides the module's."""
        self._scope = scope

    def know(self, name: str, value: Any) -> None:
        """Adds a name that a postponed annotation may use, while it is unresolved."""
        if self._scope is not None:
            self._scope = {name: value, **self._scope}

    def resolve(self) -> None:
        """Compiles the annotation. Raises NameError while it names what is not yet defined."""
        annotation = self.annotation
        if isinstance(annotation, ForwardRef):
            annotation = annotation.__forward_arg__
        if isinstance(annotation, str):
            module = sys.modules.get(self.module)
            names = dict(vars(module)) if module is not None else {}
            annotation = eval(annotation, names, dict(self._scope or {}))  # source code, not text
        self.checker = _types.compile_annotation(annotation, f"{self.owner}.{self.name}")
        self.annotation = annotation
        self._scope = None

    def ready(self) -> Field:
        """Resolves and checks what is still open; returns self."""
        if self._ready:
            return self
        where = f"{self.owner}.{self.name}"
        try:
            self.resolve()
        except (NameError, AttributeError) as e:
            raise ConfigError(
                f"the annotation {self.annotation!r} cannot be resolved: {e}",
                code="AX106",
                where=where,
                hint="import the name at run time, not only under TYPE_CHECKING",
            ) from e
        if self.default is not REQUIRED:
            try:
                self.default = self.checker.convert(self.default)
            except _types.Mismatch as e:
                raise e.error(where, where) from None
        self._ready = True
        return self


def is_class_var(annotation: Any) -> bool:
    """Whether an annotation, postponed or not, is a ClassVar."""
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        return re.match(r"(\w+\.)*ClassVar\b", annotation) is not None
    return annotation is ClassVar or get_origin(annotation) is ClassVar


def own_annotations(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the annotations of a class body that is about to become a class."""
    if "__annotations__" in namespace:
        return dict(namespace["__annotations__"])
    if sys.version_info >= (3, 14):
        import annotationlib

        annotate = annotationlib.get_annotate_from_class_namespace(namespace)
        if annotate is not None:
            return annotationlib.call_annotate_function(annotate, annotationlib.Format.FORWARDREF)
    return {}


def local_scope(frame: FrameType | None) -> dict[str, Any]:
    """Returns the names visible in the functions around a class statement."""
    scopes: list[Mapping[str, Any]] = []
    file = frame.f_code.co_filename if frame is not None else ""
    while frame is not None and frame.f_code.co_filename == file:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # names of a class body are not visible
            scopes.append(frame.f_locals)
        frame = frame.f_back
    names: dict[str, Any] = {}
    for scope in reversed(scopes):
        names.update(scope)
    return names


def collect(
    namespace: dict[str, Any],
    inherited: Mapping[str, Field],
    constants: set[str],
    reserved: frozenset[str],
    frame: FrameType | None,
) -> dict[str, Field]:
    """Takes the fields out of a class body.

    Args:
        namespace: The class body; defaults of fields are removed from it.
        inherited: Fields of the bases.
        constants: Names that are class variables of the bases.
        reserved: Names that are methods of Config.
        frame: The frame that executes the class statement.

    Returns:
        The class's own fields, in the order of their statements.

    Raises:
        ConfigError: A field hides a method, starts with an underscore, or has no annotation.
    """
    qualname = str(namespace["__qualname__"])
    owner, module = qualname.rsplit("<locals>.", 1)[-1], str(namespace["__module__"])

    def refuse(name: str, message: str, hint: str) -> ConfigError:
        return ConfigError(message, code="AX105", where=f"{owner}.{name}", hint=hint)

    annotations = own_annotations(namespace)
    constants = {name for name, a in annotations.items() if is_class_var(a)} | constants
    annotations = {name: a for name, a in annotations.items() if name not in constants}
    postponed = any(isinstance(a, str | ForwardRef) for a in annotations.values())
    scope = local_scope(frame) if postponed else None
    stated = dict.fromkeys([*namespace, *annotations])
    own: dict[str, Field] = {}
    for name in stated:
        if name in annotations:
            if name in reserved:
                raise refuse(
                    name, f"a field named {name!r} would hide a method of Config", "rename it"
                )
            if name.startswith("_"):
                raise refuse(name, "a field's name starts with an underscore", "rename it")
            field = Field(name, annotations[name], namespace.pop(name, REQUIRED), owner, module)
            field.bind(scope)
            own[name] = field
        elif not name.startswith("_") and name not in constants:
            value = namespace[name]
            defined_here = str(getattr(value, "__qualname__", "")).startswith(qualname + ".")
            if name in inherited:
                if defined_here:
                    raise refuse(name, "a method or class hides the field of that name", "rename")
                own[name] = inherited[name].redefault(namespace.pop(name), owner)
            elif not defined_here and not isinstance(value, property | classmethod | staticmethod):
                raise refuse(
                    name,
                    "a default without an annotation, and no inherited field of that name",
                    f"write `{name}: {type(value).__name__} = ...`, or ClassVar for a constant",
                )
    return own


def doc_of(cls: type, name: str) -> str:
    """Returns the line about ``name`` in the docstrings of ``cls`` and its bases, or ''."""
    for each in cls.__mro__:
        found = re.search(rf"^\s+{name}: (.+)$", each.__dict__.get("__doc__") or "", re.MULTILINE)
        if found:
            return found.group(1)
    return ""
