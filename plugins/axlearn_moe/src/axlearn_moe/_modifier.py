"""The modifier that puts mixtures of experts into any config."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from axcore.config import Modifier, matches
from axcore.errors import ConfigError
from axcore.layers import FeedForward
from axlearn_moe._moe import MoE, check_config
from axlearn_moe._routers import TopKRouter, check_amounts, check_groups

__all__ = ["MoEModifier"]


class MoEModifier(Modifier):
    """Replaces the feed-forward layers of a config by mixtures of experts.

    What was set of a layer holds for each of its experts. With ``every=2`` it is every second
    layer of each stack, the last of each two; a stack of one kind of layer becomes one with a
    period.

    Example:
        ``axcore train fuji-test-v3 --modifier axlearn-moe:moe:num_experts=4,top_k=2,every=2``
    """

    class Config(Modifier.Config):
        """``moe`` has all options; ``num_experts`` and ``top_k`` are short for its own."""

        num_experts: int | None = None
        top_k: int | None = None
        # Layers i, counted from 0, with (i + 1) % every == 0.
        every: int = 1
        # Which feed-forward configs, by a pattern of their paths: ``**`` is any number of segments.
        pattern: str = "**"
        moe: MoE.Config = MoE.Config(num_experts=8)

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with mixtures of experts."""
        moe = self.cfg.moe.copy()
        for name in ("num_experts", "top_k"):
            if (value := getattr(self.cfg, name)) is not None:
                setattr(moe, name, value)
        # Here too: a config that nobody builds (`config show`) is refused like one that is trained.
        check_config(moe, "moe")
        if isinstance(moe.router, TopKRouter.Config):
            check_groups(moe.router, moe.num_experts, moe.top_k, "moe.router")
            check_amounts(moe.router, "moe.router")
        every, pattern = self.cfg.every, self.cfg.pattern
        if every < 1:
            raise ConfigError(
                f"every={every}, expected at least 1",
                code="AX917",
                where="every",
                hint="1 takes all layers, 2 the second of each two",
            )
        mixtures = list(cfg.find(MoE.Config))
        # A mixture's shared experts are feed-forward layers too, and stay as they are.
        layers = [p for p in cfg.find(FeedForward.Config) if not _is_below(p, mixtures)]
        wanted = {p for p in layers if matches(pattern, p)}
        if not wanted:
            there = f"; mixtures already: {', '.join(mixtures[:4])}" if mixtures else ""
            raise ConfigError(
                f"there is no FeedForward at {pattern!r}",
                code="AX917",
                where="pattern",
                hint=f"those in this config: {', '.join(layers[:4]) or 'none'}{there}",
            )
        if every == 1:
            return cfg.replace(FeedForward.Config, moe, where=lambda path, _: path in wanted)
        placed = 0
        for path, owner in [("", cfg), *cfg.walk()]:
            if path and _is_stack(owner):
                placed += _every(owner, moe, every, lambda p, at=path: f"{at}.{p}" in wanted)
        if not placed:
            raise ConfigError(
                f"no stack of at least {every} layers has its layers at {pattern!r}",
                code="AX917",
                where="every",
                hint="every=1 takes all layers that match",
            )
        return cfg


def _is_below(path: str, owners: list[str]) -> bool:
    return any(path.startswith(f"{owner}.") for owner in owners)


def _is_stack(node: Any) -> bool:
    fields = node.fields()
    return "layer" in fields and "num_layers" in fields and isinstance(node.num_layers, int)


def _every(owner: Any, moe: MoE.Config, every: int, wanted: Callable[[str], bool]) -> int:
    """Gives a stack mixtures in every ``every``-th layer; returns how many configs got one."""
    ahead = owner.prefix if "prefix" in owner.fields() else ()
    given = owner.layer if isinstance(owner.layer, tuple) else (owner.layer,)
    rest = owner.num_layers - len(ahead)
    # A period that is longer than the stack says no more than one as long.
    length = max(len(given), min(math.lcm(len(given), every), rest))
    placed = 0

    def edited(layer: Any, index: int, at: str) -> Any:
        nonlocal placed
        copy = layer.copy()
        if index < owner.num_layers and (index + 1) % every == 0:
            here = [p for p in copy.find(FeedForward.Config) if wanted(f"{at}.{p}")]
            placed += len(here)
            copy.replace(FeedForward.Config, moe, where=lambda p, _: p in here, allow_none=True)
        return copy

    prefix = tuple(edited(layer, i, f"prefix.{i}") for i, layer in enumerate(ahead))
    paths = (
        [f"layer.{i}" for i in range(len(given))] if isinstance(owner.layer, tuple) else ["layer"]
    )
    period = []
    for i in range(length):
        part = i % len(given)
        period.append(edited(given[part], len(ahead) + i, paths[part]))
    if placed:
        owner.layer = tuple(period)
    if ahead and placed:
        owner.prefix = prefix
    return placed
