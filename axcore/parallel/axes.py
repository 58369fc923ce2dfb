"""The names of dims: logical axes that layers use, and mesh axes that devices are arranged in.

A layer names its dims (``embed``, ``mlp``, ...), a mesh names its own (``fsdp``, ``model``, ...),
and rules map the former to the latter. A package whose layer needs a name of its own declares it
with a parent, whose rules then hold for it too:

    EXPERT_MLP = Axis("expert_mlp", like="mlp")
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from axcore.errors import ShardingError, did_you_mean

__all__ = ["LOGICAL_AXES", "MESH_AXES", "Axis", "AxisRule", "axis_line"]

MESH_AXES: tuple[str, ...] = ("pipeline", "data", "expert", "fsdp", "seq", "model")
"""Mesh axes from the slowest network to the fastest: later ones get nearer neighbours."""

AxisRule = tuple[str, ...] | tuple[tuple[str, ...], ...]
"""Mesh axes a dim is split over, ``("data", "fsdp")``; ``()`` for none; or alternatives, of which
the first that fits is taken, ``(("model",), ())``."""


@dataclass(frozen=True)
class Axis:
    """A logical axis. Making one declares it; a second, equal one is the same axis.

    Attributes:
        name: An identifier, unique among packages.
        like: Parent axis: its rules hold for this one where no table names this one.
        rule: Own rule in place of the parent's, in every table, until a table says otherwise.
        description: What a dim of this name runs over.

    Raises:
        ShardingError: The name is no identifier or is declared differently, or the parent is
            unknown.
    """

    name: str
    like: str | None = None
    rule: AxisRule | None = None
    description: str = ""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ShardingError(f"logical axis {self.name!r} is not an identifier", code="AX451")
        if self.like is not None and self.like not in _AXES:
            raise ShardingError(
                f"logical axis {self.name!r} is like {self.like!r}, which is unknown; "
                f"known: {', '.join(_AXES)}",
                code="AX451",
                hint=did_you_mean(self.like, _AXES) or "declare the parent first",
            )
        with _LOCK:
            first = _AXES.setdefault(self.name, self)
        if (first.like, first.rule) != (self.like, self.rule):
            raise ShardingError(
                f"logical axis {self.name!r} is declared twice: like={first.like!r}, "
                f"rule={first.rule!r} and like={self.like!r}, rule={self.rule!r}",
                code="AX451",
                hint="give one of them a name that starts with its package",
            )


_LOCK = threading.Lock()
_AXES: dict[str, Axis] = {}
LOGICAL_AXES: Mapping[str, Axis] = MappingProxyType(_AXES)
"""Axis name -> declaration, core's and those of the packages imported so far."""

for _name, _description in {
    "batch": "rows of the global batch",
    "seq": "positions in a sequence",
    "embed": "the model dimension",
    "mlp": "hidden units of a feed-forward layer",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "components of one head",
    "vocab": "tokens of the vocabulary",
    "experts": "experts of a mixture",
    "layers": "stacked layers",
    "lora_rank": "the inner dimension of a low-rank adapter",
}.items():
    Axis(_name, description=_description)
Axis("residual_seq", like="seq", description="positions between the branches of a layer")


def axis_line(name: str) -> tuple[Axis, ...]:
    """Returns the axis and its ancestors, nearest first; empty when nobody declared it."""
    line: list[Axis] = []
    next_name: str | None = name
    while next_name is not None and next_name in _AXES:
        line.append(_AXES[next_name])
        next_name = line[-1].like
    return tuple(line)
