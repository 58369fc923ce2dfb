"""The text form: complete, ordered, diff-friendly, read back strictly, and never executed."""

import dataclasses
import enum
import math
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
import pytest

from axcore.config import (
    REQUIRED,
    Config,
    Configurable,
    Dim,
    Required,
    config_for,
    diff,
    parse_value,
    partial_for,
    public_path,
    resolve,
    scaled,
)
from axcore.errors import ConfigError, OpError

TRUSTED = (__name__.split(".")[0],)


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass(frozen=True)
class Normal:
    stddev: float = 0.02


class Linear(Configurable):
    class Config(Configurable.Config):
        input_dim: Required[int] = REQUIRED
        hidden_dim: Dim = scaled(4, of="input_dim", multiple_of=8)
        init: Normal = Normal()


@dataclasses.dataclass(frozen=True)
class Stage:
    linear: Linear.Config
    steps: int


class Model(Configurable):
    class Config(Configurable.Config):
        name: str = 'a "quoted" \n name'
        linear: Linear.Config = Linear.Config(input_dim=3)
        layers: tuple[Linear.Config, ...] = (Linear.Config(),)
        evalers: Mapping[str, Linear.Config] = {"heldout": Linear.Config()}
        stage: Stage = Stage(Linear.Config(), 5)
        rules: tuple[tuple[str, int | None], ...] = (("tpu-*", 1), ("gpu", None))
        act: Callable[..., Any] = jax.nn.silu
        gelu: Config = partial_for(jax.nn.gelu, approximate=False)
        opt: Config = config_for(optax.chain, config_for(optax.clip, 1.0))
        color: Color = Color.RED
        table: Mapping[str, float] = {"a.b": 1.0}
        empty: tuple[Linear.Config, ...] = ()
        none: Linear.Config | None = None


M = __name__
TEXT = f'''config("{M}.Model")
name: "a \\"quoted\\" \\n name"
linear: config("{M}.Linear")
linear.input_dim: 3
linear.hidden_dim: scaled(4, of="input_dim", multiple_of=8)
linear.init: data("{M}.Normal", stddev=0.02)
layers: tuple
layers.0: config("{M}.Linear")
layers.0.input_dim: REQUIRED
layers.0.hidden_dim: scaled(4, of="input_dim", multiple_of=8)
layers.0.init: data("{M}.Normal", stddev=0.02)
evalers: mapping
evalers.heldout: config("{M}.Linear")
evalers.heldout.input_dim: REQUIRED
evalers.heldout.hidden_dim: scaled(4, of="input_dim", multiple_of=8)
evalers.heldout.init: data("{M}.Normal", stddev=0.02)
stage: data("{M}.Stage")
stage.linear: config("{M}.Linear")
stage.linear.input_dim: REQUIRED
stage.linear.hidden_dim: scaled(4, of="input_dim", multiple_of=8)
stage.linear.init: data("{M}.Normal", stddev=0.02)
stage.steps: 5
rules: (("tpu-*", 1), ("gpu", None))
act: ref("jax.nn.silu")
gelu: partial_for("jax.nn.gelu")
gelu.x: REQUIRED
gelu.approximate: False
opt: config_for("optax.chain")
opt.args: tuple
opt.args.0: config_for("optax.clip")
opt.args.0.max_delta: 1.0
color: enum("{M}.Color.RED")
table: {{"a.b": 1.0}}
empty: ()
none: None
'''


def read(text: str, trusted: tuple[str, ...] = TRUSTED) -> Any:
    return Model.Config.from_text(text, trusted=trusted)


def test_the_text_is_one_path_and_value_per_line_in_declaration_order():
    assert Model.Config().to_text() == TEXT


def test_it_reads_back_equal():
    cfg = read(TEXT)
    assert cfg == Model.Config() and type(cfg) is Model.Config and cfg.to_text() == TEXT
    assert cfg.act is jax.nn.silu and cfg.stage == Model.Config().stage


