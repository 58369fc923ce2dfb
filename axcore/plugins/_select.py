"""Which rules, options and kernels act on an instance, and which rule wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from axcore.config import FrozenMapping
from axcore.errors import PluginError, PluginLookupError

from .registry import Registry, load_target
from .specs import (
    CompilerOptionSpec,
    InstanceTypeSpec,
    KernelSpec,
    MeshRuleSpec,
    pattern_matches,
    specificity,
)


@dataclass(frozen=True)
class ActiveSet:
    """What acts on one instance.

    Attributes:
        instance: The instance's name.
        instance_type: The instance type that covers it.
        distributions: Those whose rules, options and kernels are active, sorted.
        mesh_rules: "DISTRIBUTION:NAME" -> active rule that matches the instance.
        compiler_options: "DISTRIBUTION:NAME" -> active option that matches the instance.
        kernels: Active kernels for the platform; by op, then highest priority, then name.
        candidates: What other distributions provide for it, as ("kind", "DISTRIBUTION:NAME").
    """

    instance: str
    instance_type: InstanceTypeSpec
    distributions: tuple[str, ...]
    mesh_rules: Mapping[str, MeshRuleSpec]
    compiler_options: Mapping[str, CompilerOptionSpec]
    kernels: tuple[KernelSpec, ...]
    candidates: tuple[tuple[str, str], ...]

    @property
    def platform(self) -> str:
        """The JAX platform of the instance."""
        return self.instance_type.platform

    def kernels_for(self, op: str) -> tuple[KernelSpec, ...]:
        """Returns the active kernels of ``op``, the preferred first."""
        return tuple(k for k in self.kernels if k.op == op)

    def mesh_rule(self, traits: Iterable[str] = ()) -> tuple[str, MeshRuleSpec]:
        """Returns the most specific active rule whose traits all hold, with its full name.

        More literal characters of the pattern are more specific, then more traits.

        Args:
            traits: The experiment's traits.

        Raises:
            PluginError: Two rules are equally specific.
            PluginLookupError: No rule applies.
        """
        held = frozenset(traits)
        fitting = {n: r for n, r in self.mesh_rules.items() if held.issuperset(r.traits)}
        if not fitting:
            raise PluginLookupError(
                f"no mesh rule for instance {self.instance!r} with traits {sorted(held)}; "
                f"active: {', '.join(self.mesh_rules) or 'none'}",
                code="AX208",
                hint="name a distribution that has one with --use, or pass --rules",
            )

        def rank(rule: MeshRuleSpec) -> tuple[int, int]:
            return (specificity(rule.pattern), len(rule.traits))

        top = max(rank(rule) for rule in fitting.values())
        best = sorted(name for name, rule in fitting.items() if rank(rule) == top)
        if len(best) > 1:
            raise PluginError(
                f"mesh rules {' and '.join(best)} fit instance {self.instance!r} equally well",
                code="AX208",
                hint="make one more specific, or take one distribution out of use",
            )
        return best[0], fitting[best[0]]

    def load_mesh_rule(self, name: str) -> object:
        """Imports the target of the rule called ``name``: modifiers, or a function giving them."""
        return load_target(self.mesh_rules[name].target, where=f"mesh rule {name!r}")

    def options(self) -> Mapping[str, bool | int | float | str]:
        """Returns compiler option -> value.

        Raises:
            PluginError: Two active options give one key different values.
        """
        chosen: dict[str, tuple[str, bool | int | float | str]] = {}
        for name, option in sorted(self.compiler_options.items()):
            first = chosen.setdefault(option.key, (name, option.value))
            if (type(first[1]), first[1]) != (type(option.value), option.value):
                raise PluginError(
                    f"compiler option {option.key!r} is {first[1]!r} by {first[0]} and "
                    f"{option.value!r} by {name}",
                    code="AX209",
                    where=self.instance,
                    hint="take one of the distributions out of use",
                )
        return FrozenMapping({key: value for key, (_, value) in chosen.items()})


def select_active(
    instance: str,
    instance_type: InstanceTypeSpec,
    distributions: frozenset[str],
    *,
    mesh_rules: Registry[MeshRuleSpec],
    compiler_options: Registry[CompilerOptionSpec],
    kernels: Registry[KernelSpec],
) -> ActiveSet:
    """Splits what fits ``instance`` into what acts and what is only a candidate.

    Args:
        instance: The instance's name.
        instance_type: The type that covers it.
        distributions: Those that act.
        mesh_rules: All rules.
        compiler_options: All options.
        kernels: All kernels.
    """
    candidates: list[tuple[str, str]] = []

    def acts(kind: str, name: str, owner: str) -> bool:
        if owner not in distributions:
            candidates.append((kind, name))
        return owner in distributions

    rules = {
        name: rule
        for name, rule, owner in mesh_rules.items()
        if pattern_matches(rule.pattern, instance) and acts("mesh_rules", name, owner)
    }
    options = {
        name: option
        for name, option, owner in compiler_options.items()
        if pattern_matches(option.pattern, instance) and acts("compiler_options", name, owner)
    }
    active = [
        kernel
        for name, kernel, owner in kernels.items()
        if kernel.runs_on(instance_type.platform) and acts("kernels", f"{owner}:{name}", owner)
    ]
    active.sort(key=lambda k: (k.op, -k.priority, k.name))
    return ActiveSet(
        instance=instance,
        instance_type=instance_type,
        distributions=tuple(sorted(distributions)),
        mesh_rules=FrozenMapping(rules),
        compiler_options=FrozenMapping(options),
        kernels=tuple(active),
        candidates=tuple(candidates),
    )
