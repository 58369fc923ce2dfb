"""config_for and partial_for: any callable, checked against its signature, no wrapper."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import optax
import pytest

from axcore.config import REQUIRED, Config, Configurable, config_for, partial_for, scaled
from axcore.errors import ConfigError


def record(a: int, b: float = 2.0, /, c: int = 3, *args: int, d: str = "d", **kw: Any) -> Any:
    return (a, b, c, args, d, kw)


def collect(**kw: Any) -> dict[str, Any]:
    return kw


def copying(x: int, copy: bool = False, set: int = 0, target: str = "") -> Any:
    return (x, copy, set, target)


def opaque_default(x: int, fn: Callable[[int], int] = lambda v: v + 1) -> int:
    return fn(x)


def failing(x: int) -> int:
    raise RuntimeError("inside")


class Point:
    def __init__(self, x: int, y: int = 0):
        self.x, self.y = x, y


class Holder(Configurable):
    class Config(Configurable.Config):
        call: Config = config_for(record, 1)
        fn: Callable[..., Any] = math.sqrt


def test_it_calls_on_instantiation():
    assert config_for(math.hypot, 3.0, 4.0).instantiate() == 5.0
    assert config_for(Point, x=1, y=2).instantiate().y == 2


def test_every_kind_of_parameter_is_passed_as_declared():
    assert config_for(record, 1).instantiate() == (1, 2.0, 3, (), "d", {})
    cfg = config_for(record, 1, 2, 3, 4, 5, d="x", e=6)
    assert cfg.instantiate() == (1, 2.0, 3, (4, 5), "x", {"e": 6}) or cfg.instantiate()[1] == 2
    assert cfg.args == (4, 5) and cfg.e == 6


def test_varargs_of_configs_are_instantiated():
    cfg = config_for(optax.chain, config_for(optax.clip, 1.0), config_for(optax.sgd, 0.1))
    assert [n.max_delta for n in cfg.args[:1]] == [1.0]
    update = cfg.instantiate()
    state = update.init({"w": 0.0})
    out, _ = update.update({"w": 5.0}, state)
    assert float(out["w"]) == pytest.approx(-0.1)


def test_configs_deep_in_the_arguments_are_instantiated_and_mappings_are_plain_dicts():
    cfg = config_for(collect, a={"x": [config_for(math.sqrt, 4.0)]}, b=config_for(collect, c=1))
    made = cfg.instantiate()
    assert made == {"a": {"x": (2.0,)}, "b": {"c": 1}} and type(made["a"]) is dict


def test_named_tuples_that_a_call_returns_stay_named_tuples():
    made = config_for(collect, a=(config_for(optax.sgd, 0.1),)).instantiate()
    assert hasattr(made["a"][0], "init")


def test_arguments_are_checked_against_the_signature():
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'") as e:
        config_for(optax.adamw, learning_rte=1e-3)
    assert e.value.code == "AX114"
    with pytest.raises(ConfigError, match="twice"):
        config_for(optax.adamw, 1e-3, learning_rate=1e-3)
    with pytest.raises(ConfigError, match="at most 2"):
        config_for(Point, 1, 2, 3)
    with pytest.raises(ConfigError, match="did you mean 'weight_decay'"):
        config_for(optax.adamw, 1e-3).set(weight_decy=0.1)


def test_a_missing_argument_raises_when_that_node_is_instantiated():
    cfg = Holder.Config(call=config_for(optax.adamw))
    assert cfg.call.learning_rate is REQUIRED
    with pytest.raises(ConfigError, match="learning_rate is required") as e:
        cfg.call.instantiate()
    assert e.value.where == "call.learning_rate"


def test_literal_defaults_are_fields_and_others_are_left_to_the_callable():
    assert config_for(optax.adamw, 1e-3).b1 == 0.9
    cfg = config_for(opaque_default, 1)
    assert "fn" in cfg.fields() and not hasattr(cfg, "fn")
    assert cfg.instantiate() == 2
    assert cfg.set(fn=math.factorial, x=4).instantiate() == 24


def test_arguments_named_like_config_methods_work():
    cfg = config_for(copying, 1, copy=True, set=2, target="t")
    assert cfg.copy() == cfg and cfg.get_path("copy") is True
    assert cfg.instantiate() == (1, True, 2, "t")
    assert Config.from_text(cfg.to_text(), trusted=("tests",)) == cfg


def test_further_keywords_are_fields_of_the_one_config():
    cfg, other = config_for(collect, a=1), config_for(collect, b=2)
    assert list(cfg.fields()) == ["a"] and list(other.fields()) == ["b"]
    assert cfg.copy().set(c=3).instantiate() == {"a": 1, "c": 3}
    assert "c" not in cfg.fields()


def test_callables_that_tell_no_signature_take_anything():
    cfg = config_for(dict, a=1)
    assert cfg.instantiate() == {"a": 1}


def test_call_time_arguments_take_precedence():
    assert config_for(Point, x=1).instantiate(y=5).y == 5
    assert config_for(Point).set(x=1).instantiate(x=2).x == 2


def test_what_has_a_config_of_its_own_or_no_public_path_is_refused():
    with pytest.raises(ConfigError, match=r"write Holder\.Config"):
        config_for(Holder)
    with pytest.raises(ConfigError, match="lambda"):
        config_for(lambda: 1)
    with pytest.raises(ConfigError, match="takes a function"):
        config_for(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config_for"):
        config_for(Point, x=optax.sgd(0.1))


def test_an_error_of_the_callable_says_at_which_path():
    cfg = Holder.Config(call=config_for(failing, 1))
    with pytest.raises(RuntimeError) as e:
        cfg.call.instantiate()
    assert e.value.__notes__ == ["while calling config_for(failing) at call"]


def test_partial_for_binds_what_is_not_the_default():
    made = partial_for(round, ndigits=1).instantiate()
    assert isinstance(made, functools.partial) and made(1.26) == 1.3
    bound = partial_for(record, d="x", c=3).instantiate()
    assert bound.keywords == {"d": "x"} and bound(1) == (1, 2.0, 3, (), "x", {})


def test_partial_for_can_be_called_itself():
    cfg = Holder.Config(fn=partial_for(math.isclose, rel_tol=0.5))
    assert cfg.fn(1.0, 1.4) is True


def test_functools_partial_becomes_a_config():
    cfg = Holder.Config(fn=functools.partial(math.isclose, rel_tol=0.5))
    assert cfg.lines()["fn"] == 'partial_for("math.isclose")' and cfg.fn.rel_tol == 0.5
    assert config_for(functools.partial(Point, y=7), x=1).instantiate().y == 7
    with pytest.raises(ConfigError, match="named arguments only"):
        Holder.Config(fn=functools.partial(math.pow, 2.0))


def test_nested_calls_see_scaled_values_of_the_configs_above():
    class Root(Configurable):
        class Config(Configurable.Config):
            max_step: int = 1000
            opt: Config = config_for(
                optax.sgd,
                config_for(
                    optax.cosine_decay_schedule, 0.1, decay_steps=scaled(0.5, of="max_step")
                ),
            )
            table: Mapping[str, Config] = {}

    cfg = Root.Config(max_step=10)
    assert cfg.opt.learning_rate.instantiate()(5) == pytest.approx(0.0)
    assert cfg.instantiate().cfg.opt.learning_rate.decay_steps == 5
