"""What products around a ring can serve: reasons, without JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axcore.plugins import OpCall

__all__ = ["all_gather_supports", "reduce_scatter_supports"]


def all_gather_supports(call: OpCall) -> str | None:
    """Why a ring cannot gather for the product, or None."""
    return _reason(call, "weight", 1)


def reduce_scatter_supports(call: OpCall) -> str | None:
    """Why a ring cannot sum the products, or None."""
    if (reason := _reason(call, "x", 2)) is not None:
        return reason
    parts = call.shapes["x"][2] // call.device_shapes["x"][2]
    positions = call.device_shapes["x"][1]
    if positions % parts:
        return f"{positions} positions on a device do not divide over {parts} devices"
    return None


def _reason(call: OpCall, argument: str, dim: int) -> str | None:
    over = tuple(call.options.get("over", ()))
    if not over:
        return "positions between branches are split no further than inside: nothing to overlap"
    axis = call.axes[argument][dim]
    if call.mesh_axes.get(axis or "", ()) != over:
        return (
            f"{axis} is split over {', '.join(call.mesh_axes.get(axis or '', ())) or 'nothing'}"
            f" and positions between branches over {', '.join(over)}"
        )
    return None
