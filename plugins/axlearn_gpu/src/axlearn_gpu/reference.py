"""The reference implementations of core's ops, as XLA's GPU compiler builds them.

They end the lists of this platform (implementation ``xla_gpu``), so that what is cheap without a
kernel needs no permission; see :func:`axlearn_gpu.supports.xla_attention` for what is not.
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
