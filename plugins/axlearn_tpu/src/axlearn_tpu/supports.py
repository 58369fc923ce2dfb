"""What the kernels of this package serve: reasons why not, without JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from axcore.ops.masks import Causal, Full, PrefixLM, SegmentIds, SlidingWindow, TracedWindow

if TYPE_CHECKING:
    from axcore.plugins import OpCall

__all__ = ["SHORT", "splash", "xla_attention"]

#: Keys from which on attention must be a kernel's: the reference then runs in chunks.
SHORT = 2048

_FLOATS = ("bfloat16", "float32")


def splash(call: OpCall) -> str | None:
    """Why splash attention cannot serve the call, or None."""
    if call.purpose == "decode":
        return "is for many queries: decoding has one of each sequence"
    if call.view is not None:
        return f"reads no key/value cache (a {call.view!r} view)"
    if "bias" in call.shapes:
        return f"takes no bias array {call.shapes['bias']}"
    if call.options.get("dot_general") == "replaced":
        return "its products cannot be replaced: it computes them blockwise"
    dtypes = {call.dtypes[name] for name in ("q", "k", "v")}
    if len(dtypes) > 1 or not dtypes <= set(_FLOATS):
        return f"is for q, k and v of one dtype, {' or '.join(_FLOATS)}, got {sorted(dtypes)}"
    mask = call.mask if call.mask is not None else Full()
    for part in mask.parts():
        if isinstance(part, TracedWindow):
            return (
                "compiles a fixed window, got a traced one; a stack whose period holds a layer of "
                "each window has fixed ones"
            )
        if isinstance(part, PrefixLM) and part.length is None:
            return "compiles a fixed prefix, got one for each sequence"
        if not isinstance(part, Full | Causal | SlidingWindow | PrefixLM | SegmentIds):
            return f"does not know the mask {part}"
    if mask.uses_positions and ("q_positions" in call.shapes or "kv_positions" in call.shapes):
        return "takes positions for indices, got positions"
    return None


def xla_attention(call: OpCall) -> str | None:
    """Why XLA's own attention is not good enough for the call, or None.

    It is where logits are few, because a call is short or has a query of each sequence. Reading a
    cache is accepted at any length, since no kernel here reads one for many queries: the reference
    then scans chunks of queries.
    """
    keys = call.shapes["k"][1]
    if call.purpose == "decode" or call.view is not None or keys < SHORT:
        return None
    return f"is for fewer than {SHORT} keys and for caches, got {keys} keys"
