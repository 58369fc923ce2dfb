"""Fitting an experiment to a machine: the instance's rule, the experiment's own, the user's.

Order: the plugin's rule, then the experiment's ``mesh_rules``, then the user's ``--rules``; a later
one wins. None of them changes what a config file, a modifier flag or ``--set`` has set.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from axcore.config import Config, Event, apply_modifier, author, diff
from axcore.errors import ConfigError, PluginError, PluginLookupError, ShardingError
from axcore.ops import REFERENCE, OpRule
from axcore.parallel.instances import resolve_instance
from axcore.parallel.traits import Traits, compute_traits
from axcore.plugins import ActiveSet, Instance, host, pattern_matches, specificity
from axcore.quantization import check_instance, is_quantized

__all__ = [
    "AppliedOption",
    "AppliedRule",
    "Kept",
    "RuleChange",
    "RuleReport",
    "apply_instance_rules",
]

C = TypeVar("C", bound=Config)
MeshRules = Sequence[tuple[str, Config | Sequence[Config]]]
_FLAG = "--modifier"  # authors of modifiers given as flags are named "--modifier NAME"


@dataclass(frozen=True)
class RuleChange:
    """One value that a rule changed; values are config text, None for a path that is not there.

    Attributes:
        path: Config path.
        old: Before.
        new: After.
        rule: Name of the rule.
    """

    path: str
    old: str | None
    new: str | None
    rule: str


@dataclass(frozen=True)
class Kept:
    """One value that a rule left alone.

    Attributes:
        path: Config path.
        value: What it stays, as config text.
        wanted: What the rule would have made of it.
        rule: Name of the rule.
        set_by: Who set it.
    """

    path: str
    value: str | None
    wanted: str | None
    rule: str
    set_by: Event


@dataclass(frozen=True)
class AppliedRule:
    """A rule that was applied.

    Attributes:
        name: ``DISTRIBUTION:NAME``, ``mesh_rules[PATTERN]`` or ``--rules[PATTERN]``.
        plugin: The distribution, or None for the experiment's and the user's own.
        pattern: The instances it is for.
        reason: Why, in its author's words; empty for the experiment's and the user's own.
    """

    name: str
    plugin: str | None
    pattern: str
    reason: str = ""


@dataclass(frozen=True)
class AppliedOption:
    """A compiler option that comes with the instance.

    Attributes:
        name: ``DISTRIBUTION:NAME``.
        key: The option.
        value: Its value.
        reason: Why, in its author's words.
    """

    name: str
    key: str
    value: bool | int | float | str
    reason: str


@dataclass(frozen=True)
class RuleReport:
    """What fitting an experiment to an instance did.

    Attributes:
        instance: Name of the instance.
        traits: What the rules could know of the experiment.
        rules: The rules, in the order applied.
        changes: What they changed.
        kept: What they left alone.
        compiler_options: Options of the active distributions; those that the config already had
            otherwise are in ``kept``.
        options: The same with who says so and why.
        distributions: Distributions whose rules, options and kernels are active.
        candidates: What others have for the instance, as (kind, ``DISTRIBUTION:NAME``); active
            with ``use``.
    """

    instance: str
    traits: Traits
    rules: tuple[AppliedRule, ...]
    changes: tuple[RuleChange, ...]
    kept: tuple[Kept, ...]
    compiler_options: Mapping[str, bool | int | float | str]
    options: tuple[AppliedOption, ...]
    distributions: tuple[str, ...]
    candidates: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        return {
            "instance": self.instance,
            "traits": self.traits.to_json(),
            "rules": [dataclasses.asdict(rule) for rule in self.rules],
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "kept": [{**dataclasses.asdict(k), "set_by": k.set_by.to_json()} for k in self.kept],
            "compiler_options": dict(self.compiler_options),
            "options": [dataclasses.asdict(option) for option in self.options],
            "distributions": list(self.distributions),
            "candidates": [list(candidate) for candidate in self.candidates],
        }


def apply_instance_rules(
    cfg: C,
    instance: Instance | str,
    use: Iterable[str] | None = None,
    *,
    rules: MeshRules = (),
) -> tuple[C, RuleReport]:
    """Returns an experiment fitted to an instance, and what that did; ``cfg`` stays as it is.

    Args:
        cfg: A trainer's config, with all edits of files and flags made.
        instance: The instance, or its name.
        use: Distributions to draw on beside the instance's own; None takes ``cfg.use``.
        rules: The user's own rules, as ``cfg.mesh_rules``: (pattern, modifier configs).

    Raises:
        PluginLookupError: No rule fits the instance, not even one of the experiment or the user.
        PluginError: Two rules fit equally well, or two options disagree.
        ConfigError: A rule does not apply to this config, or removes what a flag had set.
    """
    name = instance if isinstance(instance, str) else instance.name
    own = tuple(cfg.mesh_rules) if "mesh_rules" in cfg.fields() else ()  # pyright: ignore[reportAttributeAccessIssue]
    if use is None:
        use = cfg.use if "use" in cfg.fields() else ()  # pyright: ignore[reportAttributeAccessIssue]
    active = host().active_for(name, use)
    traits = compute_traits(cfg)
    steps: list[tuple[AppliedRule, tuple[Config, ...]]] = []
    own_steps = [*_own_step(own, name, "mesh_rules"), *_own_step(rules, name, "--rules")]
    held = {t for rule in active.mesh_rules.values() for t in rule.traits if traits.holds(t)}
    try:
        found, spec = active.mesh_rule(held | traits.tags)
    except PluginLookupError:
        if not own_steps:
            raise
    else:
        applied = AppliedRule(found, found.partition(":")[0], spec.pattern, spec.reason)
        steps.append((applied, _modifiers(active.load_mesh_rule(found), traits, instance, found)))
    changes: list[RuleChange] = []
    kept: list[Kept] = []
    for applied, modifiers in [*steps, *own_steps]:
        for modifier in modifiers:
            before = cfg
            cfg = apply_modifier(
                cfg, modifier, kind="rule", name=applied.name, plugin=applied.plugin
            )
            cfg, left = _restore(before, cfg, applied)
            kept += left
            changes += [
                RuleChange(path, old, new, applied.name)
                for path, (old, new) in diff(before, cfg).items()
            ]
    options = active.options()
    if options and "compiler_options" in cfg.fields():
        cfg, option_changes, option_kept = _add_options(cfg, options, name)
        changes += option_changes
        kept += option_kept
    if "ops" in cfg.fields():
        cfg, kernel_changes = _add_kernels(cfg, active, name)
        changes += kernel_changes
    if is_quantized(cfg):
        check_instance(cfg, resolve_instance(name) if isinstance(instance, str) else instance)
    report = RuleReport(
        instance=name,
        traits=traits,
        rules=tuple(applied for applied, _ in [*steps, *own_steps]),
        changes=tuple(changes),
        kept=tuple(kept),
        compiler_options=options,
        options=tuple(
            AppliedOption(full_name, option.key, option.value, option.reason)
            for full_name, option in sorted(active.compiler_options.items())
        ),
        distributions=active.distributions,
        candidates=active.candidates,
    )
    return cfg, report


def _own_step(
    rules: MeshRules, instance: str, source: str
) -> list[tuple[AppliedRule, tuple[Config, ...]]]:
    """Returns the most specific of the rules that match, if any."""
    fitting = [(p, m) for p, m in rules if pattern_matches(p, instance)]
    if not fitting:
        return []
    top = max(specificity(pattern) for pattern, _ in fitting)
    best = [(p, m) for p, m in fitting if specificity(p) == top]
    if len(best) > 1:
        raise ShardingError(
            f"rules {' and '.join(repr(p) for p, _ in best)} fit {instance!r} equally well",
            code="AX464",
            where=source,
            hint="make one more specific",
        )
    pattern, modifiers = best[0]
    applied = AppliedRule(f"{source}[{pattern}]", None, pattern)
    return [(applied, (modifiers,) if isinstance(modifiers, Config) else tuple(modifiers))]


def _modifiers(
    target: object, traits: Traits, instance: Instance | str, name: str
) -> tuple[Config, ...]:
    """Returns the modifiers that a rule's target stands for."""
    value: Any = target
    if callable(value) and not isinstance(value, Config):
        wanted = len(inspect.signature(value).parameters)
        if wanted > 1 and isinstance(instance, str):
            instance = resolve_instance(instance)
        value = value(*(traits, instance)[:wanted])
    modifiers = (value,) if isinstance(value, Config) else value
    if not isinstance(modifiers, Sequence) or not all(isinstance(m, Config) for m in modifiers):
        raise PluginError(
            f"mesh rule {name!r} gives {modifiers!r}, expected modifier configs",
            code="AX208",
            hint="its target is a modifier config, a tuple of them, or a function of the traits "
            "and the instance returning either",
        )
    return tuple(modifiers)


