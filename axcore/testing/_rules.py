"""For tests of mesh rules: what a rule makes of traits alone, and what must come of experiments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from axcore.config import Config
from axcore.parallel import (
    MeshShape,
    MeshShapeModifier,
    RematModifier,
    SetModifier,
    Traits,
    resolve_instance,
)
from axcore.plugins import Instance
from axcore.remat import Remat

__all__ = ["DENSE_7B", "DENSE_70B", "FitCase", "RuleChoices", "apply_rule"]

#: Dense models of 7 and 70 billion parameters in float32, 1,024 rows of 4,096 tokens.
DENSE_7B = Traits(
    num_parameters=7 * 10**9,
    parameter_bytes=28 * 10**9,
    seq_len=4096,
    batch_size=1024,
    num_layers=32,
    embed_dim=4096,
    tensor_parts=32,
    rematerializes=True,
)
DENSE_70B = Traits(
    num_parameters=70 * 10**9,
    parameter_bytes=280 * 10**9,
    seq_len=4096,
    batch_size=1024,
    num_layers=80,
    embed_dim=8192,
    tensor_parts=64,
    rematerializes=True,
)


class RuleChoices(NamedTuple):
    """What a mesh rule chose.

    Attributes:
        mesh_shape: The mesh.
        remat: What every stack recomputes, or None where the rule leaves that alone.
        accumulation_steps: Microbatches of a step.
    """

    mesh_shape: MeshShape
    remat: Remat | Mapping[str, Remat] | None
    accumulation_steps: int


def apply_rule(
    rule: Callable[[Traits, Instance], Iterable[Config]], traits: Traits, instance: str
) -> RuleChoices:
    """Returns what a rule makes of traits on a machine, without any experiment.

    Args:
        rule: A mesh rule, as ``MeshRuleSpec.target`` names it.
        traits: The model's.
        instance: The machine's name.

    Example:
        ```python
        def test_parameters_are_sharded_over_the_host():
            assert apply_rule(rules.a1, DENSE_7B, "acme-a1-8").mesh_shape == MeshShape(fsdp=-1)
        ```
    """
    chosen = RuleChoices(MeshShape(), None, 1)
    for modifier in rule(traits, resolve_instance(instance)):
        if isinstance(modifier, MeshShapeModifier.Config):
            chosen = chosen._replace(mesh_shape=MeshShape.of(modifier.mesh_shape))
        elif isinstance(modifier, RematModifier.Config):
            chosen = chosen._replace(remat=modifier.remat)
        elif isinstance(modifier, SetModifier.Config):
            steps = modifier.values.get("accumulation_steps", chosen.accumulation_steps)
            chosen = chosen._replace(accumulation_steps=steps)
    return chosen


@dataclass(frozen=True)
class FitCase:
    """An experiment that the rules of a machine must fit to it, and what comes of it.

    Attributes:
        experiment: Its name.
        instance: The machine's name.
        rule: Name of the distribution's mesh rule that applies, such as ``a1``.
        mesh: Sizes of the mesh axes that matter; the others may be anything.
        remat: The policy of all layers that say what they recompute.
        accumulation_steps: Microbatches of a step.
        sets: ``path=value`` flags.
        requires: Packages that the experiment comes from; the case is skipped where one is absent.
    """

    experiment: str
    instance: str
    rule: str
    mesh: Mapping[str, int]
    remat: str
    accumulation_steps: int = 1
    sets: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For reports: the experiment and its machine."""
        return f"{self.experiment} on {self.instance}"
