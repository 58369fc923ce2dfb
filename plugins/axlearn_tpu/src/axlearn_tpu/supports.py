"""What the kernels of this package serve: reasons why not, without JAX."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from axcore.ops.masks import Causal, Full, PrefixLM, SegmentIds, SlidingWindow, TracedWindow
from axcore.ops.refusals import blockwise_attention, many_queries
from axlearn_tpu._block_sizes import LANES, MAX_HEAD_DIM

if TYPE_CHECKING:
    from axcore.plugins import OpCall

__all__ = ["megablox", "paged_attention", "splash"]

#: Rows that each group must have on average: half a tile's, or most of the work is for nothing.
_MIN_ROWS = 64

#: Page table entries that scalar memory holds beside what else a kernel keeps there.
_MAX_TABLE = 128 * 1024

_FLOATS = ("bfloat16", "float32")


def splash(call: OpCall) -> str | None:
    """Why splash attention cannot serve the call, or None."""
    if (reason := many_queries(call)) is not None:
        return reason
    if call.shapes["q"][1] < LANES:
        return f"works in tiles of {LANES} queries, got {call.shapes['q'][1]}"
    if (reason := blockwise_attention(call, dtypes=_FLOATS, without=("bias",))) is not None:
        return reason
    widest = max(call.shapes[name][3] for name in ("q", "v"))
    if widest > MAX_HEAD_DIM:
        return f"has tiles for head dims up to {MAX_HEAD_DIM}, got {widest}"
    for part in (call.mask or Full()).parts():
        if isinstance(part, TracedWindow):
            return (
                "compiles a fixed window, got a traced one; a stack whose period holds a layer of "
                "each window has fixed ones"
            )
        if isinstance(part, PrefixLM) and part.length is None:
            return "compiles a fixed prefix, got one for each sequence"
        if not isinstance(part, Full | Causal | SlidingWindow | PrefixLM | SegmentIds):
            return f"does not know the mask {part}"
    return None


def megablox(call: OpCall) -> str | None:
    """Why the grouped product of megablox cannot serve the call, or None."""
    dtypes = {call.dtypes[name] for name in ("rows", "weights")}
    if not dtypes <= set(_FLOATS):
        return f"is for {' or '.join(_FLOATS)}, got {sorted(dtypes)}"
    rows = call.device_shapes["rows"][0]
    groups = call.device_shapes["weights"][0]
    if rows < groups * _MIN_ROWS:
        return (
            f"works in tiles of {_MIN_ROWS} rows of one group at least, got {rows} rows in "
            f"{groups} groups"
        )
    return None


def paged_attention(call: OpCall) -> str | None:
    """Why the paged attention kernel cannot serve the call, or None."""
    if call.options.get("window") is not None:
        return f"has no window, got {call.options['window']}"
    if "sinks" in call.shapes:
        return "has no sinks"
    keys, values = call.device_shapes["k_pages"], call.device_shapes["v_pages"]
    if keys != values:
        return f"is for values of the keys' shape {keys}, got {values}"
    if keys[-1] % LANES:
        return f"is for head dims that are multiples of {LANES}, got {keys[-1]}"
    dtypes = {call.dtypes[name] for name in ("k_pages", "v_pages")}
    if dtypes != {"bfloat16"} or call.dtypes["q"] not in _FLOATS:
        return f"computes with bfloat16 pages, got {sorted(dtypes)} and q {call.dtypes['q']}"
    entries = math.prod(call.device_shapes["page_table"])
    if entries > _MAX_TABLE:
        return (
            f"keeps the page table in scalar memory, up to {_MAX_TABLE} entries, got {entries}; "
            "larger pages need fewer"
        )
    return None
