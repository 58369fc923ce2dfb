"""Reasons that kernels share, for what their ``supports`` says: why not, or None. Without JAX.

Example:
    ```python
    def flash(call: OpCall) -> str | None:
        reason = many_queries(call) or blockwise_attention(call, dtypes=("bfloat16",))
        if reason is not None:
            return reason
        ...  # what this kernel alone cannot do
    ```
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axcore.plugins import OpCall

__all__ = ["blockwise_attention", "many_queries", "own_products"]

_QKV = ("q", "k", "v")


def blockwise_attention(
    call: OpCall, *, dtypes: Iterable[str], without: Iterable[str] = ()
) -> str | None:
    """Why attention that computes logits block by block, of arrays as they are, cannot serve.

    It reads no cache, its products are its own, and positions are indices to it.

    Args:
        call: The call of ``attention``.
        dtypes: What it computes with; q, k and v have one of them in common.
        without: Arguments that it does not take as arrays: what it lacks (``"bias"``), and
            ``"logit_scale"`` where it wants a number.
    """
    if call.view is not None:
        return f"reads no key/value cache (a {call.view!r} view)"
    if (reason := own_products(call)) is not None:
        return reason
    for name in without:
        if name in call.shapes:
            takes = "a static logit scale" if name == "logit_scale" else f"no {name}"
            return f"takes {takes}, got an array {call.shapes[name]}"
    dtypes, found = tuple(dtypes), {call.dtypes[name] for name in _QKV}
    if len(found) > 1 or not found <= set(dtypes):
        got = " and ".join(sorted(found))
        return f"is for q, k and v of one dtype, {' or '.join(dtypes)}, got {got}"
    by_position = call.mask is not None and call.mask.uses_positions
    if by_position and ("q_positions" in call.shapes or "kv_positions" in call.shapes):
        return "takes positions for indices, got positions"
    return None


def many_queries(call: OpCall) -> str | None:
    """Why attention that works on tiles of queries does not serve a call that decodes, or None."""
    if call.purpose == "decode":
        return "is for many queries: decoding has one of each sequence"
    return None


def own_products(call: OpCall) -> str | None:
    """Why what multiplies block by block cannot serve a call whose products are replaced, or None.

    A quantization recipe replaces them, for example.
    """
    if call.options.get("dot_general") == "replaced":
        return "its products cannot be replaced: it computes them blockwise"
    return None
