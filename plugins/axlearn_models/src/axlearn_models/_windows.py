"""Causal masks with and without a window, by the number of tokens that a token sees."""

from __future__ import annotations

from typing import Any

from axcore.ops.masks import Causal, Mask, SlidingWindow

__all__ = ["causal", "causal_within", "without_window"]


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


def _window_of(mask: Mask) -> int | None:
    for part in mask.parts():
        if isinstance(part, SlidingWindow) and part.left is not None:
            window = part.left + 1
            return window if mask == causal(window) else None
    return None
