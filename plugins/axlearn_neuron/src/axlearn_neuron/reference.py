"""The reference implementations of core's ops, as the vendor's compiler builds them.

They end the lists of this platform (implementation ``xla_neuron``) and serve what no kernel is for;
never in place of a kernel that is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axcore import ops

__all__: list[str] = []


def __getattr__(op: str) -> Callable[..., Any]:
    if op.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {op!r}")
    return ops.reference(op)
