"""Finding experiments: catalog, functions, files; deriving one from another; what is not there."""

from __future__ import annotations

import sys
import textwrap

import pytest

from axcore import experiments
from axcore.config import diff
from axcore.errors import CliError
from axcore.train import Trainer


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes modules of a user's package ``lab``; returns the folder."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**modules):
        (tmp_path / "lab").mkdir(exist_ok=True)
        (tmp_path / "lab" / "__init__.py").touch()
        for name, source in modules.items():
            (tmp_path / "lab" / f"{name}.py").write_text(textwrap.dedent(source))
        return tmp_path

    yield write
    for name in [n for n in sys.modules if n.partition(".")[0] == "lab"]:
        del sys.modules[name]


DERIVED = """
    from axcore import experiments

    def wider():
        cfg = experiments.get("tiny-lm")
        cfg.model.model_dim = 128
        cfg.learner.optimizer.weight_decay = 0.1
        return cfg

    def deeper():
        cfg = experiments.get("lab.exp:wider")
        cfg.model.decoder.num_layers = 6
        return cfg
    """


def test_the_catalog_has_tiny_lm():
    assert "tiny-lm" in experiments.names()
    assert isinstance(experiments.get("tiny-lm"), Trainer.Config)


def test_each_get_is_the_callers_own():
    first, second = experiments.get("tiny-lm"), experiments.get("tiny-lm")
    first.max_step = 7
    assert second.max_step == 1200
    assert experiments.get("tiny-lm") == second


def test_a_derived_experiment_differs_from_its_parent_by_what_it_states(package):
    package(exp=DERIVED)
    parent, child = experiments.get("tiny-lm"), experiments.get("lab.exp:wider")
    assert diff(parent, child) == {
        "model.model_dim": ("64", "128"),
        "learner.optimizer.weight_decay": ("0.05", "0.1"),
    }


def test_a_derivation_of_a_derivation_states_only_its_own(package):
    package(exp=DERIVED)
    wider, deeper = (experiments.get(f"lab.exp:{name}") for name in ("wider", "deeper"))
    assert diff(wider, deeper) == {"model.decoder.num_layers": ("2", "6")}


def test_each_value_knows_the_experiment_that_set_it(package):
    package(exp=DERIVED)
    cfg = experiments.get("lab.exp:deeper")
    setters = {
        path: cfg.set_by(path).name
        for path in ("model.decoder.num_layers", "model.model_dim", "max_step")
    }
    assert setters == {
        "model.decoder.num_layers": "lab.exp:deeper",
        "model.model_dim": "lab.exp:wider",
        "max_step": "tiny-lm",
    }


def test_a_config_text_file_is_an_experiment(tmp_path):
    cfg = experiments.get("tiny-lm").set(max_step=9)
    path = tmp_path / "mine.txt"
    path.write_text(cfg.to_text())
    read = experiments.get(str(path))
    assert read == cfg
    assert read.set_by("max_step").kind == "file"


# -- what is not there -------------------------------------------------------------------------


def test_an_unknown_name_is_an_error_with_near_misses():
    with pytest.raises(CliError, match="no experiment 'tiny-ml'") as caught:
        experiments.get("tiny-ml")
    assert "tiny-lm" in caught.value.hint
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", ["nowhere:f", "nowhere.exp:f", "lab.nothing:f"])
def test_a_module_that_is_not_there_is_no_such_experiment(package, name):
    package(exp=DERIVED)
    with pytest.raises(CliError, match=f"no experiment '{name}': there is no module") as caught:
        experiments.get(name)
    assert caught.value.code == "AX801"


def test_a_function_that_is_not_there_is_an_error_with_near_misses(package):
    package(exp=DERIVED)
    with pytest.raises(CliError, match="has no function 'widder'") as caught:
        experiments.get("lab.exp:widder")
    assert "wider" in caught.value.hint


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("import package_of_nobody", "package_of_nobody"),
        ("import lab.helpers", "lab.helpers"),
        ("from lab import middle", "package_of_nobody"),
    ],
)
def test_a_package_missing_inside_a_users_module_is_not_no_such_experiment(
    package, source, missing
):
    package(exp=f"{source}\n\ndef f(): ...\n", middle="import package_of_nobody\n")
    with pytest.raises(CliError, match=f"needs '{missing}', which is not installed") as caught:
        experiments.get("lab.exp:f")
    assert "no experiment" not in caught.value.message
    assert caught.value.code == "AX802"
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_package_missing_when_the_function_runs_is_not_no_such_experiment(package):
    package(exp="def f():\n    import package_of_nobody\n")
    with pytest.raises(ModuleNotFoundError, match="package_of_nobody"):
        experiments.get("lab.exp:f")


def test_what_an_experiments_code_raises_comes_through(package):
    package(exp="def f():\n    return 1 / 0\n", broken="1 / 0\n\ndef f(): ...\n")
    for name in ("lab.exp:f", "lab.broken:f"):
        with pytest.raises(ZeroDivisionError):
            experiments.get(name)


def test_something_else_than_a_trainers_config_is_an_error(package):
    package(exp="from axcore.layers import Linear\n\ndef f():\n    return Linear.Config()\n")
    with pytest.raises(CliError, match=r"is a Linear.Config, expected a Trainer.Config"):
        experiments.get("lab.exp:f")


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(CliError, match="cannot read the config file"):
        experiments.get(str(tmp_path / "none.txt"))