def test_it_reads_back_what_was_edited():
    cfg = Model.Config(none=Linear.Config(input_dim=1), empty=[Linear.Config()] * 2, layers=[])
    cfg.replace(optax.clip, config_for(optax.adamw, 1e-3))
    assert read(cfg.to_text()) == cfg


def test_blank_lines_and_comments_are_skipped():
    assert read("# made by hand\n\n" + TEXT.replace("empty", "# x\nempty")) == Model.Config()


def test_only_what_is_not_the_default_counts_as_set():
    cfg = read(TEXT.replace("linear.input_dim: 3", "linear.input_dim: 4", 1))
    assert cfg.set_by("linear.input_dim").kind == "experiment"
    assert cfg.set_by("name").kind == "default"
    assert cfg.set_by("linear.hidden_dim").kind == "default"


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("stage.steps: 5", "stage.step: 5", 2, "missing|no field"),
        ("none: None\n", "", 2, "'none' is missing"),
        ("linear.input_dim: 3", "linear.input_dim: 3\nlinear.input_dim: 3", 5, "twice"),
        ("none: None", "none: None\nnon: None", 37, "did you mean 'none'"),
        ("linear.input_dim: 3", "linear.input_dim: 'x'", 4, "expected int"),
        ("linear.input_dim: 3", "linear.input_dim 3", 4, "expected `path: value`"),
        ("linear.input_dim: 3", "linear.input_dim: (3", 4, "cannot read"),
        ("linear.input_dim: 3", "linear.input_dim: 1 + 2", 4, "neither a literal"),
        ("linear.input_dim: 3", "linear.input_dim: open('x')", 4, "none of config"),
        ("linear.input_dim: 3", "linear.input_dim: __import__('os').x", 4, "neither a literal"),
        ("linear.input_dim: 3", "linear.input_dim: f'{3}'", 4, "neither a literal"),
        ("linear.input_dim: 3", "linear.input_dim: REQUIRE", 4, "neither a literal"),
        ("layers.0: config", "layers.0: confi", 8, "did you mean 'config'"),
        ("Color.RED", "Color.BLUE", 32, "no 'BLUE' in Color"),
        ("stddev=0.02", "std=0.02", 6, "did you mean 'stddev'"),
    ],
)
def test_errors_name_the_line(old: str, new: str, line: int, words: str):
    with pytest.raises(ConfigError, match=words) as e:
        read(TEXT.replace(old, new, 1))
    assert str(e.value.where).startswith("line ")
    if "missing" not in words and "twice" not in words and "none'" not in words:
        assert str(e.value.where).split()[1] == str(line)


def test_a_renumbered_tuple_is_an_error():
    with pytest.raises(ConfigError, match="numbered"):
        read(TEXT.replace("layers.0", "layers.1"))


def test_a_text_of_another_class_is_an_error():
    with pytest.raises(ConfigError, match=r"expected a Model\.Config"):
        read(Linear.Config().to_text())
    assert Config.from_text(Linear.Config().to_text(), trusted=TRUSTED) == Linear.Config()


@pytest.mark.parametrize("text", ["", "\n# only a comment\n", "3", 'config("math.sqrt")', "\0"])
def test_a_text_that_is_no_config_is_an_error(text: str):
    with pytest.raises(ConfigError) as e:
        Config.from_text(text)
    assert e.value.code == "AX110"


def test_targets_outside_the_trusted_packages_are_refused_with_the_way_out():
    with pytest.raises(ConfigError, match=r"--trust tests") as e:
        read(TEXT, trusted=())
    assert e.value.code == "AX111"
    for path in ("os.system", "subprocess.run", "builtins.eval", "builtins.open"):
        with pytest.raises(ConfigError) as e:
            parse_value(f'ref("{path}")')
        assert e.value.code == "AX111"


