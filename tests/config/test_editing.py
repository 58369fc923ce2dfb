"""Paths, patterns, find, at: edits reach everything, also inside dataclasses, and miss nothing."""

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

from axcore.config import Config, Configurable, Scaled, matches, partial_for
from axcore.errors import ConfigError


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Leaf(Configurable):
    class Config(Configurable.Config):
        n: int = 1
        s: str = ""


class SubLeaf(Leaf):
    pass


@dataclasses.dataclass(frozen=True)
class Box:
    size: float
    leaf: Leaf.Config


class Tree(Configurable):
    class Config(Configurable.Config):
        leaf: Leaf.Config = Leaf.Config()
        leaves: tuple[Leaf.Config, ...] = (Leaf.Config(), SubLeaf.Config())
        named: Mapping[str, Leaf.Config] = {"held-out": Leaf.Config()}
        box: Box = Box(1.0, Leaf.Config())
        rules: tuple[tuple[str, tuple[Leaf.Config, ...]], ...] = (("tpu-*", (Leaf.Config(),)),)
        color: Color = Color.RED
        mode: Literal["fast", "slow"] = "fast"
        flag: bool = False
        rate: float = 0.1
        limit: int | None = None
        ints: tuple[int, ...] = ()
        text_or_int: str | int = ""
        fn: Callable[..., Any] = len
        child: Config | None = None


PATHS = ["", "leaf", "leaves.0", "leaves.1", "named.held-out", "box.leaf", "rules.0.1.0"]


def test_walk_is_in_pre_order_and_reaches_into_every_container():
    assert [path for path, _ in Tree.Config().walk()] == PATHS


def test_find_takes_subclasses_too():
    cfg = Tree.Config()
    assert list(cfg.find(Leaf.Config)) == PATHS[1:]
    assert list(cfg.find(SubLeaf.Config)) == ["leaves.1"]
    assert cfg.find(SubLeaf.Config)["leaves.1"] is cfg.leaves[1]
    with pytest.raises(ConfigError, match=r"write Leaf\.Config"):
        cfg.find(Leaf)


def test_get_path_reads_what_set_path_sets():
    cfg = Tree.Config()
    for i, path in enumerate(PATHS[1:]):
        assert cfg.set_path(f"{path}.n", 10 + i) is cfg
        assert cfg.get_path(f"{path}.n") == 10 + i
    cfg.set_path("box.size", 3).set_path("rules.0.0", "gpu-*").set_path(
        "leaves.1", SubLeaf.Config(n=9)
    )
    assert (cfg.box.size, cfg.rules[0][0], cfg.leaves[1].n) == (3.0, "gpu-*", 9)
    assert cfg.box.leaf.n == 14 and cfg.rules[0][1][0].n == 15  # rebuilt around, nothing lost


def test_edits_inside_a_dataclass_survive_edits_beside_them():
    cfg = Tree.Config()
    cfg.box.leaf.set(n=5)
    cfg.set_path("box.size", 2.0)
    cfg.set(leaf=Leaf.Config())
    assert cfg.copy().box.leaf.n == 5


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        ("leaf.n", "x", "leaf.n"),
        ("leaves.1.n", 1.5, "leaves.1.n"),
        ("box.size", "x", "box.size"),
        ("box.leaf.n", None, "box.leaf.n"),
        ("rules.0.1.0", 3, "rules.0.1.0"),
        ("named.held-out.n", True, "named.held-out.n"),
    ],
)
def test_errors_name_the_full_path(path: str, value: Any, where: str):
    with pytest.raises(ConfigError) as e:
        Tree.Config().set_path(path, value)
    assert e.value.where == where


def test_errors_of_an_attribute_deep_below_name_the_full_path():
    outer = Tree.Config(child=Tree.Config(child=Tree.Config()))
    with pytest.raises(ConfigError) as e:
        outer.child.child.box.leaf.n = "x"
    assert e.value.where == "child.child.box.leaf.n"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("leef.n", "did you mean 'leaf'"),
        ("leaf.m", "its fields are: n, s"),
        ("leaves.2.n", "it has: 0, 1"),
        ("named.heldout.n", "did you mean 'held-out'"),
        ("rate.x", "it has no parts"),
    ],
)
def test_a_path_to_nothing_names_near_misses(path: str, hint: str):
    for act in (lambda c: c.get_path(path), lambda c: c.set_path(path, 1)):
        with pytest.raises(ConfigError, match=hint):
            act(Tree.Config())


