"""Decides which plugins are active: filters, versions, validity, then collisions of names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from axcore.config import FrozenMapping

from ._collect import Collected, collect
from .discovery import Candidate, Fault, import_plugin, unmet_core_requirement
from .hookspecs import HOOKS
from .records import PluginRecord
from .specs import Spec

CORE = "axcore"
# Kind -> name -> (spec, the distribution that provides it).
Entries = dict[str, dict[str, tuple[Spec, str]]]


@dataclass
class _Case:
    """A candidate, what it provides, and why it cannot be active."""

    candidate: Candidate
    provided: Collected = field(default_factory=Collected)
    fault: Fault | None = None

    @property
    def owner(self) -> str:
        return self.candidate.distribution

    def record(self) -> PluginRecord:
        names = {kind: tuple(s.name for s in specs) for kind, specs in self.provided.items()}
        return PluginRecord(
            distribution=self.candidate.distribution,
            version=self.candidate.version,
            name=self.candidate.name,
            status=self.fault.status if self.fault else "active",
            reason=str(self.fault or ""),
            provides=FrozenMapping(names),
            error=self.fault.__cause__ if self.fault else None,
        )


def admit(
    candidates: Iterable[Candidate],
    builtin: object,
    core_version: str,
    load: Sequence[str] | None,
    disable: Sequence[str],
) -> tuple[tuple[PluginRecord, ...], Entries]:
    """Imports what the filters let through and calls its hooks.

    Args:
        candidates: The plugins found.
        builtin: The plugin object of core.
        core_version: Version to hold plugins' requirements against.
        load: Names to load, or None for all.
        disable: Names to leave out.

    Returns:
        A record for each, core first; and what the active ones provide.
    """
    # Sorted, so that no result depends on the order in which they are found.
    cases = [_Case(c) for c in sorted(candidates, key=lambda c: (c.distribution, c.name))]
    for case in cases:
        case.fault = _filtered(case.candidate, load, disable)
    enabled = [case.candidate for case in cases if case.fault is None]
    for case in cases:
        if case.fault is None:
            try:
                _check_metadata(case.candidate, enabled, core_version)
                case.provided = collect(import_plugin(case.candidate))
            except Fault as fault:
                case.fault = fault
    core = Candidate(CORE, core_version, "core", lambda: builtin)
    cases.insert(0, _Case(core, collect(builtin)))
    entries = _settle(cases)
    return tuple(case.record() for case in cases), entries


def unmatched(candidates: Sequence[Candidate], names: Sequence[str]) -> tuple[str, ...]:
    """Returns those of ``names`` that no candidate is called, sorted."""
    return tuple(sorted(n for n in names if not any(c.is_called(n) for c in candidates)))


def _filtered(
    candidate: Candidate, load: Sequence[str] | None, disable: Sequence[str]
) -> Fault | None:
    """Returns why a filter leaves ``candidate`` out, or None."""
    if load is not None and not any(map(candidate.is_called, load)):
        reason = "not among the plugins to load" if load else "plugins are switched off"
        return Fault("disabled", reason)
    if any(map(candidate.is_called, disable)):
        return Fault("disabled", "disabled by name")
    return None


def _check_metadata(candidate: Candidate, enabled: Sequence[Candidate], core_version: str) -> None:
    if candidate.fault is not None:
        raise candidate.fault
    if unmet := unmet_core_requirement(candidate.requires, core_version):
        raise Fault("incompatible", f"wants {unmet}, this is axcore {core_version}")
    twins = [c.distribution for c in enabled if c.name == candidate.name]
    if len(twins) > 1:
        who = " and ".join(twins)
        raise Fault("conflicting", f"{who} both have an entry point called {candidate.name!r}")


def _settle(cases: Sequence[_Case]) -> Entries:
    """Finds names given twice; core keeps its own, otherwise neither side has them."""
    given: dict[str, dict[str, list[tuple[_Case, Spec]]]] = {hook.kind: {} for hook in HOOKS}
    for hook in HOOKS:
        for case in cases:
            for spec in case.provided.get(hook.kind, ()):
                name = f"{case.owner}:{spec.name}" if hook.qualified else spec.name
                given[hook.kind].setdefault(name, []).append((case, spec))
    for kind, named in given.items():
        for name, group in named.items():
            who = " and ".join(f"{case.owner} ({case.candidate.name})" for case, _ in group)
            for case, _ in group if len(group) > 1 else ():
                if case.owner != CORE:
                    reasons = [str(case.fault)] if case.fault else []
                    reasons.append(f"{who} both provide {kind} {name!r}")
                    case.fault = Fault("conflicting", "; ".join(reasons))
    return {
        kind: {n: (spec, c.owner) for n, group in named.items() for c, spec in group if not c.fault}
        for kind, named in given.items()
    }
