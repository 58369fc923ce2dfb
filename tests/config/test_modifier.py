"""Modifiers get a private copy, and what they return is used."""

from typing import Any

import pytest

from axcore.config import Config, Configurable, Modifier, apply_modifier, config_for
from axcore.errors import ConfigError


class Model(Configurable):
    class Config(Configurable.Config):
        dim: int = 8
        part: Config | None = None


class Wider(Modifier):
    class Config(Modifier.Config):
        factor: int = 2

    def __call__(self, cfg: Any) -> Any:
        return cfg.set(dim=cfg.dim * self.cfg.factor)


class Other(Modifier):
    class Config(Modifier.Config):
        new: Model.Config = Model.Config(dim=77)

    def __call__(self, cfg: Any) -> Any:
        cfg.set(dim=1)  # an edit in place that the returned config does not have
        return self.cfg.new.copy()


class Forgetful(Modifier):
    def __call__(self, cfg: Any) -> Any:
        cfg.set(dim=1)


class Undefined(Modifier):
    pass


def make_modifier() -> Any:
    return lambda cfg: cfg.set(dim=3)


def test_the_returned_config_is_used():
    assert apply_modifier(Model.Config(), Wider.Config(factor=3)).dim == 24
    assert apply_modifier(Model.Config(), Other.Config()).dim == 77


def test_the_given_config_stays_as_it_is():
    cfg = Model.Config().freeze()
    apply_modifier(cfg, Wider.Config())
    assert cfg.dim == 8


def test_returning_nothing_is_an_error_with_the_way_out():
    with pytest.raises(ConfigError, match="return cfg") as e:
        apply_modifier(Model.Config(), Forgetful.Config())
    assert e.value.code == "AX113" and "Forgetful" in str(e.value)


def test_a_modifier_that_defines_nothing_says_so():
    with pytest.raises(NotImplementedError, match="Undefined"):
        apply_modifier(Model.Config(), Undefined.Config())


def test_edits_are_recorded_as_the_modifiers():
    cfg = apply_modifier(Model.Config(), Wider.Config())
    assert str(cfg.set_by("dim")) == "modifier (Wider.Config)"
    cfg = apply_modifier(Model.Config(), Wider.Config(), kind="rule", name="tpu-*", plugin="acme")
    assert str(cfg.set_by("dim")) == "rule (tpu-*)" and cfg.set_by("dim").plugin == "acme"


def test_a_function_can_make_the_modifier():
    assert apply_modifier(Model.Config(), config_for(make_modifier)).dim == 3
