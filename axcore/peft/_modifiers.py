"""Modifiers that make an experiment train few parameters: LoRA, DoRA, freezing."""

from __future__ import annotations

import abc
from typing import Any

from axcore.config import Config, Modifier
from axcore.errors import ConfigError, did_you_mean
from axcore.layers import Dropout
from axcore.layers.lora import DoRA, LoRA, LowRankAdapter
from axcore.peft._attach import attach, build_model, linear_paths
from axcore.train._paths import glob_matches

__all__ = ["ADAPTER_PATTERN", "BaseLoRAModifier", "DoRAModifier", "FreezeModifier", "LoRAModifier"]

#: The parameters of all adapters, as a learner's pattern.
ADAPTER_PATTERN = "**/dot/lora_*"
_SHOWN = 8


class FreezeModifier(Modifier):
    """Freezes all parameters but those named: no gradient, no optimizer state.

    Example:
        >>> modifier = FreezeModifier.Config(train="**/bias")  # BitFit, arXiv:2106.10199
    """

    class Config(Modifier.Config):
        """Patterns of parameters that train, such as ``**/bias`` or ``lm_head/*``."""

        train: str | tuple[str, ...] = ()

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with ``learner.frozen_params`` set.

        Raises:
            ConfigError: Nothing would train, or it has no learner.
        """
        patterns = _tuple(self.cfg.train)
        if not patterns:
            raise ConfigError(
                "freeze got no parameters to train",
                code="AX365",
                hint="for example freeze:train=**/bias",
            )
        if "learner" not in cfg.fields():
            raise ConfigError(
                "freeze needs a learner to tell",
                code="AX365",
                hint="apply it to a trainer's config",
            )
        _freeze(cfg, patterns)
        return cfg


class BaseLoRAModifier(Modifier):
    """Puts low-rank adapters into linear layers and freezes everything else.

    Targets are globs over the layers' paths in the model, the same as in a learner's patterns
    (``**/qkv/query``, ``decoder/layer/[0-3]/**``). In a trainer's config the learner then trains
    the adapters only; a model's own config just gets the adapters.
    """

    class Config(Modifier.Config):
        """Fields as in :class:`axcore.layers.LowRankAdapter`; the rest is whom they are for."""

        rank: int = 8
        alpha: float = 16.0
        rank_stabilized: bool = False
        dropout: float = 0.0
        # Dtype of the adapters' parameters; None: that of the layer they are in.
        param_dtype: str | None = None
        # Linear layers that get an adapter.
        targets: str | tuple[str, ...] = "**"
        # Further parameters that train, such as "**/bias" or "lm_head/*".
        train: str | tuple[str, ...] = ()

    @abc.abstractmethod
    def _adapter(self) -> LowRankAdapter.Config:
        """Returns the adapter's config; the shared fields are set afterwards."""

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with the adapters.

        Raises:
            ConfigError: A target matches no linear layer, one has an adapter already, or layers of
                a scan would differ.
        """
        own = self.cfg
        adapter = self._adapter().set(
            rank=own.rank,
            alpha=own.alpha,
            rank_stabilized=own.rank_stabilized,
            param_dtype=own.param_dtype,
            dropout=Dropout.Config(rate=own.dropout),
        )
        targets = _tuple(own.targets)
        _check_targets(cfg, targets)
        attach(cfg, lambda p: adapter if any(glob_matches(t, p) for t in targets) else None)
        if "learner" in cfg.fields():
            _freeze(cfg, (ADAPTER_PATTERN, *_tuple(own.train)))
        return cfg


class LoRAModifier(BaseLoRAModifier):
    """:class:`axcore.layers.LoRA` in the layers that ``targets`` match.

    Example:
        >>> cfg = apply_modifier(cfg, LoRAModifier.Config(rank=4, targets="**/qkv/*"))
    """

    class Config(BaseLoRAModifier.Config):
        """No further fields."""

    def _adapter(self) -> LowRankAdapter.Config:
        return LoRA.Config()


class DoRAModifier(BaseLoRAModifier):
    """:class:`axcore.layers.DoRA` in the layers that ``targets`` match."""

    class Config(BaseLoRAModifier.Config):
        """See :class:`axcore.layers.DoRA`."""

        norm_gradient: bool = False

    def _adapter(self) -> LowRankAdapter.Config:
        return DoRA.Config(norm_gradient=self.cfg.norm_gradient)


def _freeze(cfg: Any, trained: tuple[str, ...]) -> None:
    cfg.learner.set(frozen_params=("**", *(f"!{pattern}" for pattern in trained)))


def _tuple(patterns: str | tuple[str, ...]) -> tuple[str, ...]:
    return (patterns,) if isinstance(patterns, str) else patterns


def _check_targets(cfg: Config, targets: tuple[str, ...]) -> None:
    paths = list(linear_paths(build_model(cfg)))
    for target in targets:
        if not any(glob_matches(target, path) for path in paths):
            shown = ", ".join(paths[:_SHOWN])
            more = len(paths) - _SHOWN
            raise ConfigError(
                f"the target {target!r} matches none of {len(paths)} linear layers",
                code="AX366",
                hint=did_you_mean(target, paths)
                or f"they are: {shown}{f', and {more} more' if more > 0 else ''}",
            )
    if not targets:
        raise ConfigError("there are no targets", code="AX366", hint="targets=** means all")
