"""One way to run an experiment on a machine, and the modifiers that say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from axcore.config import Config
from axcore.parallel.mesh import MeshShape
from axcore.parallel.modifiers import (
    MeshShapeModifier,
    PipelineModifier,
    RematModifier,
    SequenceParallelModifier,
    SetModifier,
)
from axcore.parallel.rule_file import MeshRules
from axcore.remat import Remat

__all__ = ["Candidate", "RematOption", "rule_text"]


@dataclass(frozen=True)
class RematOption:
    """A way to rematerialize, with a short name for tables.

    Attributes:
        name: Such as ``"save qkv+out"``.
        remat: What is saved, moved and recomputed.
    """

    name: str
    remat: Remat


@dataclass(frozen=True)
class Candidate:
    """One point of the search.

    Attributes:
        mesh: Sizes of the mesh axes, all fixed.
        remat: What the backward pass recomputes; None where the model has no such choice.
        accumulation_steps: Microbatches one after another.
        pipeline_microbatches: Microbatches in the pipeline; 1 without one.
        sequence_parallel: Whether what lies between branches is split over ``model`` too.
        attention: Acceptable implementations of attention, best first, when positions are split
            over ``seq``; empty leaves what the config has.
        quantization: Modifier config of a recipe, with its name; None for none.
    """

    mesh: MeshShape
    remat: RematOption | None
    accumulation_steps: int = 1
    pipeline_microbatches: int = 1
    sequence_parallel: bool = False
    attention: tuple[str, ...] = ()
    quantization: tuple[str, Config] | None = None

    def modifiers(self) -> tuple[Config, ...]:
        """Returns the modifiers that make a config run this way, as a mesh rule holds them."""
        made: list[Config] = [MeshShapeModifier.Config(mesh_shape=self.mesh)]
        if self.mesh.pipeline > 1:
            made.append(PipelineModifier.Config(num_microbatches=self.pipeline_microbatches))
        if self.remat is not None:
            made.append(RematModifier.Config(remat=self.remat.remat))
        if self.sequence_parallel:
            made.append(SequenceParallelModifier.Config())
        values: dict[str, Any] = {"accumulation_steps": self.accumulation_steps}
        if self.attention:
            values["ops.attention.implementations"] = self.attention
        made.append(SetModifier.Config(values=values))
        if self.quantization is not None:
            made.append(self.quantization[1])
        return tuple(made)

    def describe(self) -> str:
        """Returns one line, such as ``fsdp=64 model=8, save qkv+out, 2 microbatches``."""
        parts = [self.mesh.describe()]
        across = dict(self.mesh.across_slices)
        if across:
            parts.append("across " + " ".join(f"{a}={n}" for a, n in across.items()))
        if self.remat is not None:
            parts.append(self.remat.name)
        if self.accumulation_steps > 1:
            parts.append(f"{self.accumulation_steps} microbatches")
        if self.mesh.pipeline > 1:
            parts.append(f"{self.pipeline_microbatches} in the pipeline")
        if self.sequence_parallel:
            parts.append("sequence parallel")
        if self.attention:
            parts.append(f"attention by {self.attention[0]}")
        if self.quantization is not None:
            parts.append(self.quantization[0])
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Returns a plain dictionary."""
        return {
            "mesh": {
                name: getattr(self.mesh, name)
                for name in ("pipeline", "data", "expert", "fsdp", "seq", "model")
            },
            "across_slices": dict(self.mesh.across_slices),
            "remat": None if self.remat is None else self.remat.name,
            "accumulation_steps": self.accumulation_steps,
            "pipeline_microbatches": self.pipeline_microbatches,
            "sequence_parallel": self.sequence_parallel,
            "attention": list(self.attention),
            "quantization": None if self.quantization is None else self.quantization[0],
        }


def rule_text(candidate: Candidate, pattern: str) -> str:
    """Returns a file of rules, as ``--rules`` takes it, that runs a candidate on an instance.

    Args:
        candidate: What to run.
        pattern: Instance names the rule is for.
    """
    return MeshRules.Config(rules=((pattern, candidate.modifiers()),)).to_text()