def test_reading_imports_nothing_from_untrusted_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "evil_package.py").write_text("raise SystemExit('imported')\ndef f(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="--trust evil_package"):
        parse_value('config_for("evil_package.f")')
    assert "evil_package" not in sys.modules


def test_reading_calls_nothing(monkeypatch: pytest.MonkeyPatch):
    called: list[int] = []
    module = types.ModuleType("spy_package")
    exec(
        "def f(x=1):\n    called.append(x)",
        {"called": called, "__name__": "spy_package"},
        vars(module),
    )
    module.f.__module__ = "spy_package"
    monkeypatch.setitem(sys.modules, "spy_package", module)
    cfg = Config.from_text('config_for("spy_package.f")\nx: 3\n', trusted=("spy_package",))
    assert called == []
    cfg.instantiate()
    assert called == [3]


def test_a_missing_package_is_told_from_a_missing_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "user_pkg.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    for path, words in [
        ("user_pkg.f", "needs 'not_installed_anywhere'"),
        ("no_such_package.f", "no package 'no_such_package'"),
        ("math.sqrtt", "did you mean 'sqrt'"),
        ("jax._src.nn.silu", "not a public"),
    ]:
        with pytest.raises(ConfigError, match=words):
            resolve(path, None)


def test_names_are_the_shortest_public_ones():
    assert public_path(optax.adamw) == "optax.adamw"
    assert public_path(jax.nn.silu) == "jax.nn.silu"
    assert public_path(jax.nn.relu) == "jax.nn.relu"
    assert public_path(optax.contrib.muon) == "optax.contrib.muon"
    assert public_path(math.sqrt) == "math.sqrt"
    assert public_path(int) == "builtins.int"
    assert public_path(Configurable) == "axcore.Configurable"
    assert public_path(int.from_bytes) == "builtins.int.from_bytes"


def test_each_name_resolves_to_the_same_object():
    for value in (optax.adamw, jax.nn.silu, jax.nn.gelu, jax.numpy.tanh, Model, Color):
        assert resolve(public_path(value), None) is value


def test_what_is_reachable_only_privately_is_refused_when_set():
    from optax._src import base  # to have something private; never done in the library

    with pytest.raises(ConfigError) as e:
        Model.Config(act=jax.checkpoint_policies.save_only_these_names("a"))
    assert e.value.code == "AX101" and e.value.hint
    assert base is not None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1", -1),
        ("1_000", 1000),
        ("-1.5e-7", -1.5e-7),
        ("inf", math.inf),
        ("-inf", -math.inf),
        ("(1,)", (1,)),
        ("[]", ()),
        ("'x'", "x"),
        ("None", None),
        ("{'a': (1, 2)}", {"a": (1, 2)}),
        ('scaled(2.5, of="n", minimum=0)', scaled(2.5, of="n", minimum=0)),
    ],
)
def test_values(text: str, value: Any):
    assert parse_value(text) == value


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            "1 2",
            "b'x'",
            "{1: 2}",
            "{**a}",
            "{'a': 1, 'a': 2}",
            "-'x'",
            "x.y",
            "scaled(1)",
            "ref(1)",
        ],
        *[
            "ref('math.sqrt', x=1)",
            "config(*a)",
            "data('math.sqrt')",
            "lambda: 1",
            "1j",
            "(" * 5000,
        ],
    ],
)
def test_what_is_not_in_the_grammar_is_refused(text: str):
    with pytest.raises(ConfigError) as e:
        parse_value(text)
    assert e.value.code == "AX110"


def test_windows_line_ends_are_fine():
    assert read(TEXT.replace("\n", "\r\n")) == Model.Config()


def test_diff_shows_exactly_what_differs():
    a = Model.Config()
    b = a.copy().set(name="b", none=Linear.Config())
    b.linear.input_dim = 4
    found = diff(a, b)
    assert found["linear.input_dim"] == ("3", "4")
    assert found["none"] == ("None", f'config("{M}.Linear")')
    assert found["none.input_dim"] == (None, "REQUIRED")
    assert list(found) == [
        "name",
        "linear.input_dim",
        "none",
        "none.input_dim",
        "none.hidden_dim",
        "none.init",
    ]
    assert diff(a, a.copy()) == {}


