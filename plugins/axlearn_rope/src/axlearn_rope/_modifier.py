"""The modifier that gives the attention of any config rotary positions."""

from __future__ import annotations

from typing import Any, Literal

from axcore.config import Modifier, matches
from axcore.errors import ConfigError
from axcore.layers import (
    BaseAttention,
    BaseQueryKeyTransform,
    LearnedPositions,
    QueryKeyChain,
)
from axlearn_rope._axes import MultiAxis
from axlearn_rope._rope import RoPE
from axlearn_rope._scaling import RoPEScaling

__all__ = ["RoPEModifier"]

_FIELDS = ("base", "pairing", "rotary_fraction", "scaling", "axes")


class RoPEModifier(Modifier):
    """Gives every attention of a config tree rotary positions.

    An attention whose ``query_key_transform`` is empty gets :class:`RoPE`. One that transforms
    queries and keys otherwise (QK-norm) keeps that and rotates after it. One that has RoPE already
    has the given fields set in it. Learned position embeddings stay unless
    ``remove_learned_positions`` says otherwise.

    On a command line: ``--modifier axlearn-rope:rope:base=500000,remove_learned_positions=true``.

    Raises:
        ConfigError: No attention of the config can take it.
    """

    class Config(Modifier.Config):
        """Fields of :class:`RoPE`; None leaves what is there, or RoPE's default."""

        base: float | None = None
        pairing: Literal["half", "interleaved"] | None = None
        rotary_fraction: float | None = None
        scaling: RoPEScaling | None = None
        axes: MultiAxis | None = None
        # Which attention configs, by a pattern of their paths: ``**`` is any number of segments.
        where: str = "**"
        # Sets every LearnedPositions of the config to None.
        remove_learned_positions: bool = False

    def __call__(self, cfg: Any) -> Any:
        """Returns ``cfg`` with RoPE in its attention."""
        nodes = [
            node
            for path, node in cfg.find(BaseAttention.Config).items()
            if "query_key_transform" in node.fields() and matches(self.cfg.where, path)
        ]
        if not nodes:
            raise ConfigError(
                f"no attention with a query_key_transform at {self.cfg.where!r}",
                code="AX385",
                hint="rotary positions go into the query_key_transform of an attention layer",
            )
        for node in nodes:
            node.query_key_transform = self._with_rope(node.query_key_transform)
        if self.cfg.remove_learned_positions:
            for path in cfg.find(LearnedPositions.Config):
                cfg.set_path(path, None)
        return cfg

    def _with_rope(
        self, present: BaseQueryKeyTransform.Config | None
    ) -> BaseQueryKeyTransform.Config:
        """Returns what takes the place of a present query_key_transform."""
        given = {n: getattr(self.cfg, n) for n in _FIELDS if getattr(self.cfg, n) is not None}
        if present is None:
            return RoPE.Config(**given)
        ropes = present.find(RoPE.Config)
        for rope in ropes.values():
            rope.set(**given)
        if ropes:
            return present
        before = present.transforms if isinstance(present, QueryKeyChain.Config) else (present,)
        return QueryKeyChain.Config(transforms=(*before, RoPE.Config(**given)))
