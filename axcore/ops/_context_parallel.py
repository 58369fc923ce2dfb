"""What attention over a split sequence can serve: reasons, without JAX.

Facts that both implementations need: queries and keys of one sequence, and nothing of theirs whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from axcore.ops.refusals import own_products

if TYPE_CHECKING:
    from axcore.plugins import OpCall

__all__ = ["all_to_all_supports", "ring_supports"]


def ring_supports(call: OpCall) -> str | None:
    """Why a ring cannot serve the call, or None."""
    return _not_one_sequence(call) or own_products(call)


def all_to_all_supports(call: OpCall) -> str | None:
    """Why heads cannot be exchanged for positions, or None."""
    if (reason := _not_one_sequence(call)) is not None:
        return reason
    if "seq" not in call.mesh_axes:
        return None  # selection says it
    parts = call.shapes["q"][1] // max(call.device_shapes["q"][1], 1)
    over = " x ".join(call.mesh_axes["seq"])
    heads, kv_heads = (call.device_shapes[name][2] for name in ("q", "k"))
    if heads % parts:
        return f"{heads} query heads on a device do not divide over {parts} devices ({over})"
    if kv_heads % parts and parts % kv_heads:
        return (
            f"{kv_heads} key/value heads on a device neither divide over {parts} devices ({over})"
            " nor divide their number"
        )
    return None


def _not_one_sequence(call: OpCall) -> str | None:
    if call.view is not None:
        return f"reads no key/value cache (a {call.view!r} view), whose positions are whole"
    if "bias" in call.shapes:
        return f"takes no bias array {call.shapes['bias']}, which has a dim of all keys"
    queries, keys = call.shapes["q"][1], call.shapes["k"][1]
    if queries != keys:
        return f"is for keys and queries of one sequence, got {queries} queries and {keys} keys"
    return None