def _restore(before: C, after: C, rule: AppliedRule) -> tuple[C, list[Kept]]:
    """Puts back what a rule may not change."""
    kept: list[Kept] = []
    done: list[str] = []
    for path, (old, new) in sorted(diff(before, after).items(), key=lambda p: p[0].count(".")):
        if not path or old is None or any(path.startswith(f"{d}.") for d in done):
            continue
        event = _protector(before, path)
        if event is None:
            continue
        kept.append(Kept(path, old, new, rule.name, event))
        done.append(path)
        try:
            with author(event.kind, event.name, event.plugin):
                after.set_path(path, before.get_path(path))
        except ConfigError as error:
            raise ConfigError(
                f"{path} was set by {event} to {old}, and rule {rule.name} leaves no such path",
                code="AX114",
                where=path,
                hint=f"leave the setting out, or keep what it belongs to with a rule of your own; "
                f"{error.message}",
            ) from error
    return after, kept


def _protector(cfg: Config, path: str) -> Event | None:
    """Returns the file, modifier flag or flag that set a value or a part of it, or None."""
    for inner in _with_parts(path, cfg.get_path(path)):
        event = cfg.set_by(inner)
        if event.kind in ("file", "flag") or (
            event.kind == "modifier" and event.name.startswith(_FLAG)
        ):
            return event
    return None


