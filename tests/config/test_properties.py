"""Laws of configs over arbitrary ones (hypothesis)."""

import dataclasses
import enum
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from axcore.config import (
    REQUIRED,
    Config,
    Configurable,
    Dim,
    Modifier,
    apply_modifier,
    config_for,
    diff,
    parse_value,
    partial_for,
    scaled,
)

TRUSTED = (__name__.split(".")[0],)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Record:
    x: Any = 0
    y: float = 0.0


class Leaf(Configurable):
    class Config(Configurable.Config):
        any: Any = None
        dim: Dim = 1
        number: float = 0.0
        text: str = ""


class Tree(Configurable):
    class Config(Configurable.Config):
        leaf: Config = Leaf.Config()
        items: tuple[Any, ...] = ()
        table: Mapping[str, Any] = {}
        record: Record = Record()
        fn: Callable[..., Any] = math.sqrt


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.sampled_from(Color),
    st.sampled_from([math.sqrt, max, int, Leaf]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.text(), inner, max_size=3),
        st.builds(Record, x=inner, y=st.floats()),
    ),
    max_leaves=6,
)
dims = st.one_of(
    st.integers(),
    st.just(REQUIRED),
    st.builds(
        scaled,
        st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
        of=st.sampled_from(["n", "max_step"]),
        multiple_of=st.integers(1, 512),
        minimum=st.integers(-5, 5),
    ),
)
leaves = st.builds(
    Leaf.Config, any=values, dim=dims, number=st.floats() | st.integers(-99, 99), text=st.text()
)
calls = st.one_of(
    st.builds(lambda x, y: config_for(math.hypot, x, y), values, values),
    st.builds(lambda x: partial_for(math.isclose, rel_tol=x), st.floats()),
    st.builds(lambda kw: config_for(dict, **kw), st.dictionaries(st.sampled_from("abc"), values)),
)
keys = st.text(st.characters(codec="ascii", exclude_characters=".: \n"), min_size=1).filter(
    lambda s: s.strip() == s and s.isprintable() and s.isascii()
)


def trees(child: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        Tree.Config,
        leaf=child,
        items=st.lists(child | values, max_size=3),
        table=st.dictionaries(keys, child | values, max_size=3),
        record=st.builds(Record, x=child | values),
        fn=st.sampled_from([math.sqrt, math.tanh]),
    )


configs = st.recursive(leaves | calls, trees, max_leaves=5)


@given(values)
def test_the_text_of_a_value_reads_back(value: Any):
    cfg = Leaf.Config(any=value)
    text = cfg.lines()["any"]
    assert "\n" not in text
    assert Leaf.Config(any=parse_value(text, TRUSTED)) == cfg


@given(configs)
def test_text_round_trip(cfg: Any):
    text = cfg.to_text()
    back = Config.from_text(text, trusted=TRUSTED)
    assert back == cfg and back.to_text() == text and type(back) is type(cfg)
    assert back.fingerprint() == cfg.fingerprint()


@given(configs)
def test_copies_and_pickles_are_equal_with_the_same_history(cfg: Any):
    for back in (cfg.copy(), pickle.loads(pickle.dumps(cfg))):
        assert back == cfg and diff(back, cfg) == {}
        for path, node in cfg.walk():
            for name in node.fields():
                at = f"{path}.{name}".lstrip(".")
                if hasattr(node, name):
                    assert back.history(at) == cfg.history(at)


@given(configs, configs)
def test_equality_is_that_of_the_text(a: Any, b: Any):
    assert (a == b) is (a.to_text() == b.to_text()) is (diff(a, b) == {})


@given(configs)
def test_editing_a_copy_never_changes_the_original(cfg: Any):
    before = cfg.to_text()
    for _, node in cfg.copy().walk():
        for name, info in node.fields().items():
            if info.expected.startswith("a literal"):
                node.set(**{name: "edited"})
    assert cfg.to_text() == before


class Edit(Modifier):
    """Sets, replaces or wraps, as its fields say."""

    class Config(Modifier.Config):
        action: str = "set"
        value: int = 0

    def __call__(self, cfg: Any) -> Any:
        value = self.cfg.value
        match self.cfg.action:
            case "set":
                cfg.at("**").set(any=value)
            case "new":
                cfg.set(leaf=Leaf.Config(any=value))
            case "replace":
                cfg.replace(Leaf.Config, Leaf.Config(number=value))
            case _:
                cfg.set(items=[*cfg.items, Leaf.Config(any=value)])
        return cfg


actions = st.sampled_from(["set", "new", "replace", "append"])


@given(st.lists(st.tuples(actions, st.integers()), min_size=1, max_size=6))
def test_provenance_after_any_chain_of_modifiers(chain: list[tuple[str, int]]):
    cfg = Tree.Config()
    before = cfg.copy()
    for i, (action, value) in enumerate(chain):
        modifier = Edit.Config(action=action, value=value)
        cfg = apply_modifier(cfg, modifier, name=f"m{i}")
    names = ["Tree.Config", "Leaf.Config", *(f"m{i}" for i in range(len(chain)))]
    for path, node in cfg.walk():
        for name in node.fields():
            at = f"{path}.{name}".lstrip(".")
            history = cfg.history(at)
            assert history[0].kind == "default"
            order = [names.index(e.name) for e in history if e.kind == "modifier"]
            # Only modifiers edited, in the order of the chain, and the last one's value is there.
            assert all(e.kind in ("default", "modifier") for e in history)
            assert order == sorted(order)
            if name in ("any", "number"):
                assert history[-1].value == node.lines()[name]
    assert before == Tree.Config()


SCRIPT = """
import sys
from axcore.config import Config
print(Config.from_text(sys.stdin.read(), trusted=("math", "collections")).fingerprint())
"""


@settings(max_examples=4)
@given(
    st.lists(st.dictionaries(st.text(max_size=5), st.floats() | st.text(max_size=5)), max_size=3)
)
def test_the_fingerprint_is_the_same_in_every_process(tables: list[Any]):
    cfg = config_for(dict, a=tables, b=config_for(math.hypot, 1.0, 2), c=math.sqrt)
    for seed in ("0", "12345"):
        out = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            input=cfg.to_text().encode("utf-8", "surrogatepass"),
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1"},
            cwd=Path(__file__).parent,
            capture_output=True,
            check=True,
        )
        assert out.stdout.decode().strip() == cfg.fingerprint()