def test_the_fingerprint_is_that_of_the_text():
    import hashlib

    assert Model.Config().fingerprint() == hashlib.sha256(TEXT.encode()).hexdigest()


def test_a_trusted_package_is_no_way_to_the_others_that_it_imports(
    monkeypatch: pytest.MonkeyPatch,
):
    import os

    module = types.ModuleType("trusted_package")
    vars(module).update(os=os, run=os.system, evil=eval)
    monkeypatch.setitem(sys.modules, "trusted_package", module)
    for path in ("trusted_package.os.system", "trusted_package.run", "trusted_package.evil"):
        with pytest.raises(ConfigError) as e:
            parse_value(f'ref("{path}")', trusted=("trusted_package",))
        assert e.value.code == "AX111"


def test_names_go_by_identity_even_where_types_compare_equal():
    import numpy as np

    assert jax.numpy.float32 == np.float32
    assert public_path(jax.numpy.float32) == "jax.numpy.float32"
    assert public_path(np.float32) == "numpy.float32"
    assert [config_for(f, 1).lines()[""] for f in (jax.numpy.float32, np.float32)] == [
        'config_for("jax.numpy.float32")',
        'config_for("numpy.float32")',
    ]


def test_a_container_of_configs_that_is_the_default_does_not_count_as_set():
    cfg = read(TEXT)
    assert cfg.set_by("layers").kind == cfg.set_by("stage").kind == "default"
    cfg = read(TEXT.replace("layers.0.input_dim: REQUIRED", "layers.0.input_dim: 5"))
    assert cfg.set_by("layers").kind == "experiment" and cfg.layers[0].input_dim == 5


def test_a_script_can_write_and_read_its_own_classes():
    code = """
import pickle
from axcore.config import Configurable
class A(Configurable):
    class Config(Configurable.Config):
        n: int = 1
cfg = A.Config(n=2)
assert cfg.to_text().startswith('config("__main__.A")')
assert A.Config.from_text(cfg.to_text(), trusted=("__main__",)) == cfg
assert pickle.loads(pickle.dumps(cfg)) == cfg
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "stated",
    ["linear.hidden_dim", "evalers.heldout.init", "gelu.approximate", "color"],
)
def test_a_field_that_the_text_does_not_state_is_an_error_or_keeps_its_default(stated):
    older = "".join(line for line in TEXT.splitlines(True) if not line.startswith(stated))
    assert older != TEXT
    with pytest.raises(ConfigError, match=stated):
        Model.Config.from_text(older, trusted=TRUSTED)
    assert Model.Config.from_text(older, trusted=TRUSTED, fill_in=True) == Model.Config()


def test_a_record_keeps_its_defaults_too_but_what_has_none_is_missed():
    older = TEXT.replace(", stddev=0.02", "")
    assert Model.Config.from_text(older, trusted=TRUSTED, fill_in=True) == Model.Config()
    for line in ("stage.steps: 5\n", "gelu.x: REQUIRED\n"):
        with pytest.raises(ConfigError, match=line.partition(":")[0].rpartition(".")[2]):
            Model.Config.from_text(TEXT.replace(line, ""), trusted=TRUSTED, fill_in=True)


@dataclasses.dataclass(frozen=True)
class Factor:
    value: float

    def __post_init__(self):
        if self.value < 1:
            raise OpError(f"got {self.value}", code="AX999", hint="1 or more")


class Scaling(Configurable):
    class Config(Configurable.Config):
        factor: Factor = Factor(2.0)


def test_what_a_record_says_of_its_values_is_what_the_user_reads():
    cfg = Scaling.Config()
    bad = f'data("{M}.Factor", value=0.5)'
    with pytest.raises(ConfigError, match=r"got 0\.5") as caught:
        Config.from_text(cfg.to_text().replace("value=2.0", "value=0.5"), trusted=TRUSTED)
    assert (caught.value.code, caught.value.hint) == ("AX999", "1 or more")
    with pytest.raises(ConfigError, match=r"got 0\.5"):
        cfg.set_path_text("factor", bad, TRUSTED)
