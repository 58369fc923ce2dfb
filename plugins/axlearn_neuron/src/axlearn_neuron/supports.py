"""What the kernels of this package serve: reasons why not, without JAX.

Whether the vendor's packages are installed is not asked here: a kernel that cannot be imported is
refused by selection itself, with the reason, and a machine's memory model needs none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axcore.ops.masks import Causal, Full, SegmentIds
from axcore.ops.refusals import blockwise_attention, many_queries

if TYPE_CHECKING:
    from axcore.plugins import OpCall

__all__ = ["nki_flash", "nki_rms_norm", "xla_norm"]

_FLOATS = ("bfloat16", "float32")
_TILE = 512  # keys of the smallest tile
_MAX_HEAD_DIM = 128  # rows of the tensor engine
_MAX_SEGMENTED = 8192  # a bias of 256 MiB
# A tile's rows in float32, their squares, the scale and the result, of 192 KiB a partition.
_MAX_NORM_DIM = 8192


def nki_flash(call: OpCall) -> str | None:
    """Why the vendor's flash attention cannot serve the call, or None."""
    without = ("bias", "sinks", "kv_valid", "logit_scale")
    reason = many_queries(call) or blockwise_attention(call, dtypes=_FLOATS, without=without)
    if reason is not None:
        return reason
    if call.options.get("logit_cap") is not None:
        return f"has no soft cap of logits, got {call.options['logit_cap']:g}"
    head_dim, value_dim = call.shapes["q"][-1], call.shapes["v"][-1]
    if head_dim != value_dim:
        return f"has one head_dim, got {head_dim} for queries and {value_dim} for values"
    if head_dim > _MAX_HEAD_DIM:
        return f"is for head dims up to {_MAX_HEAD_DIM}, got {head_dim}"
    queries, keys = call.shapes["q"][1], call.shapes["k"][1]
    if queries != keys:
        return f"is for as many queries as keys, got {queries} and {keys}"
    if keys % _TILE:
        return f"works in tiles of {_TILE} keys, got {keys}"
    for part in (call.mask or Full()).parts():
        if not isinstance(part, Full | Causal | SegmentIds):
            return f"knows full and causal masks and segment ids, got {part}"
        if isinstance(part, SegmentIds) and keys > _MAX_SEGMENTED:
            return (
                f"takes segment ids as a bias of all queries and keys, up to {_MAX_SEGMENTED} "
                f"positions, got {keys}"
            )
    return None


def nki_rms_norm(call: OpCall) -> str | None:
    """Why the NKI RMSNorm cannot serve the call, or None."""
    if call.dtypes["x"] not in _FLOATS:
        return f"is for {' or '.join(_FLOATS)}, got {call.dtypes['x']}"
    dim = call.shapes["x"][-1]
    if dim > _MAX_NORM_DIM:
        return f"keeps rows on chip, up to {_MAX_NORM_DIM} values, got {dim}"
    return None


def xla_norm(call: OpCall) -> str | None:
    """Why XLA's own RMSNorm does not serve the call: what the kernel serves is the kernel's."""
    return None if nki_rms_norm(call) is not None else "is for what the NKI kernel does not serve"
