"""Config, the typed and copied description of an object, and Configurable, the object's class."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast, dataclass_transform

from axcore.config import _edit, _replace, _store, _text, _write
from axcore.config._fields import Field, FieldInfo, collect, doc_of
from axcore.config._provenance import Event
from axcore.config._tree import Node, copy_node, error, path_of, set_up, short_name, state, walk
from axcore.errors import ConfigError


@dataclass_transform(kw_only_default=True)
class ConfigMeta(type):
    """Metaclass of Config: takes the fields out of the class body."""

    ax_own: dict[str, Field]
    ax_fields: dict[str, Field]

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> ConfigMeta:
        namespace.setdefault("__slots__", ())
        cls = super().__new__(mcs, name, bases, namespace, **kwargs)
        # With several bases the order of the MRO decides, as it does for methods.
        inherited: dict[str, Field] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited.update(base.__dict__.get("ax_own", {}))
        own: dict[str, Field] = {}
        if bases != (Node,):
            frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
            constants = {n for base in bases for n in dir(base)} - _RESERVED
            own = collect(cls, inherited, constants, _RESERVED, frame)
        cls.ax_own = own
        cls.ax_fields = {**inherited, **own}
        try:
            for field in cls.ax_fields.values():
                field.ready()
        except ConfigError as e:
            if e.code != "AX106":  # an annotation that names something defined later
                raise
        return cls


class Config(Node, metaclass=ConfigMeta):
    """A typed description of one object and, in its fields, of the objects inside it.

    Declared as the nested class ``Config`` of a :class:`Configurable`. Values are checked when set
    and copied, never shared. See :mod:`axcore.config` for the whole picture.
    """

    __slots__ = ()

    target: ClassVar[Any] = None
    """The class that this config configures."""

    def __init__(self, **values: Any):
        fields = cast(ConfigMeta, type(self)).ax_fields
        set_up(self, fields, {name: field.ready().default for name, field in fields.items()})
        if values:
            self.set(**values)

    # Reading and writing fields -----------------------------------------------------------------

    if not TYPE_CHECKING:  # checkers see the declared fields only

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            try:
                return state(self).values[name]
            except KeyError:
                raise _store.unknown(self, name) from None

        def __setattr__(self, name: str, value: Any) -> None:
            self.set(**{name: value})

        def __delattr__(self, name: str) -> None:
            raise error("AX104", f"a field cannot be deleted ({name!r})", path_of(self, name))

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *state(self).fields})

    def set(self, /, **values: Any) -> Self:
        """Sets fields in place, all of them or (on an error) none; returns self.

        Raises:
            ConfigError: An unknown field, a wrong type, or a frozen config.
        """
        _store.set_all([self], values)
        return self

    def fields(self) -> Mapping[str, FieldInfo]:
        """Returns what each field accepts, its default and its documentation."""
        cls = type(self)
        return {
            name: FieldInfo(name, f.annotation, f.default, doc_of(cls, name), f.checker.expected)
            for name, f in state(self).fields.items()
        }

    # Values ------------------------------------------------------------------------------------

    def copy(self) -> Self:
        """Returns an unfrozen deep copy with its provenance."""
        return cast(Self, copy_node(self))

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    @property
    def frozen(self) -> bool:
        """Whether edits are refused."""
        return state(self).frozen

    def freeze(self) -> Self:
        """Refuses edits of this config and all below it from now on; returns self."""
        for _, each in walk(self):
            state(each).frozen = True
        return self

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Config):
            return NotImplemented
        return _write.lines(self) == _write.lines(other)

    def __hash__(self) -> int:
        if not self.frozen:
            raise TypeError(f"a {type(self).__qualname__} that can change is unhashable; freeze it")
        return hash(tuple(_write.lines(self).items()))

    def __reduce__(self) -> tuple[Any, ...]:
        # The text leaves out provenance, frozen flags and reports of replacements.
        more = {path: (state(n).events, state(n).frozen) for path, n in walk(self)}
        return (_unpickled, (type(self), self.to_text(), more, self.replacements))

    def __repr__(self) -> str:
        explicit = dict.fromkeys(key.split(".")[0] for key, _ in state(self).events)
        inner = ", ".join(f"{n}={state(self).values[n]!r}" for n in explicit)
        return f"{_store.label(self)}({inner})"

    # Text --------------------------------------------------------------------------------------

    def to_text(self) -> str:
        """Returns the complete, canonical text: one ``path: value`` per line.

        Raises:
            ConfigError: A config class or value has no public path (codes AX107).
        """
        _write.check_public(self)
        return _write.text(self)

    @classmethod
    def from_text(cls, text: str, trusted: tuple[str, ...] = (), *, fill_in: bool = False) -> Self:
        """Returns the config that a text describes, equal to the one it was written from.

        Calls nothing but the constructors of configs and frozen dataclasses.

        Args:
            text: What ``to_text`` gave; blank lines and lines starting with ``#`` are skipped.
            trusted: Packages that the text may name besides axcore, jax, optax and numpy.
            fill_in: Whether a field that the text does not state keeps its default, as in a text
                from before a release that added the field. Else it is an error.

        Raises:
            ConfigError: With the number of the line that is wrong, missing or too much.
        """
        return cast(Self, _text.from_text(text, tuple(trusted), cls, fill_in))

    def lines(self) -> dict[str, str]:
        """Returns path -> value in text form, of each config and leaf; the root's path is ''."""
        return _write.lines(self)

    def fingerprint(self) -> str:
        """Returns the SHA-256 of the canonical text, the same in every process."""
        return hashlib.sha256(_write.text(self).encode()).hexdigest()

    # Looking and editing below -----------------------------------------------------------------

    def walk(self) -> Iterator[tuple[str, Config]]:
        """Yields (path, config) of this config and all below it, in pre-order."""
        return cast("Iterator[tuple[str, Config]]", walk(self))

    def find(self, kind: Any) -> dict[str, Any]:
        """Returns path -> config of those that are a ``kind``, a config class (or a callable)."""
        return {path: node for path, node in walk(self) if _edit.is_match(node, kind)}

    def at(self, pattern: str) -> _edit.Selection[Self]:
        """Selects the configs below this one whose path matches.

        Args:
            pattern: Dotted; ``*`` stands for one segment (``layer*`` within one), ``**`` for any
                number of them.

        Raises:
            ConfigError: Nothing matches.

        Example:
            >>> cfg.at("model.decoder.layer.*").set(dropout_rate=0.1)
        """
        return _edit.Selection(self, pattern)

    def get_path(self, path: str) -> Any:
        """Returns the value at a dotted path. Raises ConfigError with near misses."""
        return _edit.get_path(self, path)

    def set_path(self, path: str, value: Any) -> Self:
        """Sets the value at a dotted path, also inside tuples, mappings and dataclasses."""
        _edit.set_path(self, path, value)
        return self

    def set_path_text(self, path: str, text: str, trusted: tuple[str, ...] = ()) -> Self:
        """Sets the value at a path from text as on a command line, read by the field's type."""
        _text.set_path_text(self, path, text, tuple(trusted))
        return self

    def replace(
        self, old: Any, new: Config, where: _edit.Where = None, allow_none: bool = False
    ) -> Self:
        """Replaces every config of one class, below this one, by a copy of ``new``.

        Per field the value is: set explicitly on ``new``, else set explicitly on the replaced
        config (if ``new`` has the field and its type fits), else ``new``'s default. What that did
        is logged and appended to ``replacements``.

        Args:
            old: A config class, subclasses included, or the callable of ``config_for``.
            new: What to put there.
            where: Only at paths that match this pattern (as for ``at``) or predicate(path, config).
            allow_none: Whether it is fine that nothing matches.

        Raises:
            ConfigError: Nothing matched, or ``new`` is not accepted in a matched place.

        Warns:
            ConfigWarning: An earlier edit is lost, because ``new`` has no such field.
        """
        _replace.replace(self, old, new, where, allow_none)
        return self

    @property
    def replacements(self) -> tuple[_replace.Replacement, ...]:
        """What each ``replace`` on this config did, oldest first."""
        return state(self).reports

    # Provenance --------------------------------------------------------------------------------

    def history(self, path: str) -> tuple[Event, ...]:
        """Returns the events of the value at ``path``, oldest first; the first is its default."""
        return _edit.history(self, path)

    def set_by(self, path: str) -> Event:
        """Returns the last event of the value at ``path``."""
        return self.history(path)[-1]

    # Building ----------------------------------------------------------------------------------

    def prepared(
        self, ancestors: tuple[Config, ...], overrides: Mapping[str, object], source: str
    ) -> Self:
        """Returns the frozen copy from which this config's object is built by its parent.

        In this order: copies; applies ``overrides``; resolves ``scaled(...)`` in this config and
        below against the own fields, then the ancestors (below, what is still unknown stays);
        checks that this config's own fields hold no REQUIRED and nothing unresolved; freezes.

        Args:
            ancestors: The configs above, nearest first; frozen and resolved ones.
            overrides: What the parent says, recorded as kind ``derived``.
            source: The parent's path, the name in those records.

        Raises:
            ConfigError: An override that this config has no field for, or that contradicts a
                value set explicitly; a missing or unresolvable value.
        """
        return cast(Self, _store.prepared(self, ancestors, overrides, source))

    def instantiate(self, /, **kwargs: Any) -> Any:
        """Builds the object: ``target.from_config(frozen resolved copy, **kwargs)``.

        Raises:
            ConfigError: A required value of this config is missing, or ``scaled`` has no source.
        """
        cfg = _store.prepared(self, None, {}, "")
        if cfg.target is None:
            message = f"{_store.label(self)} configures no class, so it cannot be instantiated"
            hint = "declare it as the nested class Config of a Configurable"
            raise error("AX100", message, path_of(self), hint)
        return cfg.target.from_config(cfg, **kwargs)


