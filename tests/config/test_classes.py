"""Config classes: pairing, fields, inheritance, and the errors of their declaration."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import pytest

from axcore.config import REQUIRED, Config, Configurable, Dim, Required, UnknownFieldError, scaled
from axcore.errors import ConfigError


class Linear(Configurable):
    class Config(Configurable.Config):
        """A linear layer.

        Args:
            input_dim: Size of the input.
            bias: Whether to add a bias.
        """

        VERSION: ClassVar[int] = 3
        input_dim: Required[int] = REQUIRED
        output_dim: Required[int] = REQUIRED
        bias: bool = True

        def size(self) -> int:
            return self.input_dim * self.output_dim


class Later(Configurable):
    class Config(Configurable.Config):
        after: After.Config | None = None  # defined below
        again: Later.Config | None = None


class After(Configurable):
    class Config(Configurable.Config):
        n: int = 1


class Auto(Linear):
    pass


class Quiet(Linear):
    class Config(Linear.Config):
        bias = False
        width: Dim = scaled(2, of="input_dim")


def test_the_pair_is_found_both_ways():
    assert Linear.Config.target is Linear
    assert Linear.Config().target is Linear
    assert type(Linear.Config(input_dim=1)) is Linear.Config


def test_a_config_class_is_made_when_not_stated():
    assert Auto.Config is not Linear.Config and issubclass(Auto.Config, Linear.Config)
    assert Auto.Config.target is Auto and Linear.Config.target is Linear
    assert Auto.Config(input_dim=3).input_dim == 3
    assert Auto.Config.__qualname__ == "Auto.Config"


def test_keyword_construction_and_attributes():
    cfg = Linear.Config(input_dim=2, output_dim=3)
    cfg.bias = False
    assert (cfg.input_dim, cfg.output_dim, cfg.bias) == (2, 3, False)
    assert cfg.size() == 6


def test_set_is_chainable():
    cfg = Linear.Config()
    assert cfg.set(input_dim=1).set(output_dim=2) is cfg


def test_unset_required_reads_as_REQUIRED():
    assert Linear.Config().input_dim is REQUIRED
    assert Linear.Config(input_dim=1).set(input_dim=REQUIRED).input_dim is REQUIRED


def test_unknown_field_names_the_nearest():
    for act in (
        lambda: Linear.Config(inptu_dim=1),
        lambda: Linear.Config().set(inptu_dim=1),
        lambda: setattr(Linear.Config(), "inptu_dim", 1),
        lambda: Linear.Config().inptu_dim,
    ):
        with pytest.raises(UnknownFieldError, match="did you mean 'input_dim'") as e:
            act()
        assert e.value.code == "AX102" and isinstance(e.value, AttributeError)
    assert not hasattr(Linear.Config(), "nothing")


def test_an_unannotated_default_of_an_inherited_field_counts():
    assert Quiet.Config().bias is False and Linear.Config().bias is True
    assert list(Quiet.Config().fields()) == ["input_dim", "output_dim", "bias", "width"]
    with pytest.raises(ConfigError, match="expected bool"):

        class Bad(Linear):
            class Config(Linear.Config):
                bias = 3


def test_a_default_of_the_wrong_type_raises_at_class_creation():
    with pytest.raises(ConfigError) as e:

        class Bad(Configurable):
            class Config(Configurable.Config):
                n: int = "x"  # type: ignore[assignment]

    assert e.value.where == "Bad.Config.n"


@pytest.mark.parametrize("name", ["copy", "set", "target", "fields", "walk", "frozen", "find"])
def test_a_field_that_hides_a_method_raises_at_class_creation(name: str):
    namespace = {"__annotations__": {name: int}, name: 1, "__module__": __name__}
    with pytest.raises(ConfigError, match="hide a method") as e:
        type(Config)("Config", (Configurable.Config,), {**namespace, "__qualname__": "X.Config"})
    assert e.value.where == f"X.Config.{name}"


def test_a_field_with_an_underscore_raises():
    with pytest.raises(ConfigError, match="underscore"):

        class Bad(Configurable):
            class Config(Configurable.Config):
                _n: int = 1


def test_a_missing_annotation_raises_with_the_way_out():
    with pytest.raises(ConfigError, match="write `n: int"):

        class Bad(Configurable):
            class Config(Configurable.Config):
                n = 4

    with pytest.raises(ConfigError, match="annotation"):

        class Bad2(Configurable):
            class Config(Configurable.Config):
                fn = math.sqrt


def test_a_method_may_not_hide_an_inherited_field():
    with pytest.raises(ConfigError, match="hides the field"):

        class Bad(Linear):
            class Config(Linear.Config):
                def bias(self) -> bool:
                    return True


def test_a_nested_config_must_derive_from_the_parents():
    with pytest.raises(ConfigError, match=r"class Config\(Linear.Config\)"):

        class Bad(Linear):
            class Config(Configurable.Config):
                pass


def test_a_config_class_has_one_target():
    with pytest.raises(ConfigError, match="already configures"):

        class Bad(Linear):
            Config = Linear.Config


def test_class_variables_are_no_fields():
    assert "VERSION" not in Linear.Config().fields() and Linear.Config.VERSION == 3


def test_postponed_annotations_resolve_later_and_local_names():
    assert Later.Config(after=After.Config(n=2), again=Later.Config()).after.n == 2
    with pytest.raises(ConfigError, match=r"After.Config"):
        Later.Config(after=Linear.Config())

    class Local(Configurable):
        class Config(Configurable.Config):
            n: int = 1

    class Holder(Configurable):
        class Config(Configurable.Config):
            local: Local.Config = Local.Config()
            own: Holder.Config | None = None

    assert Holder.Config(local=Local.Config(n=3)).local.n == 3


def test_an_annotation_that_names_nothing_is_an_error_with_the_way_out():
    class Bad(Configurable):
        class Config(Configurable.Config):
            x: Nowhere = 1  # type: ignore[name-defined]  # noqa: F821

    with pytest.raises(ConfigError, match="TYPE_CHECKING") as e:
        Bad.Config()
    assert e.value.code == "AX106"


def test_several_bases_join_their_fields():
    class A(Configurable):
        class Config(Configurable.Config):
            a: int = 1
            both: int = 1

    class B(Configurable):
        class Config(Configurable.Config):
            b: int = 2
            both: int = 2

    class AB(A, B):
        pass

    cfg = AB.Config()
    assert (cfg.a, cfg.b, cfg.both) == (1, 2, 1)  # the first base wins, as for methods
    assert isinstance(cfg, A.Config) and isinstance(cfg, B.Config)


def test_fields_say_what_they_accept_and_mean():
    info = Linear.Config().fields()["bias"]
    assert (info.name, info.annotation, info.default) == ("bias", bool, True)
    assert info.doc == "Whether to add a bias." and info.expected == "bool"
    assert Linear.Config().fields()["input_dim"].default is REQUIRED


def test_instantiate_builds_through_from_config():
    class Named(Configurable):
        def __init__(self, cfg: Configurable.Config, name: str):
            super().__init__(cfg)
            self.name = name

        @classmethod
        def from_config(cls, cfg: Configurable.Config, *, name: str) -> Named:
            return cls(cfg, name + "!")

    made = Named.Config().instantiate(name="m")
    assert made.name == "m!" and made.cfg.frozen and made.cfg == Named.Config()


def test_a_missing_required_value_raises_when_that_node_is_instantiated():
    with pytest.raises(ConfigError, match="input_dim is required") as e:
        Linear.Config(output_dim=1).instantiate()
    assert e.value.code == "AX103" and e.value.where == "input_dim"

    class Outer(Configurable):
        class Config(Configurable.Config):
            up: Linear.Config = Linear.Config()

    outer = Outer.Config().instantiate()  # the parent gives its children their dims
    with pytest.raises(ConfigError) as e:
        outer.cfg.up.instantiate()
    assert e.value.where == "up.input_dim"


def test_a_config_without_a_target_cannot_be_instantiated():
    class Plain(Config):
        n: int = 1

    with pytest.raises(ConfigError, match="configures no class"):
        Plain().instantiate()


def test_a_callable_default_is_a_field_value():
    class Act(Configurable):
        class Config(Configurable.Config):
            fn: Callable[[float], float] = math.sqrt

    class Tanh(Act):
        class Config(Act.Config):
            fn = math.tanh

    assert Act.Config().fn is math.sqrt and Tanh.Config().fn is math.tanh
