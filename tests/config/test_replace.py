"""replace: precedence per field, a report of what moved, and no edit lost silently."""

import dataclasses
import logging
import math
from typing import Any

import pytest

from axcore.config import (
    REQUIRED,
    Config,
    Configurable,
    ConfigWarning,
    Required,
    author,
    config_for,
)
from axcore.errors import ConfigError


class Linear(Configurable):
    class Config(Configurable.Config):
        input_dim: Required[int] = REQUIRED
        bias: bool = True
        rank: int = 0


class BaseFF(Configurable):
    class Config(Configurable.Config):
        input_dim: Required[int] = REQUIRED


class FF(BaseFF):
    class Config(BaseFF.Config):
        hidden_dim: int = 8
        activation: str = "gelu"
        dropout: float = 0.0
        up: Linear.Config = Linear.Config(bias=False)


class FF2(FF):
    pass


class MoE(BaseFF):
    class Config(BaseFF.Config):
        hidden_dim: int = 16
        num_experts: int = 4
        dropout: float = 0.1
        up: Linear.Config = Linear.Config(rank=2)


class Typed(BaseFF):
    class Config(BaseFF.Config):
        hidden_dim: str = "wide"


class Layer(Configurable):
    class Config(Configurable.Config):
        ff: BaseFF.Config = FF.Config(activation="silu")


@dataclasses.dataclass(frozen=True)
class Stage:
    ff: BaseFF.Config
    steps: int = 1


class Model(Configurable):
    class Config(Configurable.Config):
        layer: Layer.Config = Layer.Config()
        layers: tuple[BaseFF.Config, ...] = (FF.Config(), FF2.Config())
        stage: Stage = Stage(FF.Config())
        strict: FF.Config | None = None
        opt: Config = config_for(math.isclose, 1.0, 2.0, rel_tol=0.5)


ALL = ["layer.ff", "layers.0", "layers.1", "stage.ff"]


def edited() -> Model.Config:
    cfg = Model.Config()
    cfg.at("layers.*").set(dropout=0.5)
    return cfg


def test_it_replaces_the_class_and_its_subclasses_everywhere():
    cfg = Model.Config()
    assert cfg.replace(FF.Config, MoE.Config(num_experts=2), where="layers.*") is cfg
    assert [type(n) for n in cfg.layers] == [MoE.Config, MoE.Config]
    assert type(cfg.layer.ff) is FF.Config
    assert cfg.replace(FF.Config, MoE.Config()).find(MoE.Config).keys() == dict.fromkeys(ALL).keys()


def test_each_place_gets_its_own_copy():
    new = MoE.Config()
    cfg = Model.Config().replace(FF.Config, new)
    cfg.layers[0].set(num_experts=99)
    assert cfg.layers[1].num_experts == 4 and new.num_experts == 4


def test_an_explicit_value_on_the_old_config_moves():
    cfg = edited().replace(FF.Config, MoE.Config(), where="layers.0")
    assert cfg.layers[0].dropout == 0.5
    assert "dropout" in cfg.replacements[0].moved


def test_an_explicit_value_on_the_new_config_wins():
    cfg = edited().replace(FF.Config, MoE.Config(dropout=0.2), where="layers.0")
    assert cfg.layers[0].dropout == 0.2
    assert cfg.replacements[0].overridden == ("dropout",)


def test_an_unset_value_is_the_new_configs_default():
    cfg = Model.Config().replace(FF.Config, MoE.Config(), where="layers.0")
    assert cfg.layers[0].hidden_dim == 16 and cfg.layers[0].dropout == 0.1
    assert set(cfg.replacements[0].defaulted) >= {"hidden_dim", "num_experts", "dropout"}


def test_what_an_owner_sets_in_its_default_moves_too():
    """The biases that came back unnoticed elsewhere."""

    class LoRA(Linear):
        pass

    cfg = FF.Config().replace(Linear.Config, LoRA.Config(rank=4))
    assert (cfg.up.bias, cfg.up.rank) == (False, 4)


def test_edits_of_nested_configs_move_field_by_field():
    cfg = Model.Config()
    cfg.layers[0].up.set(input_dim=7)
    cfg.replace(FF.Config, MoE.Config(), where="layers.0")
    up = cfg.layers[0].up
    assert (up.input_dim, up.rank, up.bias) == (7, 2, True)  # edit; MoE's default; Linear's default
    assert "up.input_dim" in cfg.replacements[0].moved


def test_an_edit_that_has_no_place_is_lost_loudly():
    cfg = Model.Config()
    cfg.layers[0].set(activation="relu")
    with pytest.warns(ConfigWarning, match=r"layers\.0\.activation = \"relu\" \(set by experiment"):
        cfg.replace(FF.Config, MoE.Config(), where="layers.0")
    (lost,) = cfg.replacements[0].lost
    assert (lost.path, lost.value) == ("layers.0.activation", '"relu"')
    assert lost.event is not None and lost.event.kind == "experiment"
    assert "no field 'activation'" in lost.reason


