"""Where the pure-XLA implementation of every op is."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

from axcore.errors import OpError, did_you_mean

__all__ = ["REFERENCE", "REFERENCES", "reference"]

#: Name of the pure-XLA implementation that every op has.
REFERENCE = "xla"

#: op -> target of its reference implementation.
REFERENCES: Mapping[str, str] = {
    "attention": "axcore.ops._attention._xla:attention_xla",
    "paged_attention": "axcore.ops._paged_attention:paged_attention_xla",
    "rms_norm": "axcore.ops._norms:rms_norm_xla",
    "add_rms_norm": "axcore.ops._norms:add_rms_norm_xla",
    "layer_norm": "axcore.ops._norms:layer_norm_xla",
    "rotary": "axcore.ops._rotary:rotary_xla",
    "gated_activation": "axcore.ops._activation:gated_activation_xla",
    "linear_cross_entropy": "axcore.ops._linear_cross_entropy._xla:linear_cross_entropy_xla",
    "grouped_matmul": "axcore.ops._grouped_matmul:grouped_matmul_xla",
    "all_gather_matmul": "axcore.ops._collective_matmul:all_gather_matmul_xla",
    "matmul_reduce_scatter": "axcore.ops._collective_matmul:matmul_reduce_scatter_xla",
}


@functools.cache
def reference(op: str) -> Callable[..., Any]:
    """The pure-XLA implementation of ``op``: what every kernel is compared with.

    Raises:
        OpError: There is no such op.
    """
    if op not in REFERENCES:
        raise OpError(
            f"no op named {op!r}; known: {', '.join(REFERENCES)}",
            code="AX404",
            hint=did_you_mean(op, REFERENCES) or None,
        )
    module, _, name = REFERENCES[op].partition(":")
    return cast("Callable[..., Any]", getattr(importlib.import_module(module), name))