def _unpickled(cls: type[Config], text: str, more: dict[str, Any], reports: Any) -> Config:
    cfg = _text.from_text(text, None, cls)
    state(cfg).reports = reports
    for path, node in walk(cfg):
        state(node).events, state(node).frozen = more[path]
    return cfg


_RESERVED = frozenset(n for n in dir(Config) if not n.startswith("_"))
_Base = Config  # a name of its own, since the class below has one that hides it


class Configurable:
    """Base of everything that is built from a config.

    A subclass may declare a nested ``class Config(Parent.Config)``; otherwise it gets one. The two
    find each other: ``X.Config.target is X``.
    """

    class Config(_Base):
        """Configures nothing yet; subclasses add their fields."""

    cfg: Any
    """The frozen config that this object was built from."""

    def __init__(self, cfg: Any):
        self.cfg = cfg

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        _pair(cls)

    @classmethod
    def from_config(cls, cfg: Any, **kwargs: Any) -> Any:
        """Builds the object from a frozen config; what ``cfg.instantiate(**kwargs)`` calls."""
        return cls(cfg, **kwargs)


Configurable.Config.target = Configurable


def _pair(cls: Any) -> None:
    """Gives a Configurable its Config and the Config its target."""
    parents: list[Any] = [b.Config for b in cls.__bases__ if issubclass(b, Configurable)]
    parents = list(dict.fromkeys(parents))
    own: Any = cls.__dict__.get("Config")
    where = f"{short_name(cls)}.Config"
    if own is None:
        namespace = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Config"}
        own = cls.Config = ConfigMeta("Config", tuple(parents), namespace)
    elif not (isinstance(own, type) and all(issubclass(own, p) for p in parents)):
        hint = f"write class Config({', '.join(short_name(p) for p in parents)})"
        raise error("AX105", "a nested Config must derive from the parent's", where, hint)
    elif vars(own).get("target") is not None:
        message = f"this config class already configures {vars(own)['target'].__qualname__}"
        hint = "declare a nested class Config that derives from it"
        raise error("AX105", message, where, hint)
    for field in cast(ConfigMeta, own).ax_own.values():
        field.scope = {cls.__name__: cls, **field.scope}
    setattr(own, "target", cls)  # noqa: B010 (of this class, unseen by checkers)
