"""The reference implementations of core's ops, as XLA's TPU compiler builds them.

They end the lists of this platform (implementation ``xla_tpu``), so that what needs no kernel needs
no permission; see :func:`axlearn_tpu.supports.xla_attention` for what does.
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
