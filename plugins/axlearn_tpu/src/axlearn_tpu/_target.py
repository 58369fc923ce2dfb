"""The machine that a kernel is traced for."""

from __future__ import annotations

from axcore.context import current_context

__all__ = ["instance_name"]


def instance_name() -> str:
    """Returns the target instance's name; ``"local"`` outside of a module call."""
    context = current_context()
    target = None if context is None else context.target
    return "local" if target is None else target.instance
