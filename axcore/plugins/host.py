"""The plugin host: everything that core and the active plugins provide."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import importlib_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from axcore.config import FrozenMapping
from axcore.errors import PluginError, did_you_mean

from . import specs
from ._active import ActiveSet
from ._admission import CORE, admit, unmatched
from .discovery import Candidate, find_candidates, requirements, satisfies, top_level
from .hookspecs import HOOKS
from .records import PluginRecord
from .registry import Registry, joint_cause, lookup_error
from .specs import InstanceTypeSpec, NamedSpec, pattern_matches, specificity


class PluginHost:
    """Imports plugins, keeps a record of each, and serves what the active ones provide.

    A broken plugin becomes a record; looking up a name that nobody provides raises.

    Args:
        entry_points: The plugins; None finds the installed ones.
        builtin: The plugin object of core itself; None takes ``axcore.builtin``.
        core_version: Version to hold plugins' requirements against; None takes this core's.
        load: Distributions or entry points to load; None loads all, an empty one none.
        disable: Distributions or entry points to leave out.
        strict: Raise unless every plugin is active or disabled.

    Attributes:
        records: One record for each entry point, core first, then sorted by distribution.
        unmatched_filters: Names in ``load`` or ``disable`` that no installed plugin has.

    Raises:
        PluginError: ``strict`` and a plugin is neither active nor disabled.
    """

    kernels: Registry[specs.KernelSpec]
    instance_types: Registry[InstanceTypeSpec]
    compilers: Registry[specs.CompilerSpec]
    mesh_rules: Registry[specs.MeshRuleSpec]
    compiler_options: Registry[specs.CompilerOptionSpec]
    quantization: Registry[specs.QuantizationSpec]
    layers: Registry[specs.LayerSpec]
    modifiers: Registry[NamedSpec]
    experiments: Registry[NamedSpec]
    optimizers: Registry[NamedSpec]
    sources: Registry[NamedSpec]
    tokenizers: Registry[NamedSpec]
    writers: Registry[NamedSpec]
    checkpointers: Registry[NamedSpec]
    launchers: Registry[NamedSpec]
    converters: Registry[NamedSpec]
    commands: Registry[NamedSpec]
    callbacks: Registry[specs.CallbackSpec]

    def __init__(
        self,
        entry_points: Iterable[Candidate] | None = None,
        *,
        builtin: object = None,
        core_version: str | None = None,
        load: Iterable[str] | None = None,
        disable: Iterable[str] = (),
        strict: bool = False,
    ):
        if core_version is None:
            from axcore import __version__ as core_version
        if builtin is None:
            from axcore import builtin
        found = find_candidates() if entry_points is None else tuple(entry_points)
        load, disable = None if load is None else tuple(load), tuple(disable)
        self.unmatched_filters = unmatched(found, (*(load or ()), *disable))
        self._candidates = found
        self.records, entries = admit(found, builtin, core_version, load, disable)
        for kind, named in entries.items():
            setattr(self, kind, Registry(kind, named, lambda: self.records))
        if strict:
            self.check_all_active()

    def registries(self) -> Mapping[str, Registry[Any]]:
        """Returns kind -> registry."""
        return FrozenMapping({hook.kind: getattr(self, hook.kind) for hook in HOOKS})

    def check_all_active(self) -> None:
        """Raises unless every plugin is active or disabled.

        Raises:
            PluginError: Names each that is not, and why.
        """
        bad = [r for r in self.records if r.status not in ("active", "disabled")]
        if bad or self.unmatched_filters:
            reasons = [f"{r.label} is {r.status}: {r.reason}" for r in bad]
            reasons += [f"no installed plugin is called {n!r}" for n in self.unmatched_filters]
            raise PluginError(
                "; ".join(reasons),
                code="AX206",
                hint="uninstall or repair them, disable them with AXCORE_DISABLE_PLUGINS, "
                "or unset AXCORE_STRICT_PLUGINS",
            ) from joint_cause(bad)

    def digest(self) -> str:
        """Returns a hex digest of core, the active plugins, their versions and specs.

        Processes of one run compare it before anything compiles.
        """
        lines = [f"{r.distribution}=={r.version} {r.name}" for r in self.active_records()]
        for kind, registry in self.registries().items():
            lines += [f"{kind} {owner} {spec!r}" for _, spec, owner in registry.items()]
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()

    def active_records(self) -> tuple[PluginRecord, ...]:
        """Returns the records whose status is active, core's first."""
        return tuple(r for r in self.records if r.status == "active")

    def instance_type(self, instance: str) -> InstanceTypeSpec:
        """Returns the instance type that covers ``instance``.

        Within a distribution the most specific pattern wins; two distributions that both cover
        the name are an error, so that installing one never changes what the other's name means.

        Raises:
            PluginLookupError: No active plugin covers it.
            PluginError: Two distributions cover it.
        """
        best: dict[str, InstanceTypeSpec] = {}
        for pattern, spec, owner in self.instance_types.items():
            other = best.get(owner)
            if pattern_matches(pattern, instance):
                if other is None or specificity(pattern) > specificity(other.pattern):
                    best[owner] = spec
        if not best:
            known, message = self.instance_types.names(), f"no instance type covers {instance!r}"
            raise lookup_error(message, instance, known, self.records)
        if len(best) > 1:
            claims = " and ".join(f"{o} ({s.pattern!r})" for o, s in sorted(best.items()))
            raise PluginError(
                f"instance {instance!r} is claimed by {claims}",
                code="AX207",
                hint="leave one out with AXCORE_DISABLE_PLUGINS",
            )
        return next(iter(best.values()))

    def owner_of_instance(self, instance: str) -> str:
        """Returns the distribution whose instance type covers ``instance``.

        Raises:
            PluginLookupError: No active plugin covers it.
            PluginError: Two distributions cover it.
        """
        return self.instance_types.owner(self.instance_type(instance).name)

    def active_for(self, instance: str, use: Iterable[str] = ()) -> ActiveSet:
        """Returns the rules, options and kernels that act on ``instance``.

        These are core's own, those of the distribution that owns the instance type, those of the
        one that owns its platform (provides the compiler), and those of ``use``. What other
        distributions provide for it are candidates only.

        Args:
            instance: The instance's name.
            use: Further distributions, or entry points, to draw on.

        Raises:
            PluginLookupError: Nobody covers the instance, or a name in ``use`` is not active.
            PluginError: Two distributions cover it.
        """
        found = self.instance_type(instance)
        owners = {CORE, self.instance_types.owner(found.name)}
        if found.platform in self.compilers:
            owners.add(self.compilers.owner(found.platform))
        owners |= {self._distribution(name) for name in use}

        def matches(spec: specs.MeshRuleSpec | specs.CompilerOptionSpec) -> bool:
            return pattern_matches(spec.pattern, instance)

        rules, other_rules = self.mesh_rules.split(matches, owners)
        options, other_options = self.compiler_options.split(matches, owners)
        kernels, other_kernels = self.kernels.split(lambda k: k.runs_on(found.platform), owners)
        return ActiveSet(
            instance=instance,
            instance_type=found,
            distributions=tuple(sorted(owners)),
            mesh_rules=rules,
            compiler_options=options,
            kernels=tuple(sorted(kernels.values(), key=lambda k: (k.op, -k.priority, k.name))),
            candidates=(*other_rules, *other_options, *other_kernels),
        )

    def _distribution(self, name: str) -> str:
        active = self.active_records()
        for record in active:
            if name == record.name or canonicalize_name(name) == record.distribution:
                return record.distribution
        known = tuple(record.distribution for record in active)
        raise lookup_error(f"use names {name!r}, no active plugin", name, known, self.records)

    def check_required(self, required: Iterable[str]) -> None:
        """Checks requirements such as ``"acme-kernels>=0.1,<0.2"``.

        Raises:
            PluginError: A plugin is missing, not active or of another version.
        """
        for text in required:
            try:
                requirement = Requirement(text)
            except InvalidRequirement as error:
                state = f"not a requirement such as 'acme-kernels>=0.1,<0.2': {error}"
                raise _unmet(text, state) from error
            name = canonicalize_name(requirement.name)
            records = [r for r in self.records if r.distribution == name]
            if not records:
                hint = did_you_mean(name, [r.distribution for r in self.records])
                raise _unmet(text, "not installed", hint or f"pip install '{text}'")
            for record in records:
                if record.status != "active":
                    state, hint = f"{record.status}: {record.reason}", f"axcore plugins show {name}"
                    raise _unmet(text, state, hint, record.label) from record.error
                if not satisfies(requirement, record.version):
                    raise _unmet(text, f"installed as {record.version}", f"pip install '{text}'")

    def trusted_packages(self) -> frozenset[str]:
        """Returns the top-level packages that config texts may name without ``--trust``.

        These are core, the active plugins, and what each of them declares as a dependency. Of
        core's own dependencies a text may name only what ``axcore.config`` lists: numpy and others
        can load and run code.
        """
        active = {(r.distribution, r.name) for r in self.active_records()}
        packages, requires, core = {CORE}, list[str](), list[str]()
        with suppress(importlib_metadata.PackageNotFoundError):  # core may not be installed
            core = importlib_metadata.requires(CORE) or []
        limited = {canonicalize_name(r.name) for r in requirements(core) if not r.marker}
        limited.add(canonicalize_name("jaxlib"))
        for candidate in self._candidates:
            if (candidate.distribution, candidate.name) in active:
                packages |= candidate.packages
                requires += candidate.requires
        for name in {canonicalize_name(r.name) for r in requirements(requires)} - limited:
            with suppress(importlib_metadata.PackageNotFoundError):  # optional, or not for here
                packages |= top_level(importlib_metadata.distribution(name))
        return frozenset(packages)


