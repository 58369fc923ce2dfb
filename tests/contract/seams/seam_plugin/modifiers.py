"""A modifier that quantizes every contraction of a model."""

from axcore.config import Modifier
from axcore.ops import DotGeneral
from seam_plugin.layers import Int8Dot


class Int8(Modifier):
    """Replaces every ``DotGeneral``."""

    class Config(Modifier.Config):
        bits: int = 8

    def __call__(self, cfg):
        return cfg.replace(DotGeneral.Config, Int8Dot.Config(bits=self.cfg.bits))
