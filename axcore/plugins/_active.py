"""What acts on an instance, and which rule wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from axcore.config import FrozenMapping
from axcore.errors import PluginError, PluginLookupError

from .registry import load_target
from .specs import CompilerOptionSpec, InstanceTypeSpec, KernelSpec, MeshRuleSpec, specificity


@dataclass(frozen=True, kw_only=True)
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

        ranks = {n: (specificity(r.pattern), len(r.traits)) for n, r in fitting.items()}
        best = sorted(name for name, rank in ranks.items() if rank == max(ranks.values()))
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
            first, value = chosen.setdefault(option.key, (name, option.value))
            if (type(value), value) != (type(option.value), option.value):
                raise PluginError(
                    f"compiler option {option.key!r} is {value!r} by {first} and "
                    f"{option.value!r} by {name}",
                    code="AX209",
                    where=self.instance,
                    hint="take one of the distributions out of use",
                )
        return FrozenMapping({key: value for key, (_, value) in chosen.items()})
