"""Putting adapters into a config: which layers, and a stack whose layers then differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axcore.collection import expand_path
from axcore.config import Config
from axcore.errors import ConfigError
from axcore.layers import BaseGroupedLinear, Linear
from axcore.layers.lora import LowRankAdapter
from axcore.layers.placement import build_model, model_field, spread
from axcore.module import Module

__all__ = ["Chosen", "attach", "build_model", "detach", "linear_paths", "model_field"]

#: The adapter of the layer at a path such as ``decoder/layer/3/feed_forward/up``, or None.
Chosen = Callable[[str], LowRankAdapter.Config | None]


def linear_paths(model: Module) -> dict[str, Module]:
    """Returns ``{path: module}`` of all linear layers, one path per layer of a stack.

    Those with a matrix for each of several groups of rows, such as a mixture's experts, are among
    them: one path for all groups.
    """
    return {
        name: module
        for path, module in model.walk()
        if isinstance(module, Linear | BaseGroupedLinear)
        for name, _ in expand_path(path)
    }


def attach(cfg: Config, chosen: Chosen) -> tuple[str, ...]:
    """Puts adapters into a config, in place.

    A config that several layers share gets one adapter when all of them want the same. Otherwise
    the stack's period grows to the shortest one that tells the layers apart.

    Args:
        cfg: A trainer's config, or a model's.
        chosen: The adapter that each linear layer gets.

    Returns:
        Paths of the adapted layers.

    Raises:
        ConfigError: A layer has an adapter already, or layers that one config describes cannot
            differ since they run as a scan.
    """
    model = build_model(cfg)
    linears = linear_paths(model)
    wanted = {path: chosen(path) for path in linears}
    if spread(cfg, model, {p: _text(a) for p, a in wanted.items()}, "adapters"):
        linears = linear_paths(build_model(cfg))
    for path, module in linears.items():
        adapter = wanted[path]
        if adapter is None:
            continue
        node: Any = cfg.get_path(module.config_path)
        placed = adapter.copy()
        if isinstance(node.dot, LowRankAdapter.Config):
            if _text(node.dot.copy().set(base=placed.base)) == _text(placed):
                continue  # another layer of the same config has put it there
            raise ConfigError(
                f"{path} has an adapter already",
                code="AX363",
                where=module.config_path,
                hint="merge it first (`axcore peft merge`), or apply one adapter modifier only",
            )
        node.dot = placed.set(base=node.dot)
    return tuple(path for path, adapter in wanted.items() if adapter is not None)


def detach(cfg: Config) -> None:
    """Takes all adapters out of a config, in place; what they wrapped is back."""
    for _, node in list(cfg.walk()):
        dot = getattr(node, "dot", None) if "dot" in node.fields() else None
        if isinstance(dot, LowRankAdapter.Config):
            node.set(dot=dot.base)
    for path, node in list(cfg.walk()):
        for name in node.fields():
            value = getattr(node, name)
            if _is_layers(value) and len({_text(layer) for layer in value}) == 1:
                cfg.set_path(f"{path}.{name}" if path else name, value[0])


def _is_layers(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 1 and all(isinstance(v, Config) for v in value)


def _text(cfg: Config | None) -> str | None:
    return None if cfg is None else cfg.to_text()
