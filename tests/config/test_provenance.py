"""Who set a value: the history of every path."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from axcore.config import Config, Configurable, Event, Modifier, apply_modifier, author, config_for
from axcore.errors import ConfigError


def fn(x: int = 1) -> int:
    return x


class Linear(Configurable):
    class Config(Configurable.Config):
        bias: bool = True
        rank: int = 0


class Layer(Configurable):
    class Config(Configurable.Config):
        up: Linear.Config = Linear.Config(bias=False)
        stages: tuple[tuple[str, int], ...] = (("a", 1), ("b", 2))
        named: Mapping[str, Linear.Config] = {"a": Linear.Config()}
        call: Config = config_for(fn)


class Ranked(Modifier):
    def __call__(self, cfg):
        return cfg.set(rank=7)


@dataclasses.dataclass(frozen=True)
class Box:
    linear: Linear.Config


def kinds(cfg: Config, path: str) -> list[str]:
    return [f"{e.kind}:{e.name}" for e in cfg.history(path)]


def test_defaults_name_the_class_that_states_them():
    cfg = Layer.Config()
    assert kinds(cfg, "up.rank") == ["default:Linear.Config"]
    assert kinds(cfg, "up.bias") == ["default:Linear.Config", "default:Layer.Config"]
    assert str(cfg.set_by("up.bias")) == "default (Layer.Config)"
    assert cfg.set_by("up.bias").value == "False"
    assert kinds(cfg, "call.x") == ["default:config_for(fn)"]


def test_an_edit_is_recorded_with_author_value_and_line():
    cfg = Layer.Config()
    with author("flag", "--set", plugin="acme"):
        cfg.up.rank = 3
    event = cfg.set_by("up.rank")
    assert (event.kind, event.name, event.plugin, event.value) == ("flag", "--set", "acme", "3")
    file, _, line = str(event.location).rpartition(":")
    assert file == __file__ and int(line) > 0
    assert event.to_json()["location"] == event.location


def line_of(event: Event) -> str:
    """The text of the line that an event names, in this file."""
    file, _, line = str(event.location).rpartition(":")
    assert file == __file__
    return Path(file).read_text().splitlines()[int(line) - 1].strip()


def test_the_line_of_a_modifier_is_the_one_that_applies_it():
    with author("experiment", "mine"):
        cfg = apply_modifier(Linear.Config(), Ranked.Config())
    assert line_of(cfg.set_by("rank")) == "cfg = apply_modifier(Linear.Config(), Ranked.Config())"


def test_without_a_scope_the_module_is_the_author():
    cfg = Layer.Config(up=Linear.Config(rank=1))
    assert kinds(cfg, "up.rank")[-1] == kinds(cfg, "up")[-1] == f"experiment:{__name__}"


def test_scopes_nest_and_end():
    cfg = Linear.Config()
    with author("experiment", "outer"):
        with author("modifier", "inner"):
            cfg.rank = 1
        cfg.rank = 2
    assert kinds(cfg, "rank")[1:] == ["modifier:inner", "experiment:outer"]


def test_every_way_to_edit_is_recorded():
    cfg = Layer.Config()
    with author("file", "a"):
        cfg.set(up=Linear.Config())
        cfg.at("up").set(rank=1)
        cfg.set_path("named.a.rank", 2)
        cfg.set_path_text("call.x", "7")
    for path in ("up", "up.rank", "named.a.rank", "call.x"):
        assert cfg.set_by(path).kind == "file"


def test_an_edit_inside_a_container_belongs_to_that_part_alone():
    cfg = Layer.Config()
    with author("file", "a"):
        cfg.set_path("stages.1.1", 5)
    assert kinds(cfg, "stages.1.1")[-1] == "file:a" and cfg.set_by("stages.1.1").value == "5"
    assert kinds(cfg, "stages.0.1") == ["default:Layer.Config"]
    with author("flag", "b"):
        cfg.set(stages=())
        cfg.set(stages=[["c", 1]])
    assert kinds(cfg, "stages.0.1")[-1] == "flag:b"


def test_placing_a_config_sets_what_it_sets():
    template = Linear.Config(rank=4)
    with author("modifier", "m"):
        cfg = Layer.Config().set(up=template)
    assert kinds(cfg, "up.rank")[-1] == "modifier:m"
    assert kinds(cfg, "up.bias") == ["default:Linear.Config"]


def test_wrapping_a_config_does_not_take_over_what_a_flag_set():
    cfg = Layer.Config()
    with author("flag", "--set"):
        cfg.up.rank = 9
    with author("rule", "tpu-*"):
        cfg.set(named={"wrapped": cfg.up})
    assert cfg.set_by("named.wrapped.rank").kind == "flag"


def test_provenance_is_outside_equality_fingerprint_and_text():
    a = Linear.Config(rank=1)
    with author("flag", "x"):
        b = Linear.Config(rank=1)
    assert a == b and a.fingerprint() == b.fingerprint() and a.to_text() == b.to_text()


def test_copies_keep_it_apart():
    a = Linear.Config(rank=1)
    b = a.copy().set(rank=2)
    assert len(a.history("rank")) == 2 and len(b.history("rank")) == 3


def test_history_of_a_path_to_nothing_names_near_misses():
    with pytest.raises(ConfigError, match="did you mean 'rank'"):
        Layer.Config().history("up.rnk")


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="not one of"):
        author("somebody", "x").__enter__()  # type: ignore[arg-type]


def test_events_are_values():
    assert Event("flag", "x") == Event("flag", "x")
    assert str(Event("flag", "x")) == "flag (x)"
