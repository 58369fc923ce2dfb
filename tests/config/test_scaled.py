"""scaled: values that follow from another, resolved when something is built."""

from typing import Any

import pytest

from axcore.config import (
    REQUIRED,
    Config,
    Configurable,
    Dim,
    Required,
    config_for,
    scaled,
)
from axcore.errors import ConfigError


def keep(*args: Any, **kw: Any) -> Any:
    return args, kw


class FF(Configurable):
    class Config(Configurable.Config):
        input_dim: Required[int] = REQUIRED
        hidden_dim: Dim = scaled(4, of="input_dim")


class Saver(Configurable):
    class Config(Configurable.Config):
        save_every: Dim = scaled(0.1, of="max_step")
        rate: float = scaled(0.5, of="max_step")
        steps: tuple[int, ...] = (1, scaled(0.5, of="max_step"))


class Trainer(Configurable):
    class Config(Configurable.Config):
        max_step: int = 5000
        saver: Saver.Config = Saver.Config()
        call: Config = config_for(keep, scaled(0.1, of="max_step"), x={"y": scaled(2, of="z")}, z=4)
        ff: FF.Config = FF.Config()


def resolved(value: Any, n: float) -> Any:
    class One(Configurable):
        class Config(Configurable.Config):
            n: float | int = 0
            v: Dim = value

    return One.Config(n=n).instantiate().cfg.v


@pytest.mark.parametrize(
    ("value", "n", "result"),
    [
        (scaled(4, of="n"), 16, 64),
        (scaled(8 / 3, of="n", multiple_of=256), 4096, 11008),
        (scaled(0.5, of="n"), 5, 3),  # half up
        (scaled(0.29, of="n"), 50, 15),  # 14.5, though the binary product is below
        (scaled(0.1, of="n"), 5, 1),
        (scaled(0.1, of="n"), 4, 1),  # never 0 ...
        (scaled(0.1, of="n", minimum=0), 4, 0),  # ... unless asked
        (scaled(1, of="n", multiple_of=8), 9, 16),
        (scaled(1, of="n", multiple_of=8), 16, 16),
        (scaled(-1, of="n", minimum=-100), 3, -3),
    ],
)
def test_rounding(value: Any, n: int, result: int):
    got = resolved(value, n)
    assert got == result and type(got) is int


def test_one_horizon_one_place():
    """`max_step=5` must not leave a save interval of 500."""
    cfg = Trainer.Config().set(max_step=5)
    made = cfg.instantiate()
    assert made.cfg.saver.save_every == 1
    assert made.cfg.saver.steps == (1, 3)
    assert made.cfg.saver.rate == 2.5 and type(made.cfg.saver.rate) is float


def test_it_works_in_arguments_and_containers():
    args, kw = Trainer.Config(max_step=30).instantiate().cfg.call.instantiate()
    assert args == (3,) and kw == {"x": {"y": 8}, "z": 4}


def test_the_source_config_and_its_text_keep_it_unresolved():
    cfg = Trainer.Config()
    cfg.instantiate()
    assert cfg.lines()["saver.save_every"] == 'scaled(0.1, of="max_step")'


def test_what_is_not_known_yet_stays_until_the_parent_says_it():
    made = Trainer.Config().instantiate()
    assert made.cfg.ff.hidden_dim == scaled(4, of="input_dim")
    ff = made.cfg.ff.prepared((made.cfg,), {"input_dim": 16}, "trainer")
    assert (ff.input_dim, ff.hidden_dim) == (16, 64) and ff.frozen


def test_the_nearest_field_of_that_name_counts():
    class Outer(Configurable):
        class Config(Configurable.Config):
            max_step: int = 7
            inner: Trainer.Config = Trainer.Config(max_step=100)

    assert Outer.Config().instantiate().cfg.inner.saver.save_every == 10

    class Same(Configurable):
        class Config(Configurable.Config):
            max_step: Dim = scaled(2, of="max_step")  # not itself: the one above

    class Above(Configurable):
        class Config(Configurable.Config):
            max_step: int = 7
            same: Same.Config = Same.Config()

    assert Above.Config().instantiate().cfg.same.max_step == 14


