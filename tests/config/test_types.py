"""Values are checked when set, deep inside containers too, and the error names the path."""

import dataclasses
import enum
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NewType, Protocol, runtime_checkable

import numpy as np
import pytest

from axcore.config import Config, Configurable, FrozenMapping, config_for, partial_for
from axcore.errors import ConfigError


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Normal:
    stddev: float = 0.02
    scales: tuple[float, ...] = ()


@dataclasses.dataclass
class Loose:
    x: int = 0


@runtime_checkable
class Initializer(Protocol):
    stddev: float


class Inner(Configurable):
    class Config(Configurable.Config):
        n: int = 1


class Other(Configurable):
    pass


@dataclasses.dataclass(frozen=True)
class Rule:
    pattern: str
    configs: tuple[Inner.Config, ...] = ()


@dataclasses.dataclass(frozen=True)
class Named:
    kind: ClassVar[str] = "named"
    weight: float = 1.0


Steps = NewType("Steps", int)


class Everything(Configurable):
    class Config(Configurable.Config):
        b: bool = False
        i: int = 0
        f: float = 0.0
        s: str = ""
        n: None = None
        u: int | None = None
        number: float | int = 0
        lit: Literal["a", 1] = "a"
        color: Color = Color.RED
        ints: tuple[int, ...] = ()
        pair: tuple[str, int] = ("x", 1)
        seq: Sequence[int] = ()
        table: Mapping[str, float] = {}
        deep: Mapping[str, tuple[int | None, ...]] = {}
        record: Normal = Normal()
        init: Initializer = Normal()
        fn: Callable[[float], float] = math.sqrt
        kind: type[Exception] = ValueError
        inner: Inner.Config = Inner.Config()
        maybe: Inner.Config | None = None
        role: Config = Inner.Config()
        rules: tuple[tuple[str, tuple[Inner.Config, ...]], ...] = ()
        records: tuple[Rule, ...] = ()
        any: Any = None
        steps: Steps = Steps(1)
        noted: Annotated[int, "a note"] = 0


def accepted(**kw: Any) -> Any:
    (name,) = kw
    return Everything.Config(**kw).get_path(name)


@pytest.mark.parametrize(
    "kw",
    [
        {"b": 1},
        {"b": None},
        {"i": True},
        {"i": 1.0},
        {"i": "1"},
        {"f": True},
        {"f": "1"},
        {"s": 1},
        {"s": b"x"},
        {"n": 0},
        {"u": "x"},
        {"number": True},
        {"lit": True},
        {"lit": 1.0},
        {"lit": "b"},
        {"color": 1},
        {"color": "RED"},
        {"ints": 1},
        {"ints": "12"},
        {"ints": {1, 2}},
        {"ints": (i for i in (1, 2))},
        {"pair": ("x",)},
        {"pair": (1, "x")},
        {"table": [("a", 1.0)]},
        {"record": 0.02},
        {"record": Loose()},
        {"init": Inner.Config()},
        {"fn": 1},
        {"fn": config_for(math.sqrt, 1.0)},
        {"kind": int},
        {"kind": ValueError()},
        {"inner": Inner},
        {"inner": Other.Config()},
        {"inner": None},
        {"role": Inner},
        {"role": math.sqrt},
        {"any": object()},
        {"any": {1, 2}},
        {"any": b"x"},
        {"any": 1j},
        {"any": Loose()},
        {"any": {1: 2}},
        {"any": Inner(Inner.Config())},
        {"any": np},
        {"steps": "x"},
        {"noted": 1.5},
    ],
    ids=lambda kw: next(iter(kw)),  # no repr: it has addresses, which workers do not share
)
def test_wrong_types_are_refused_and_named(kw: dict[str, Any]):
    (name,) = kw
    with pytest.raises(ConfigError) as e:
        Everything.Config(**kw)
    assert e.value.code == "AX101"
    assert e.value.where == name or str(e.value.where).startswith(name + ".")


@pytest.mark.parametrize(
    ("kw", "path"),
    [
        ({"ints": [1, "2"]}, "ints.1"),
        ({"ints": (1, True)}, "ints.1"),
        ({"table": {"a": 1.0, "b": "x"}}, "table.b"),
        ({"deep": {"a": [1, None], "b": [1, 2.5]}}, "deep.b.1"),
        ({"record": Normal(stddev="x")}, "record.stddev"),  # type: ignore[arg-type]
        ({"record": Normal(scales=(1.0, "x"))}, "record.scales.1"),  # type: ignore[arg-type]
        ({"rules": [("tpu-*", [Inner.Config(), 3])]}, "rules.0.1.1"),
        ({"records": [Rule("a", (Other.Config(),))]}, "records.0.configs.0"),  # type: ignore[arg-type]
        ({"any": [1, {"x": [object()]}]}, "any.1.x.0"),
    ],
)
def test_contents_of_containers_and_dataclasses_are_checked(kw: dict[str, Any], path: str):
    with pytest.raises(ConfigError) as e:
        Everything.Config(**kw)
    assert e.value.where == path


def test_numpy_scalars_are_refused_with_the_way_out():
    for name, value in [
        ("f", np.float64(1)),
        ("i", np.int32(1)),
        ("s", np.str_("x")),
        ("any", np.zeros(2)),
    ]:
        with pytest.raises(ConfigError, match=r"\.item\(\)"):
            Everything.Config(**{name: value})


