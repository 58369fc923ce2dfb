"""Configs are values: assignment copies, building freezes, equality and pickles go through text."""

import copy
import dataclasses
import math
import pickle
import weakref
from collections.abc import Mapping
from typing import Any

import pytest

from axcore.config import Config, Configurable, author, config_for
from axcore.errors import ConfigError


class Leaf(Configurable):
    class Config(Configurable.Config):
        n: int = 1
        x: float = 0.5
        any: Any = None


@dataclasses.dataclass(frozen=True)
class Pair:
    left: Leaf.Config
    right: Leaf.Config


class Tree(Configurable):
    class Config(Configurable.Config):
        leaf: Leaf.Config = Leaf.Config()
        leaves: tuple[Leaf.Config, ...] = ()
        named: Mapping[str, Leaf.Config] = {}
        pair: Pair | None = None
        call: Config = config_for(math.isclose, 1.0, 2.0)


def full() -> Tree.Config:
    leaf = Leaf.Config(n=2)
    return Tree.Config(leaf=leaf, leaves=[leaf, leaf], named={"a": leaf}, pair=Pair(leaf, leaf))


def test_assignment_copies():
    leaf = Leaf.Config(n=2)
    cfg = Tree.Config(leaf=leaf)
    leaf.n = 3
    assert cfg.leaf.n == 2 and cfg.leaf is not leaf


def test_a_config_placed_twice_is_two_values():
    cfg = full()
    cfg.leaves[0].n = 7
    assert [leaf.n for leaf in cfg.leaves] == [7, 2]
    cfg.pair.left.set(n=9)
    assert (cfg.pair.left.n, cfg.pair.right.n) == (9, 2)


def test_instances_never_share_defaults():
    Tree.Config().leaf.n = 5
    assert Tree.Config().leaf.n == 1


def test_copies_are_equal_and_independent():
    a = full()
    for b in (a.copy(), copy.copy(a), copy.deepcopy(a)):
        assert b == a
        b.named["a"].n = 8
        assert b != a and a.named["a"].n == 2


def test_instantiate_freezes_a_copy_and_leaves_the_source_as_it_is():
    cfg = full()
    built = cfg.instantiate()
    assert built.cfg.frozen and not cfg.frozen and built.cfg is not cfg
    cfg.leaf.n = 100
    assert built.cfg.leaf.n == 2


def test_a_frozen_config_refuses_edits_and_names_path_and_way_out():
    cfg = full().freeze()
    for act, path in [
        (lambda: cfg.set(leaf=Leaf.Config()), "leaf"),
        (lambda: setattr(cfg.leaf, "n", 3), "leaf.n"),
        (lambda: cfg.set_path("leaves.1.n", 3), "leaves.1.n"),
        (lambda: cfg.at("named.*").set(n=1), "named.a.n"),
        (lambda: cfg.replace(Leaf.Config, Leaf.Config()), "leaf"),
    ]:
        with pytest.raises(ConfigError, match=r"\.copy\(\)") as e:
            act()
        assert (e.value.code, e.value.where) == ("AX104", path)
    assert not cfg.copy().frozen and cfg.copy().set(leaf=Leaf.Config(n=4)).leaf.n == 4


def test_fields_cannot_be_deleted():
    with pytest.raises(ConfigError, match="deleted"):
        del full().leaf


def test_equality_distinguishes_what_text_distinguishes():
    def of(value: Any) -> Leaf.Config:
        return Leaf.Config(any=value)

    assert of(1) != of(1.0)
    assert of(1) != of(True)
    assert of(0.0) != of(-0.0)
    assert of(math.nan) == of(math.nan)
    assert of("1") != of(1)
    assert of([1]) == of((1,))
    assert of({"a": 1, "b": 2}) != of({"b": 2, "a": 1})
    assert Leaf.Config() != 3


def test_only_frozen_configs_are_hashable():
    with pytest.raises(TypeError, match="freeze"):
        hash(full())
    assert len({full().freeze(), full().freeze(), Tree.Config().freeze()}) == 2


def test_pickles_keep_value_provenance_and_frozenness():
    with author("flag", "--set"):
        cfg = full().set(leaf=Leaf.Config(n=11))
    back = pickle.loads(pickle.dumps(cfg))
    assert back == cfg and type(back) is Tree.Config
    assert back.history("leaf.n") == cfg.history("leaf.n")
    assert back.set_by("leaf.n").kind == "flag"
    assert not back.frozen and pickle.loads(pickle.dumps(cfg.freeze())).leaf.frozen


def test_what_cannot_be_pickled_says_why():
    class Local(Configurable):
        pass

    with pytest.raises(ConfigError, match="local") as e:
        pickle.dumps(Local.Config())
    assert "module level" in str(e.value.hint)
    assert Local.Config() == Local.Config()  # equality needs no public name


def test_a_config_is_freed_without_the_garbage_collector():
    cfg = full()
    gone = weakref.ref(cfg.leaf)
    del cfg
    assert gone() is None


def test_repr_shows_what_was_set():
    assert repr(Leaf.Config(n=3)) == "Leaf.Config(n=3)"


def test_dir_lists_the_fields():
    assert {"n", "x", "set"} <= set(dir(Leaf.Config()))