def test_chains_resolve_and_cycles_are_errors():
    class Chain(Configurable):
        class Config(Configurable.Config):
            a: int = 2
            b: Dim = scaled(3, of="a")
            c: Dim = scaled(5, of="b")

    assert Chain.Config().instantiate().cfg.c == 30
    with pytest.raises(ConfigError, match="depends on itself") as e:
        Chain.Config().set(b=scaled(1, of="c")).instantiate()
    assert e.value.code == "AX112"


def test_a_source_that_does_not_exist_is_an_error_with_near_misses():
    cfg = Saver.Config(save_every=scaled(1, of="max_stp"))
    with pytest.raises(ConfigError, match="neither this config nor one above"):
        cfg.instantiate()
    holder = Trainer.Config(saver=cfg).instantiate()
    with pytest.raises(ConfigError, match="did you mean 'max_step'") as e:
        holder.cfg.saver.prepared((holder.cfg,), {}, "")
    assert e.value.where == "saver.save_every"


def test_a_source_that_is_no_number_is_an_error():
    class Bad(Configurable):
        class Config(Configurable.Config):
            name: str = "x"
            n: Dim = scaled(2, of="name")

    with pytest.raises(ConfigError, match="not a number"):
        Bad.Config().instantiate()


def test_the_derived_value_says_where_it_comes_from():
    cfg = Trainer.Config().instantiate().cfg
    event = cfg.set_by("saver.save_every")
    assert (event.kind, event.name, event.value) == ("derived", "max_step", "500")


def test_prepared_records_the_parents_say():
    cfg = Trainer.Config().ff.prepared((), {"input_dim": 3}, "model.layer")
    event = cfg.set_by("input_dim")
    assert (event.kind, event.name, event.value) == ("derived", "model.layer", "3")


def test_prepared_copies():
    ff = FF.Config()
    ff.prepared((), {"input_dim": 3}, "")
    assert ff.input_dim is REQUIRED and not ff.frozen


def test_prepared_refuses_an_unknown_a_wrong_and_a_missing_value():
    cfg = Trainer.Config()
    with pytest.raises(ConfigError, match="did you mean 'input_dim'") as e:
        cfg.ff.prepared((), {"inputdim": 3}, "m")
    assert (e.value.code, e.value.where) == ("AX102", "ff.inputdim")
    with pytest.raises(ConfigError) as e:
        cfg.ff.prepared((), {"input_dim": "x"}, "m")
    assert (e.value.code, e.value.where) == ("AX101", "ff.input_dim")
    with pytest.raises(ConfigError) as e:
        cfg.ff.prepared((), {}, "m")
    assert (e.value.code, e.value.where) == ("AX103", "ff.input_dim")


def test_prepared_does_not_silently_ignore_what_a_user_set():
    cfg = Trainer.Config()
    cfg.ff.set(input_dim=5)
    with pytest.raises(ConfigError, match="its parent") as e:
        cfg.ff.prepared((), {"input_dim": 3}, "model")
    assert (e.value.code, e.value.where) == ("AX116", "ff.input_dim")
    assert cfg.ff.prepared((), {"input_dim": 5}, "model").input_dim == 5


@pytest.mark.parametrize(
    "kw",
    [
        {"factor": "2", "of": "n"},
        {"factor": 2, "of": "a b"},
        {"factor": 1, "of": "n", "multiple_of": 0},
    ],
)
def test_bad_arguments(kw: dict[str, Any]):
    with pytest.raises(ConfigError):
        scaled(kw.pop("factor"), **kw)


def test_scaled_is_refused_where_no_number_is_accepted():
    class Text(Configurable):
        class Config(Configurable.Config):
            s: str = ""

    with pytest.raises(ConfigError, match="expected str"):
        Text.Config(s=scaled(1, of="n"))


def test_what_is_prepared_is_built_from_without_another_copy():
    cfg = FF.Config().prepared((), {"input_dim": 3}, "")
    assert cfg.instantiate().cfg is cfg
    assert cfg.copy().set(input_dim=4).instantiate().cfg.input_dim == 4
