"""The record of one installed plugin: what it is, whether it works, and if not, why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .specs import NOTHING

Status = Literal["active", "failed", "invalid", "incompatible", "conflicting", "disabled"]


@dataclass(frozen=True, kw_only=True)
class PluginRecord:
    """What the host knows about one entry point.

    Attributes:
        distribution: Normalized name of the distribution.
        version: Its version.
        name: The entry point's name.
        status: ``active``; ``failed`` (raised at import or in a hook); ``invalid`` (breaks the
            rules of the host); ``incompatible`` (wants another core); ``conflicting`` (a name
            that another distribution has too); ``disabled`` (by a filter).
        reason: Why it is not active; empty when it is.
        provides: Kind -> names of what it provides (of what it would provide if conflicting).
        error: The original exception, if there was one.
    """

    distribution: str
    version: str
    name: str
    status: Status
    reason: str = ""
    provides: Mapping[str, tuple[str, ...]] = NOTHING
    error: BaseException | None = field(default=None, compare=False, repr=False)

    @property
    def label(self) -> str:
        """The distribution, with the entry point's name where that differs."""
        same = self.name == self.distribution
        return self.distribution if same else f"{self.distribution} ({self.name})"

    def to_json(self) -> dict[str, Any]:
        """Returns the JSON object of ``axcore plugins list --json``."""
        names = ("distribution", "version", "name", "status", "reason")
        provides = {kind: list(given) for kind, given in sorted(self.provides.items())}
        return {**{name: getattr(self, name) for name in names}, "provides": provides}
