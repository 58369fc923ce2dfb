"""One registry class for everything that plugins provide."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Sequence
from typing import Any, Generic, TypeVar

from axcore.config import FrozenMapping
from axcore.errors import PluginError, PluginLookupError, did_you_mean

from .records import PluginRecord
from .specs import Spec

S = TypeVar("S", bound=Spec)
_SHOWN = 20  # known names in a message


def load_target(target: str, *, where: str | None = None) -> Any:
    """Imports what ``"module:attribute"`` names.

    Args:
        target: The target.
        where: Who asks, for the message.

    Raises:
        PluginError: The module cannot be imported (chained) or has no such attribute.
    """
    module_name, _, path = target.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except Exception as error:
        hint = None
        if isinstance(error, ModuleNotFoundError) and error.name:
            hint = f"module {error.name!r} is missing: install the package that has it"
        raise PluginError(
            f"cannot import {module_name!r} of target {target!r}: {type(error).__name__}: {error}",
            code="AX204",
            where=where,
            hint=hint,
        ) from error
    for part in path.split("."):
        if not hasattr(value, part):
            raise PluginError(
                f"target {target!r}: {module_name!r} has no attribute {path!r}",
                code="AX204",
                where=where,
                hint=did_you_mean(part, dir(value)) or None,
            )
        value = getattr(value, part)
    return value


def lookup_error(
    message: str, name: str, known: tuple[str, ...], records: tuple[PluginRecord, ...]
) -> PluginLookupError:
    """Builds the error for a missing name: known names, near misses, plugins that are not active.

    The original errors of failed plugins are chained as its cause.
    """
    shown = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
    hints = [did_you_mean(name, known)]
    inactive = [r for r in records if r.status != "active"]
    owner, _, rest = name.partition(":")
    seen = {r.distribution for r in records} | {k.partition(":")[0] for k in known}
    if rest and owner not in seen and not any(hints):
        hints.append(f"is {owner!r} installed? axcore plugins list shows what is")
    hints += [f"plugin {r.label} is {r.status}: {r.reason}" for r in inactive]
    error = PluginLookupError(
        f"{message}; known: {shown or 'none'}",
        hint="; ".join(h for h in hints if h) or "axcore plugins list shows what is installed",
    )
    error.__cause__ = joint_cause(inactive)
    return error


def joint_cause(records: Sequence[PluginRecord]) -> BaseException | None:
    """Returns the original errors of failed plugins as one exception, or None."""
    errors = [r.error for r in records if r.error is not None]
    if len(errors) > 1:
        return BaseExceptionGroup("plugins that failed", errors)
    return errors[0] if errors else None


class Registry(Generic[S]):
    """The specs of one kind, by name, with the distribution each came from.

    Args:
        kind: What is registered, such as ``"kernels"``.
        entries: name -> (spec, distribution).
        records: Returns the plugin records, for lookup errors.
    """

    def __init__(
        self,
        kind: str,
        entries: dict[str, tuple[S, str]],
        records: Callable[[], tuple[PluginRecord, ...]],
    ):
        self.kind = kind
        self._entries = dict(sorted(entries.items()))
        self._records = records

    def names(self) -> tuple[str, ...]:
        """Returns all names, sorted."""
        return tuple(self._entries)

    def specs(self) -> tuple[S, ...]:
        """Returns all specs, sorted by name."""
        return tuple(spec for spec, _ in self._entries.values())

    def get(self, name: str) -> S:
        """Returns the spec called ``name``.

        Raises:
            PluginLookupError: No active plugin provides it.
        """
        return self._entry(name)[0]

    def owner(self, name: str) -> str:
        """Returns the distribution that provides ``name``.

        Raises:
            PluginLookupError: No active plugin provides it.
        """
        return self._entry(name)[1]

    def load(self, name: str) -> Any:
        """Imports and returns the target of ``name``.

        Raises:
            PluginLookupError: No active plugin provides it.
            PluginError: The target cannot be imported; the original error is chained.
        """
        spec, owner = self._entry(name)
        target = getattr(spec, "target", None)
        if target is None:
            raise PluginError(f"{self.kind} {name!r} has no target to load", code="AX204")
        return load_target(target, where=f"{self.kind} {name!r} of {owner}")

    def items(self) -> tuple[tuple[str, S, str], ...]:
        """Returns (name, spec, distribution) of all entries, sorted by name."""
        return tuple((name, spec, owner) for name, (spec, owner) in self._entries.items())

    def split(
        self, fits: Callable[[S], bool], owners: Container[str]
    ) -> tuple[FrozenMapping[S], list[tuple[str, str]]]:
        """Splits the specs that fit into those that act and those that are candidates only.

        Args:
            fits: Tells whether a spec fits.
            owners: The distributions whose specs act.

        Returns:
            Name -> spec of those that act, and ("kind", "DISTRIBUTION:NAME") of the others.
        """
        fitting = [item for item in self.items() if fits(item[1])]
        acting = {name: spec for name, spec, owner in fitting if owner in owners}
        others = [(self.kind, f"{o}:{spec.name}") for _, spec, o in fitting if o not in owners]
        return FrozenMapping(acting), others

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        return f"Registry({self.kind!r}, {list(self._entries)})"

    def _entry(self, name: str) -> tuple[S, str]:
        if name in self._entries:
            return self._entries[name]
        what = self.kind.removesuffix("s").replace("_", " ")
        raise lookup_error(f"no {what} named {name!r}", name, self.names(), self._records())
