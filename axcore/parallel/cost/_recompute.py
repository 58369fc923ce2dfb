"""What remat repeats of each product, as a share of its forward pass."""

from __future__ import annotations

from itertools import pairwise

from axcore.layers import BaseAttention, FeedForward
from axcore.layers.roles import BaseQKV
from axcore.module import Module
from axcore.remat import Remat

__all__ = ["attention_recompute", "projection_recompute", "site_of"]

Line = list[tuple[str, Module]]


def site_of(line: Line) -> str | None:
    """Returns the remat site that a projection's result has; None if it has none.

    Args:
        line: The module and its ancestors, nearest first, with their paths.
    """
    for (path, _), (_, parent) in pairwise(line):
        name = path.split("/")[-1]
        if isinstance(parent, BaseQKV):
            return "qkv_proj"
        if isinstance(parent, BaseAttention):
            return {"output": "attn_out"}.get(name, "qkv_proj")
        if isinstance(parent, FeedForward):
            return {"up": "ffn_hidden", "gate": "ffn_gate", "down": "ffn_out"}.get(name)
    return None


def _is_last(line: Line) -> bool:
    """Whether nothing in the layer reads a projection's result but the sum that leaves it."""
    if site_of(line) != "ffn_out":
        return False
    layer = next((m for _, m in line if "feed_forward" in m.children), None)
    return layer is None or not {"feed_forward_out_norm"} & set(layer.children)


def projection_recompute(line: Line, remat: Remat | None) -> float:
    """Returns how often the backward pass repeats a weight's product: 0 or 1."""
    if remat is None or not remat.enabled or _is_last(line):
        return 0.0
    if remat.policy in ("dots", "dots_no_batch", "offload_dots"):
        return 0.0
    if remat.policy == "full":
        return 1.0
    return float(site_of(line) not in (*remat.save, *remat.offload))


def attention_recompute(remat: Remat | None) -> float:
    """Returns how often the backward pass repeats attention's two products: 0 or 1.

    Keeping the weighted values spares nothing here: the backward pass needs the weights too, and
    what they were normalized by.
    """
    return float(remat is not None and remat.enabled and remat.policy != "dots")
