"""From the name stack of an equation to a module path and a phase."""

from __future__ import annotations

import functools
import re
from typing import Any

from axcore.parallel.cost._records import Phase

__all__ = ["scope_text", "split_scope"]

# jvp(decoder), transpose(jvp(decoder)), vmap(), jit(f): what is inside is the scope.
_TRANSFORM = re.compile(r"[A-Za-z_]\w*\(([^()]*)\)")
# The backward pass of what was recomputed names its scope twice.
_TWICE = re.compile(r"transpose\(jvp\(([^()]*)\)\)/jvp\(\1\)")
_MARKS = frozenset(
    {"rematted_computation", "checkpoint", "remat", "shard_map", "while", "body", "cond", ""}
)


def scope_text(equation: Any) -> str:
    """Returns the name stack of an equation, ``""`` where JAX keeps none.

    It is an attribute of ``jax.extend.core.JaxprEqn``; inside a loop or call it starts anew.
    """
    info = getattr(equation, "source_info", None)
    return str(getattr(info, "name_stack", ""))


@functools.cache
def split_scope(text: str) -> tuple[str, Phase]:
    """Returns the module path and the phase of a name stack.

    Example:
        >>> split_scope("transpose(jvp(decoder))/layer/rematted_computation/0:2:1/attention")
        ('decoder/layer/0:2:1/attention', 'recompute')
    """
    phase: Phase = "other"
    if "rematted_computation" in text:
        phase = "recompute"
    elif "transpose(" in text:
        phase = "backward"
    elif "jvp(" in text:
        phase = "forward"
    bare, found = _TWICE.sub(r"\1", text), 1
    while found:
        bare, found = _TRANSFORM.subn(r"\1", bare)
    return "/".join(part for part in bare.split("/") if part not in _MARKS), phase