def _unmet(text: str, state: str, hint: str | None = None, where: str | None = None) -> PluginError:
    message = f"required plugin {text!r} is {state}"
    return PluginError(message, code="AX205", where=where, hint=hint)


def _names(variable: str) -> tuple[str, ...] | None:
    """Returns the names that an environment variable lists, or None where it is not set."""
    text = os.environ.get(variable)
    return None if text is None else tuple(n.strip() for n in text.split(",") if n.strip())


def _strict() -> bool:
    strict = os.environ.get("AXCORE_STRICT_PLUGINS", "")
    if strict not in ("", "0", "1"):
        raise PluginError(f"AXCORE_STRICT_PLUGINS is {strict!r}, expected '1' or '0'", code="AX206")
    return strict == "1"


_lock = threading.Lock()
_host: PluginHost | None = None


def host(*, check: bool = True) -> PluginHost:
    """Returns the process's plugin host, made on first use with the environment's filters.

    These are ``AXCORE_LOAD_PLUGINS`` and ``AXCORE_DISABLE_PLUGINS`` (names, separated by commas; an
    empty list to load means none) and ``AXCORE_STRICT_PLUGINS`` (``1`` or ``0``).

    Args:
        check: Whether strict mode applies; commands that report on plugins pass False.

    Raises:
        PluginError: ``AXCORE_STRICT_PLUGINS=1`` and a plugin is neither active nor disabled, or
            it is neither ``1`` nor ``0``.
    """
    global _host
    with _lock:
        if _host is None:
            load, disable = _names("AXCORE_LOAD_PLUGINS"), _names("AXCORE_DISABLE_PLUGINS")
            _host = PluginHost(load=load, disable=disable or ())
        found = _host
    if check and _strict():
        found.check_all_active()
    return found


def reset_host(replacement: PluginHost | None = None) -> PluginHost | None:
    """Replaces the process's host and returns the former one; for tests.

    Args:
        replacement: The new host; None makes a fresh one on next use.
    """
    global _host
    with _lock:
        former, _host = _host, replacement
        return former


def switch_off_plugins() -> None:
    """Runs this process and those it starts with core alone: ``--no-plugins``."""
    os.environ["AXCORE_LOAD_PLUGINS"] = ""
    reset_host()
