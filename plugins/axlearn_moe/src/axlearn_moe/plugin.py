"""What axlearn-moe contributes to axcore: a layer, a modifier that places it, a command."""

from __future__ import annotations

from collections.abc import Iterable

from axcore.plugins import LayerSpec, NamedSpec, hookimpl

__all__: list[str] = []


@hookimpl
def axcore_layers() -> Iterable[LayerSpec]:
    return (
        LayerSpec(
            name="MoE",
            target="axlearn_moe:MoE",
            tags=("moe",),
            description="a mixture of experts in place of a feed-forward layer",
        ),
    )


@hookimpl
def axcore_modifiers() -> Iterable[NamedSpec]:
    return (
        NamedSpec(
            "axlearn-moe:moe",
            "axlearn_moe:MoEModifier",
            description="replaces feed-forward layers by mixtures of experts",
        ),
    )


@hookimpl
def axcore_commands() -> Iterable[NamedSpec]:
    return (
        NamedSpec(
            "upcycle",
            "axlearn_moe._upcycle_command:add_parser",
            description="makes a mixture of experts of a trained dense model",
        ),
    )