@pytest.mark.parametrize(
    ("pattern", "path", "result"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("*", "", False),
        ("layer*", "layer12", True),
        ("**", "", True),
        ("**", "a.b", True),
        ("**.b", "b", True),
        ("**.b", "a.a.b", True),
        ("a.**.d", "a.b.c.d", True),
        ("a.**.d", "b.d", False),
        ("A", "a", False),
    ],
)
def test_patterns(pattern: str, path: str, result: bool):
    assert matches(pattern, path) is result


def test_at_sets_all_that_match_and_returns_the_root():
    cfg = Tree.Config()
    assert cfg.at("leaves.*").set(n=4) is cfg
    assert [leaf.n for leaf in cfg.leaves] == [4, 4] and cfg.leaf.n == 1
    cfg.at("**.leaf").set(n=6)
    assert (cfg.leaf.n, cfg.box.leaf.n) == (6, 6)
    assert list(cfg.at("named.*").nodes) == ["named.held-out"]


def test_at_sets_all_or_nothing():
    cfg = Tree.Config(child=Tree.Config())
    with pytest.raises(ConfigError, match="no field 'n'") as e:
        cfg.at("*").set(n=3)  # `leaf` has n, `child` does not
    assert e.value.where == "child.n"
    assert cfg.leaf.n == 1


def test_a_pattern_that_matches_nothing_raises_with_near_misses():
    with pytest.raises(ConfigError, match=r"did you mean 'leaves\.0'") as e:
        Tree.Config().at("leavs.0")
    assert e.value.code == "AX108"


@pytest.mark.parametrize(
    ("path", "text", "value"),
    [
        ("leaf.n", "3", 3),
        ("leaf.s", "3", "3"),
        ("leaf.s", "a b", "a b"),
        ("leaf.s", '"a b"', "a b"),
        ("flag", "true", True),
        ("flag", "False", False),
        ("rate", "3e-4", 3e-4),
        ("rate", "1", 1.0),
        ("limit", "none", None),
        ("limit", "5", 5),
        ("ints", "1,2", (1, 2)),
        ("ints", "[1, 2]", (1, 2)),
        ("ints", "()", ()),
        ("color", "BLUE", Color.BLUE),
        ("mode", "slow", "slow"),
        ("text_or_int", "5", 5),
        ("text_or_int", "five", "five"),
        ("fn", 'ref("builtins.max")', max),
        ("leaf.n", 'scaled(2, of="m")', Scaled(2, "m")),
        ("rules.0.0", "gpu-*", "gpu-*"),
    ],
)
def test_text_is_read_by_the_type_of_the_field(path: str, text: str, value: Any):
    got = Tree.Config().set_path_text(path, text).get_path(path)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("path", "text"),
    [("leaf.n", "x"), ("leaf.n", "1.5"), ("flag", "1"), ("mode", "medium"), ("color", "GREEN")],
)
def test_text_of_the_wrong_type_is_refused(path: str, text: str):
    with pytest.raises(ConfigError) as e:
        Tree.Config().set_path_text(path, text)
    assert (e.value.code, e.value.where) == ("AX101", path)


def test_text_may_name_a_config_of_a_trusted_package():
    text = f'config("{__name__}.SubLeaf")'
    with pytest.raises(ConfigError, match="--trust"):
        Tree.Config().set_path_text("leaf", text)
    cfg = Tree.Config().set_path_text("leaf", text, trusted=(__name__.split(".")[0],))
    assert type(cfg.leaf) is SubLeaf.Config


def test_arguments_of_callables_have_paths_too():
    cfg = Tree.Config(child=partial_for(round, ndigits=2))
    cfg.set_path_text("child.ndigits", "3")
    assert cfg.child.instantiate()(1.23456) == 1.235
