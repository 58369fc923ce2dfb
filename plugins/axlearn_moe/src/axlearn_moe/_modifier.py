"""The modifier that puts mixtures of experts into any config."""

from __future__ import annotations

import math
from typing import Any

from axcore.config import Modifier, matches
from axcore.errors import ConfigError
from axcore.layers import FeedForward
from axlearn_moe._moe import MoE, check_config
from axlearn_moe._routers import TopKRouter, check_groups

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
        every, pattern = self.cfg.every, self.cfg.pattern
        if every < 1:
            raise ConfigError(f"every={every}, expected at least 1", code="AX917", where="every")
        layers = [p for p in cfg.find(FeedForward.Config) if matches(pattern, p)]
        if not layers:
            everywhere = ", ".join(list(cfg.find(FeedForward.Config))[:4])
            raise ConfigError(
                f"there is no FeedForward at {pattern!r}",
                code="AX917",
                where="pattern",
                hint=f"those in this config: {everywhere or 'none'}",
            )
        if every == 1:
            return cfg.replace(FeedForward.Config, moe, where=pattern)
        placed = 0
        for path, owner in [("", cfg), *cfg.walk()]:
            if not path or not _is_stack(owner):
                continue
            below = f"{path}.layer"
            if any(p == below or p.startswith(f"{below}.") for p in layers):
                placed += _every(owner, moe, every, lambda p, b=below: matches(pattern, f"{b}.{p}"))
        if not placed:
            raise ConfigError(
                f"no stack of at least {every} layers has its layers at {pattern!r}",
                code="AX917",
                where="every",
                hint="every=1 takes all layers that match",
            )
        return cfg


def _is_stack(node: Any) -> bool:
    fields = node.fields()
    return "layer" in fields and "num_layers" in fields and isinstance(node.num_layers, int)


def _every(owner: Any, moe: MoE.Config, every: int, wanted: Any) -> int:
    """Gives a stack a period with mixtures in every ``every``-th layer; returns how many."""
    given = owner.layer if isinstance(owner.layer, tuple) else (owner.layer,)
    placed = 0
    period = []
    for i in range(math.lcm(len(given), every)):
        layer = given[i % len(given)].copy()
        if (i + 1) % every == 0 and i < owner.num_layers:

            def here(path: str, node: Any, at: int = i % len(given)) -> bool:
                del node
                single = not isinstance(owner.layer, tuple)
                return wanted(path if single else f"{at}.{path}")

            before = len(layer.find(MoE.Config))
            layer.replace(FeedForward.Config, moe, where=here, allow_none=True)
            placed += len(layer.find(MoE.Config)) - before
        period.append(layer)
    if placed:
        owner.layer = tuple(period)
    return placed
