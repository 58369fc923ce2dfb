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
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, ForwardRef, Self, TypeVar, get_origin

from axcore.config import _tree, _types
from axcore.config._provenance import Event
from axcore.config._tree import error, nodes_below, short_name, state
from axcore.errors import ConfigError

if TYPE_CHECKING:
    from types import FrameType

T = TypeVar("T")


Required = Annotated[T, "required"]
"""``x: Required[int] = REQUIRED``: a value that somebody must set; readers see an int."""

Dim = Annotated[int, "dim"]
"""An int that may be given as ``scaled(...)`` until it is known; readers see an int."""

REQUIRED: Any = _tree.REQUIRED
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


@dataclasses.dataclass(slots=True, eq=False)
class Field:
    """A declared field; ``ready()`` resolves its annotation and checks its default, once.

    Attributes:
        name: The field's name.
        annotation: Its type, as stated until it is resolved.
        default: Its default, or REQUIRED.
        owner: The class or callable that states the default.
        module: Where the annotation was written.
        scope: Local names that a postponed annotation may use besides the module's.
        checker: What checks its values.
        is_ready: Whether ``ready`` has been called.
    """

    name: str
    annotation: Any
    default: Any
    owner: str
    module: str
    scope: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    checker: _types.Checker = _types.ANY
    is_ready: bool = False

    def ready(self) -> Self:
        """Resolves and checks what is still open; returns self."""
        if self.is_ready:
            return self
        where = f"{self.owner}.{self.name}"
        try:
            annotation = self.annotation
            if isinstance(annotation, str):  # of the source code
                names = dict(vars(sys.modules[self.module])) if self.module in sys.modules else {}
                annotation = eval(annotation, names, dict(self.scope))
            self.checker = _types.compile_annotation(annotation, where)
        except (NameError, AttributeError) as e:
            message = f"the annotation {self.annotation!r} cannot be resolved: {e}"
            hint = "import the name at run time, not only under TYPE_CHECKING"
            raise error("AX106", message, where, hint) from e
        if self.default is not REQUIRED:
            try:
                self.default = self.checker.convert(self.default)
            except _types.Mismatch as e:
                raise e.error(where, where) from None
        for node in nodes_below(self.default):  # what a class body sets is a default of that class
            events = state(node).events
            for i, (key, event) in enumerate(events):
                if event.kind != "default":
                    events[i] = (key, Event("default", self.owner, value=event.value))
        self.annotation, self.scope, self.is_ready = annotation, {}, True
        return self


def is_class_var(annotation: Any) -> bool:
    """Whether an annotation, postponed or not, is a ClassVar."""
    if isinstance(annotation, str):
        return re.match(r"(\w+\.)*ClassVar\b", annotation) is not None
    return annotation is ClassVar or get_origin(annotation) is ClassVar


def own_annotations(cls: type) -> dict[str, Any]:
    """Returns the annotations of a class's own body; those not yet defined are strings."""
    if sys.version_info >= (3, 14):
        import annotationlib

        found = annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    else:
        found = inspect.get_annotations(cls)
    return {n: a.__forward_arg__ if isinstance(a, ForwardRef) else a for n, a in found.items()}


def local_scope(frame: FrameType | None) -> dict[str, Any]:
    """Returns the names visible in the functions around a class statement."""
    names: dict[str, Any] = {}
    file = frame.f_code.co_filename if frame is not None else ""
    while frame is not None and frame.f_code.co_filename == file:
        if frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # names of a class body are not visible
            names = {**frame.f_locals, **names}
        frame = frame.f_back
    return names


def collect(
    cls: type,
    inherited: Mapping[str, Field],
    constants: set[str],
    reserved: frozenset[str],
    frame: FrameType | None,
) -> dict[str, Field]:
    """Takes the fields out of a class.

    Args:
        cls: The new class; defaults of fields are removed from it.
        inherited: Fields of the bases.
        constants: Names that are class variables of the bases.
        reserved: Names that are methods of Config.
        frame: The frame that executes the class statement.

    Returns:
        The class's own fields, in the order of their statements.

    Raises:
        ConfigError: A field hides a method, starts with an underscore, or has no annotation.
    """
    owner = short_name(cls)

    def refuse(name: str, message: str, hint: str) -> ConfigError:
        return error("AX105", message, f"{owner}.{name}", hint)

    annotations = own_annotations(cls)
    constants = {name for name, a in annotations.items() if is_class_var(a)} | constants
    annotations = {name: a for name, a in annotations.items() if name not in constants}
    postponed = any(isinstance(a, str) for a in annotations.values())
    scope = local_scope(frame) if postponed else {}
    stated = dict(vars(cls))
    own: dict[str, Field] = {}
    for name in dict.fromkeys([*stated, *annotations]):
        value = stated.get(name, REQUIRED)
        if name in annotations:
            if name in reserved:
                message = f"a field named {name!r} would hide a method of Config"
                raise refuse(name, message, "rename it")
            if name.startswith("_"):
                raise refuse(name, "a field's name starts with an underscore", "rename it")
            own[name] = Field(name, annotations[name], value, owner, cls.__module__, scope)
        elif not name.startswith("_") and name not in constants:
            qualname = str(getattr(value, "__qualname__", ""))
            is_method = qualname.startswith(f"{cls.__qualname__}.")
            if name in inherited and is_method:
                raise refuse(name, "a method or class hides the field of that name", "rename")
            if name in inherited:
                field = inherited[name]
                own[name] = dataclasses.replace(field, default=value, owner=owner, is_ready=False)
            elif not is_method and not isinstance(value, property | classmethod | staticmethod):
                message = "a default without an annotation, and no inherited field of that name"
                hint = f"write `{name}: {type(value).__name__} = ...`, or ClassVar for a constant"
                raise refuse(name, message, hint)
    for name in own.keys() & stated.keys():
        delattr(cls, name)
    return own


def doc_of(cls: type, name: str) -> str:
    """Returns the line about ``name`` in the docstrings of ``cls`` and its bases, or ''."""
    for each in cls.__mro__:
        found = re.search(rf"^\s+{name}: (.+)$", each.__dict__.get("__doc__") or "", re.MULTILINE)
        if found:
            return found.group(1)
    return ""