def test_dtype_objects_are_refused_with_the_way_out():
    for value in (np.float32, np.dtype("int8")):
        with pytest.raises(ConfigError, match="by name"):
            Everything.Config(s=value)


def test_int_is_promoted_to_float():
    value = accepted(f=3)
    assert type(value) is float and value == 3.0
    assert [type(v) for v in accepted(table={"a": 1}).values()] == [float]


def test_int_stays_int_where_both_are_accepted():
    assert type(accepted(number=3)) is int
    assert type(accepted(number=3.0)) is float


def test_list_is_stored_as_tuple():
    value = [1, 2]
    cfg = Everything.Config(ints=value)
    value.append("x")  # type: ignore[arg-type]
    assert cfg.ints == (1, 2)
    assert Everything.Config(any=[[1], [2]]).any == ((1,), (2,))


def test_mapping_is_stored_frozen_and_in_order():
    value = {"b": 1.0, "a": 2.0}
    cfg = Everything.Config(table=value)
    value["b"] = 5.0
    assert isinstance(cfg.table, FrozenMapping)
    assert list(cfg.table.items()) == [("b", 1.0), ("a", 2.0)]
    assert cfg.table == {"a": 2.0, "b": 1.0}
    assert Everything.Config(table=types.MappingProxyType(value)).table["b"] == 5.0


def test_dataclass_contents_are_converted():
    assert accepted(record=Normal(1, [2])) == Normal(1.0, (2.0,))  # type: ignore[arg-type]
    assert type(accepted(record=Normal(1)).stddev) is float


def test_enum_literal_union_callable_and_type_are_accepted():
    assert accepted(color=Color.BLUE) is Color.BLUE
    assert accepted(lit=1) == 1
    assert accepted(u=5) == 5
    assert accepted(fn=math.tanh) is math.tanh
    assert accepted(kind=KeyError) is KeyError
    assert accepted(maybe=Inner.Config(n=2)).n == 2
    assert accepted(role=config_for(math.sqrt, 1.0)).instantiate() == 1.0
    assert accepted(any=np.tanh) is np.tanh


def test_functools_partial_becomes_partial_for():
    value = accepted(fn=functools.partial(math.isclose, rel_tol=0.5))
    assert isinstance(value, type(partial_for(math.isclose)))
    assert value(1.0, 1.4) is True


def test_huge_int_in_a_float_field_is_refused():
    with pytest.raises(ConfigError, match="too large"):
        accepted(f=10**400)


def test_functions_without_a_public_path_are_refused_with_the_way_out():
    def local(x: float) -> float:
        return x

    for value, words in [(lambda x: x, "lambda"), (local, "local"), ("x".join, "bound")]:
        with pytest.raises(ConfigError, match=words) as e:
            Everything.Config(fn=value)
        assert e.value.hint


def test_key_that_would_break_a_path_is_refused_only_where_configs_are():
    assert Everything.Config(any={"a.b": 1}).any["a.b"] == 1
    with pytest.raises(ConfigError, match="without dots"):
        Everything.Config(any={"a.b": Inner.Config()})


@pytest.mark.parametrize(
    ("annotation", "hint"),
    [
        (list[int], "tuple"),
        (dict[str, int], "Mapping"),
        (set, "tuple"),
        (Mapping[int, int], "str"),
        (Loose, "frozen"),
        (bytes, "use"),
    ],
)
def test_annotation_that_could_not_be_kept_is_refused_at_class_creation(annotation: Any, hint: str):
    with pytest.raises(ConfigError) as e:
        type(
            "Config",
            (Configurable.Config,),
            {
                "__annotations__": {"x": annotation},
                "__qualname__": "A.Config",
                "__module__": __name__,
            },
        )
    assert e.value.code == "AX105" and hint in str(e.value)


def test_a_failed_set_changes_nothing():
    cfg = Everything.Config()
    with pytest.raises(ConfigError):
        cfg.set(i=5, f="x")
    assert cfg == Everything.Config()


def test_a_class_variable_of_a_record_is_none_of_its_fields():
    class Owner(Configurable):
        class Config(Configurable.Config):
            value: Named = Named()

    cfg = Owner.Config(value=Named(weight=2))
    assert cfg.value == Named(weight=2.0)
    with pytest.raises(ConfigError, match=r"weight"):
        cfg.value = Named(weight="heavy")  # pyright: ignore[reportArgumentType]


class Recorded(Configurable):
    class Config(Configurable.Config):
        record: Normal = Normal()
        either: Normal | Mapping[str, float] = Normal()
        rule: Rule = Rule("*")


def test_a_mapping_is_stored_as_the_record_that_the_field_holds():
    cfg = Recorded.Config(record={"scales": [1, 2]}, either={"stddev": 1})
    assert cfg.record == Normal(scales=(1.0, 2.0))
    assert cfg.either == FrozenMapping({"stddev": 1.0})
    cfg.set_path_text("record", '{"stddev": 3}')
    assert cfg.record == Normal(3.0)


@pytest.mark.parametrize(
    "given,words",
    [
        ({"record": {"stdev": 1.0}}, ("record", "'stdev'", "fields of a Normal", "'stddev'")),
        ({"record": {"scales": ["x"]}}, ("record.scales.0", "'x'", "float")),
        ({"rule": {}}, ("rule", "without 'pattern'", "Rule", "pattern, configs")),
    ],
)
def test_a_mapping_that_is_no_record_says_what_is_wrong(given, words):
    with pytest.raises(ConfigError) as raised:
        Recorded.Config(**given)
    for word in words:
        assert word in str(raised.value)