def _with_parts(path: str, value: Any) -> Iterator[str]:
    """Yields a path and the paths of what is inside its value, but not inside configs."""
    yield path
    if isinstance(value, Config):
        return
    parts: Iterable[tuple[str, Any]] = ()
    if dataclasses.is_dataclass(value):
        parts = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
    elif isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple):
        parts = [(str(i), part) for i, part in enumerate(value)]
    for name, part in parts:
        yield from _with_parts(f"{path}.{name}", part)


def _add_options(
    cfg: C, options: Mapping[str, Any], instance: str
) -> tuple[C, list[RuleChange], list[Kept]]:
    """Adds compiler options; those that the config already has stay."""
    before = cfg
    current = dict(cfg.compiler_options)  # pyright: ignore[reportAttributeAccessIssue]
    name = f"compiler options of {instance}"
    kept = [
        Kept(
            f"compiler_options.{key}",
            repr(current[key]),
            repr(value),
            name,
            cfg.set_by(f"compiler_options.{key}"),
        )
        for key, value in options.items()
        if key in current and current[key] != value
    ]
    cfg = cfg.copy()
    with author("rule", name):
        cfg.set(compiler_options={**options, **current})
    changes = [RuleChange(p, old, new, name) for p, (old, new) in diff(before, cfg).items()]
    return cfg, changes, kept


def _add_kernels(cfg: C, active: ActiveSet, instance: str) -> tuple[C, list[RuleChange]]:
    """Writes the active kernels of each op into the config, in their own order of preference.

    Lists that anyone has stated stay. The reference is never listed: where it may serve is said by
    the platform and by ``fallback``.
    """
    before, name = cfg, f"kernels of {instance}"
    listed: dict[str, tuple[str, ...]] = {}
    for kernel in active.kernels:
        # To communicate is a strategy: nobody gets it by installing something.
        if kernel.implementation != REFERENCE and not kernel.communicates:
            listed[kernel.op] = (*listed.get(kernel.op, ()), kernel.implementation)
    rules: Mapping[str, OpRule] = cfg.ops  # pyright: ignore[reportAttributeAccessIssue]
    missing = [op for op in listed if not rules.get(op, OpRule()).implementations]
    if not missing:
        return cfg, []
    cfg = cfg.copy()
    with author("rule", name):
        for op in missing:
            if op in rules:
                cfg.set_path(f"ops.{op}.implementations", listed[op])
            else:
                # From the config as it is by now: others have been set in it.
                cfg.set(ops={**cfg.ops, op: OpRule(listed[op])})  # pyright: ignore[reportAttributeAccessIssue]
    return cfg, [RuleChange(p, old, new, name) for p, (old, new) in diff(before, cfg).items()]
