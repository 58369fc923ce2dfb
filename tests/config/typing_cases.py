"""What static checkers must see; read by test_typing.py, never run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import assert_type

from axcore.config import (
    REQUIRED,
    CallConfig,
    Config,
    Configurable,
    Dim,
    Required,
    config_for,
    scaled,
)


class Linear(Configurable):
    class Config(Configurable.Config):
        input_dim: Required[int] = REQUIRED
        bias: bool = True


class BaseFF(Configurable):
    class Config(Configurable.Config):
        input_dim: Required[int] = REQUIRED


class FF(BaseFF):
    class Config(BaseFF.Config):
        hidden_dim: Dim = scaled(4, of="input_dim")
        up: Linear.Config = Linear.Config(bias=False)
        opt: Config = config_for(int)
        layers: tuple[Linear.Config, ...] = ()
        table: Mapping[str, float] = {"a": 1.0}
        fn: Callable[[float], float] = abs
        maybe: Linear.Config | None = None

    def __init__(self, cfg: FF.Config):
        super().__init__(cfg)
        assert_type(cfg.hidden_dim, int)


class Layer(Configurable):
    class Config(Configurable.Config):
        ff: BaseFF.Config = FF.Config()


cfg = FF.Config(input_dim=3, hidden_dim=12, up=Linear.Config(input_dim=1))
assert_type(cfg.input_dim, int)
assert_type(cfg.hidden_dim, int)
assert_type(cfg.up.bias, bool)
assert_type(cfg.layers, tuple[Linear.Config, ...])
assert_type(cfg.set(hidden_dim=3).copy().freeze(), FF.Config)
assert_type(FF.Config.from_text(""), FF.Config)
assert_type(cfg.at("*").set(bias=True), FF.Config)
assert_type(config_for(int), CallConfig)
Layer.Config(ff=FF.Config())
cfg.up.bias = False

FF.Config(inptu_dim=3)  # error: no such keyword
FF.Config(3)  # error: keywords only
FF.Config(hidden_dim="x")  # error: wrong type
FF.Config(up=FF.Config())  # error: another config
cfg.nothing  # error: no such field
cfg.up.bias = "x"  # error: wrong type
cfg.nothing = 3  # error: no such field
