"""What axlearn-rope contributes to axcore: the layer ``RoPE`` and the modifier that applies it."""

from __future__ import annotations

from collections.abc import Iterable

from axcore.plugins import LayerSpec, NamedSpec, hookimpl

__all__: list[str] = []


@hookimpl
def axcore_layers() -> Iterable[LayerSpec]:
    return (
        LayerSpec(
            name="RoPE",
            target="axlearn_rope:RoPE",
            tags=("rope",),
            description="rotary position embedding, a query/key transform of attention",
        ),
    )


@hookimpl
def axcore_modifiers() -> Iterable[NamedSpec]:
    return (
        NamedSpec(
            "axlearn-rope:rope",
            "axlearn_rope:RoPEModifier",
            description="gives every attention rotary positions",
        ),
    )
