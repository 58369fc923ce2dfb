"""The machine that a kernel is traced for."""

from __future__ import annotations

from axcore.ops import ambient_target

__all__ = ["instance_name"]


def instance_name() -> str:
    """Returns the target instance's name; ``"local"`` where there is no target."""
    target = ambient_target()
    return "local" if target is None else target.instance
