"""Causal masks with and without a window, by the number of tokens that a token sees.

Where local layers alternate with global ones, a period of layer configs says which is which, so
that kernels know each layer's mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from axcore.ops.masks import Causal, Mask, SlidingWindow
from axcore.train import Trainer
from axlearn_models._llama_like import layers_of

__all__ = [
    "alternating",
    "causal",
    "causal_within",
    "period_of",
    "split_layers",
    "without_window",
]


def causal(window: int | None) -> Mask:
    """Returns the mask of a token that sees ``window`` tokens, its own included; None: all."""
    return Causal() if window is None else Causal() & SlidingWindow(left=window - 1)


def causal_within(window: int | None, limit: int) -> Mask:
    """Returns ``causal(window)``, without the window where no sequence is longer than it.

    Args:
        window: Tokens that a token sees, its own included; None: all.
        limit: Tokens of the longest sequence.
    """
    return causal(None if window is None or window >= limit else window)


def without_window(attention: Any) -> int | None:
    """Takes the window off an attention's config and returns it; None: there was none.

    A mask that is no ``causal(window)`` stays as it is.
    """
    window = _window_of(attention.mask)
    if window is not None:
        attention.set(mask=Causal())
    return window


def alternating(cfg: Trainer.Config, *, local: Sequence[bool], window: int) -> Trainer.Config:
    """Makes the layers of a config a period of local and global ones and returns it.

    Args:
        cfg: Its first local and its first global layer are the patterns; either serves for both.
        local: Which layers of the period are local.
        window: Tokens that a local layer sees, a token's own included.
    """
    narrow, wide = split_layers(cfg)
    local_layer, global_layer = (narrow or wide)[0].copy(), (wide or narrow)[0].copy()
    local_layer.attention.set(mask=causal(window))
    global_layer.attention.set(mask=causal(None))
    layers = tuple(local_layer if here else global_layer for here in local)
    cfg.set_path("model.decoder.layer", layers)
    return cfg


def split_layers(cfg: Trainer.Config) -> tuple[list[Any], list[Any]]:
    """Returns the nodes of the layers that are local, and of those that are global."""
    narrow, wide = [], []
    for layer in layers_of(cfg):
        (wide if layer.attention.mask == causal(None) else narrow).append(layer)
    return narrow, wide


def period_of(local: Sequence[bool]) -> tuple[bool, ...]:
    """Returns the shortest period of a sequence, which may end inside the period."""
    for length in range(1, len(local) + 1):
        if all(here == local[i % length] for i, here in enumerate(local)):
            return tuple(local[:length])
    return tuple(local)


def _window_of(mask: Mask) -> int | None:
    for part in mask.parts():
        if isinstance(part, SlidingWindow) and part.left is not None:
            window = part.left + 1
            return window if mask == causal(window) else None
    return None
