"""Decides which plugins are active: filters, versions, validity, then collisions of names."""

from __future__ import annotations

from collections.abc import Sequence

from packaging.utils import canonicalize_name

from axcore.config import FrozenMapping

from ._collect import Collected, collect
from .discovery import Candidate, Fault, import_plugin, unmet_core_requirement
from .hookspecs import HOOKS
from .records import PluginRecord

CORE = "axcore"


def admit(
    candidates: Sequence[Candidate],
    builtin: object,
    *,
    core_version: str,
    load: Sequence[str] | None,
    disable: Sequence[str],
) -> tuple[tuple[PluginRecord, ...], list[tuple[str, Collected]]]:
    """Imports what the filters let through and calls its hooks.

    Args:
        candidates: The plugins found.
        builtin: The plugin object of core.
        core_version: Version to hold plugins' requirements against.
        load: Names to load, or None for all.
        disable: Names to leave out.

    Returns:
        A record for each, core first; and (distribution, what it provides) of the active ones.
    """
    # Sorted, so that no result depends on the order in which they are found.
    candidates = sorted(candidates, key=lambda c: (c.distribution, c.name))
    faults: list[tuple[Candidate, Fault]] = []
    enabled: list[Candidate] = []
    for candidate in candidates:
        reason = _filtered(candidate, load, disable)
        if reason:
            faults.append((candidate, Fault("disabled", reason)))
        else:
            enabled.append(candidate)
    core = Candidate(CORE, core_version, "core", lambda: builtin, packages=frozenset({CORE}))
    collected = [(core, collect("core", builtin))]
    for candidate in enabled:
        try:
            _check_metadata(candidate, enabled, core_version)
            collected.append((candidate, collect(candidate.name, import_plugin(candidate))))
        except Fault as fault:
            faults.append((candidate, fault))
    conflicts = _collisions(collected)
    records = [_record(c, conflicts.get(i), provided) for i, (c, provided) in enumerate(collected)]
    records += [_record(candidate, fault, {}) for candidate, fault in faults]
    records.sort(key=lambda r: (r.distribution != CORE, r.distribution, r.name))
    active = [(c.distribution, p) for i, (c, p) in enumerate(collected) if i not in conflicts]
    return tuple(records), active


def unmatched(candidates: Sequence[Candidate], names: Sequence[str]) -> tuple[str, ...]:
    """Returns those of ``names`` that no candidate is called, sorted."""
    return tuple(sorted(n for n in names if not any(c.is_called(n) for c in candidates)))


def _filtered(
    candidate: Candidate, load: Sequence[str] | None, disable: Sequence[str]
) -> str | None:
    """Returns why a filter leaves ``candidate`` out, or None."""
    if load is not None and not any(candidate.is_called(name) for name in load):
        return "not among the plugins to load" if load else "plugins are switched off"
    return "disabled by name" if any(candidate.is_called(name) for name in disable) else None


def _check_metadata(candidate: Candidate, enabled: Sequence[Candidate], core_version: str) -> None:
    if candidate.fault is not None:
        raise candidate.fault
    unmet = unmet_core_requirement(candidate.requires, core_version)
    if unmet:
        raise Fault("incompatible", f"wants {unmet}, this is axcore {core_version}")
    twins = [c for c in enabled if c.name == candidate.name]
    if len(twins) > 1:
        who = " and ".join(c.distribution for c in twins)
        raise Fault("conflicting", f"{who} both have an entry point called {candidate.name!r}")


def _collisions(collected: Sequence[tuple[Candidate, Collected]]) -> dict[int, Fault]:
    """Finds names given twice. Core keeps its names; otherwise neither side has them."""
    holders: dict[tuple[str, str], list[int]] = {}
    for hook in HOOKS:
        for i, (candidate, provided) in enumerate(collected):
            for spec in provided.get(hook.kind, ()):
                name = f"{candidate.distribution}:{spec.name}" if hook.qualified else spec.name
                holders.setdefault((hook.kind, name), []).append(i)
    reasons: dict[int, list[str]] = {}
    for (kind, name), group in holders.items():
        who = " and ".join(f"{c.distribution} ({c.name})" for c, _ in (collected[i] for i in group))
        for i in group if len(group) > 1 else ():
            if collected[i][0].distribution != CORE:
                reasons.setdefault(i, []).append(f"{who} both provide {kind} {name!r}")
    return {i: Fault("conflicting", "; ".join(why)) for i, why in reasons.items()}


def _record(candidate: Candidate, fault: Fault | None, provided: Collected) -> PluginRecord:
    names = {kind: tuple(spec.name for spec in specs) for kind, specs in provided.items()}
    return PluginRecord(
        distribution=canonicalize_name(candidate.distribution),
        version=candidate.version,
        name=candidate.name,
        status=fault.status if fault else "active",
        reason=fault.reason if fault else "",
        provides=FrozenMapping(names),
        error=fault.error if fault else None,
    )