def test_a_nested_edit_that_has_no_place_is_lost_loudly():
    cfg = Model.Config()
    cfg.layers[0].up.set(bias=True)
    with pytest.warns(ConfigWarning, match=r"layers\.0\.up\.bias"):
        cfg.replace(FF.Config, Typed.Config(), where="layers.0")


def test_an_edit_of_another_type_is_lost_loudly():
    cfg = Model.Config()
    cfg.layers[0].set(hidden_dim=32)
    with pytest.warns(ConfigWarning, match="hidden_dim = 32"):
        cfg.replace(FF.Config, Typed.Config(), where="layers.0")
    assert cfg.layers[0].hidden_dim == "wide"


def test_a_default_of_the_owner_without_a_place_is_reported_without_a_warning():
    cfg = Model.Config().replace(FF.Config, MoE.Config(), where="layer.ff")
    (lost,) = cfg.replacements[0].lost
    assert lost.path == "layer.ff.activation"
    assert lost.event is not None and str(lost.event) == "default (Layer.Config)"


def test_nothing_matched_raises_so_applying_it_twice_raises():
    cfg = Model.Config().replace(FF.Config, MoE.Config())
    before = cfg.copy()
    with pytest.raises(ConfigError, match=r"no FF\.Config here") as e:
        cfg.replace(FF.Config, MoE.Config())
    assert e.value.code == "AX109"
    assert cfg.replace(FF.Config, MoE.Config(), allow_none=True) == before


def test_nothing_matched_says_where_they_would_have_been():
    with pytest.raises(ConfigError, match=r"excludes those at: layer\.ff"):
        Model.Config().replace(FF.Config, MoE.Config(), where="decoder.*")


def test_the_root_is_never_replaced():
    with pytest.raises(ConfigError, match="never replaced"):
        FF.Config().replace(FF.Config, MoE.Config())


def test_it_does_not_look_inside_what_it_placed():
    cfg = Model.Config().set(strict=FF.Config())
    cfg.replace(Linear.Config, Linear.Config(rank=3))
    wrapped = Layer.Config().replace(FF.Config, FF2.Config())
    assert type(wrapped.ff) is FF2.Config and len(wrapped.replacements) == 1
    assert {n.rank for n in cfg.find(Linear.Config).values()} == {3}


def test_where_takes_a_predicate():
    cfg = Model.Config()
    cfg.replace(FF.Config, MoE.Config(), where=lambda path, node: type(node) is FF2.Config)
    assert list(cfg.find(MoE.Config)) == ["layers.1"]


def test_a_place_that_does_not_accept_it_raises_and_nothing_changes():
    cfg = Model.Config().set(strict=FF.Config())
    before = cfg.copy()
    with pytest.raises(ConfigError) as e:
        cfg.replace(FF.Config, MoE.Config())
    assert e.value.where == "strict"
    assert cfg == before and cfg.replacements == ()


def test_a_callable_can_be_replaced():
    cfg = Model.Config().replace(math.isclose, config_for(math.hypot, 3.0, 4.0))
    assert cfg.opt.instantiate() == 5.0


def test_classes_in_place_of_configs_are_refused_with_the_way_out():
    arguments: list[tuple[Any, Any]] = [(FF, MoE.Config()), (FF.Config, MoE)]
    for old, new in arguments:
        with pytest.raises(ConfigError, match=r"write (FF|MoE)\.Config"):
            Model.Config().replace(old, new)


def test_provenance_of_what_moved_and_what_was_placed():
    cfg = Model.Config()
    with author("file", "edits.txt"):
        cfg.layers[0].set(dropout=0.5)
    template = MoE.Config(num_experts=8)
    with author("modifier", "moe"):
        cfg.replace(FF.Config, template, where="layers.0")
    assert str(cfg.set_by("layers.0")) == "modifier (moe)"
    assert str(cfg.set_by("layers.0.dropout")) == "file (edits.txt)"
    assert str(cfg.set_by("layers.0.num_experts")) == "modifier (moe)"
    assert str(cfg.set_by("layers.0.hidden_dim")) == "default (MoE.Config)"


def test_each_swap_is_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "axcore.config"):
        edited().replace(FF.Config, MoE.Config(), where="layers.0")
    assert "layers.0" in caplog.text and "moved: dropout" in caplog.text


def test_of_many_fields_the_log_has_the_first_and_the_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    from axcore.config import _replace

    monkeypatch.setattr(_replace, "_LISTED", 1)
    cfg = edited()
    with caplog.at_level(logging.INFO, "axcore.config"):
        cfg.replace(FF.Config, MoE.Config(), where="layers.0")
    (report,) = cfg.replacements
    first, *others = report.defaulted
    assert f"defaulted: {first} and {len(others)} more (`axcore config explain`" in caplog.text
    assert others and not any(f" {name}" in caplog.text for name in others)


def test_reports_are_kept_by_copies_and_outside_equality():
    cfg = Model.Config().replace(FF.Config, MoE.Config())
    assert cfg.copy().replacements == cfg.replacements and len(cfg.replacements) == 4
    other = Model.Config.from_text(cfg.to_text(), trusted=("tests",))
    assert other == cfg and other.replacements == ()
