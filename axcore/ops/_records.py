"""What selection reports: which implementation serves a site, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from axcore.plugins import OpCall

__all__ = ["KernelChoice", "OpRule", "Refusal"]


@dataclass(frozen=True)
class OpRule:
    """What a run accepts for one op; a value for configs (``ops.attention.fallback``).

    Attributes:
        implementations: Acceptable implementations, best first; empty leaves the choice to the
            kernels' own order.
        fallback: Whether the XLA reference may serve on an accelerator when none of them does.
    """

    implementations: tuple[str, ...] = ()
    fallback: Literal["error", "allow"] = "error"


@dataclass(frozen=True)
class Refusal:
    """An implementation that does not serve a call.

    Attributes:
        implementation: Its name.
        reason: Why, in one line.
    """

    implementation: str
    reason: str


@dataclass(frozen=True)
class KernelChoice:
    """The implementation chosen for one call of an op.

    Attributes:
        site: Path of the module that called, empty outside of a module call.
        op: The op's name.
        chosen: The implementation that runs.
        refused: Better-placed implementations that do not serve the call.
        call: The call as kernels saw it.
        fallback: Whether ``chosen`` stands below the target's acceptable list.
        stand_in: What is traced in place of ``chosen``, for a compiler that cannot build it.
        absent: Why ``chosen`` cannot be imported where the program was traced; it can only run
            where that is installed.
    """

    site: str
    op: str
    chosen: str
    refused: tuple[Refusal, ...]
    call: OpCall
    fallback: bool = False
    stand_in: str | None = None
    absent: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON object of ``axcore kernels explain`` and of ``report.json``."""
        return {
            "site": self.site,
            "op": self.op,
            "chosen": self.chosen,
            "fallback": self.fallback,
            "absent": self.absent,
            "refused": [
                {"implementation": r.implementation, "reason": r.reason} for r in self.refused
            ],
        }
