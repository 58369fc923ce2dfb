"""``axcore doctor``."""

from __future__ import annotations

import importlib.metadata

import jax
import pytest

from axcore.cli import _jax, doctor
from axcore.plugins import Candidate, PluginHost, reset_host


def test_it_says_what_is_installed_and_what_would_be_chosen(cli):
    done = cli("doctor", "--json", "--instance", "cpu-8", "--no-plugins")
    data = done.json
    assert data["packages"]["jax"] == jax.__version__
    assert data["devices"][0]["platform"] == jax.devices()[0].platform
    assert data["chosen"]["instance"] == "cpu-8" and data["chosen"]["num_devices"] == 8
    assert data["chosen"]["kernels"]["attention"][-1] == "xla"
    assert data["jax_ranges"]["axcore"].startswith(">=0.10")
    assert data["plugins"][0]["distribution"] == "axcore"


@pytest.fixture(autouse=True)
def _host(monkeypatch):
    monkeypatch.setenv("AXCORE_LOAD_PLUGINS", "")  # put back afterwards
    former = reset_host()
    yield
    reset_host(former)


def test_when_all_is_well_there_is_nothing_to_fix(cli):
    done = cli("doctor")
    assert done.code == 0 and done.out.rstrip().endswith("nothing to fix")


def test_a_broken_plugin_is_a_problem_with_a_fix(cli):
    reset_host(PluginHost([Candidate("acme", "1.0", "acme", lambda: 1 / 0)]))
    done = cli("doctor", "--json")
    assert done.code == 2
    (problem,) = done.json["problems"]
    assert "acme is failed" in problem["problem"] and "axcore plugins show acme" in problem["fix"]


def test_plugins_that_ask_for_another_jax_are_problems_and_both_ranges_are_shown(cli, monkeypatch):
    asked = {"axcore": ["jax>=0.10"], "acme": ["jax<0.5", "numpy"]}
    monkeypatch.setattr(doctor, "_requires", lambda name: asked.get(name, []))
    candidate = Candidate("acme", "1.0", "acme", lambda: doctor)
    reset_host(PluginHost([candidate]))
    data = cli("doctor", "--json").json
    assert data["jax_ranges"] == {"axcore": ">=0.10", "acme": "<0.5"}
    assert any("acme asks for jax<0.5" in p["problem"] for p in data["problems"])


def test_an_unknown_instance_is_a_problem(cli):
    data = cli("doctor", "--json", "--instance", "cqu").json
    assert data["chosen"] is None and "cqu" in data["problems"][0]["problem"]


def test_a_jax_that_does_not_start_is_a_problem(cli, monkeypatch):
    def broken():
        raise RuntimeError("no driver")

    monkeypatch.setattr(jax, "devices", broken)
    done = cli("doctor", "--json")
    assert done.code == 2 and "no driver" in done.json["problems"][0]["problem"]


def test_missing_extras_say_what_to_install(cli, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "matplotlib" else find(n)
    )
    data = cli("doctor", "--json").json
    assert "pip install 'axcore[plots]'" in data["missing_extras"]["plots"]
    assert importlib.metadata.version("axcore") == data["axcore"]


@pytest.mark.parametrize(
    ("version", "untested"),
    [("0.10.2", False), ("0.12.0.1", False), ("0.12.9", False), ("0.13.0", True), ("1.0", True)],
)
def test_a_newer_jax_is_untested(version, untested):
    assert _jax.is_untested(version) == untested


def test_a_newer_jax_gives_one_warning_line(monkeypatch, caplog):
    monkeypatch.setattr(jax, "__version__", "9.9.9")
    with caplog.at_level("WARNING"), _jax.jax_started():
        pass
    assert [r.getMessage() for r in caplog.records] == [
        f"JAX 9.9.9 is newer than the newest that axcore was tested with ({_jax.NEWEST_TESTED_JAX})"
    ]


@pytest.fixture
def no_cache(monkeypatch):
    """JAX without the compile cache that the test run may have switched on."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def test_the_compile_cache_is_in_the_users_cache_and_put_back(monkeypatch, tmp_path, no_cache):
    monkeypatch.setenv("AXCORE_CACHE_DIR", str(tmp_path / "c"))
    before = jax.config.jax_compilation_cache_dir
    with _jax.jax_started():
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "c" / "xla")
    assert jax.config.jax_compilation_cache_dir == before


def test_jaxs_own_cache_setting_counts_first(monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert _jax.cache_dir() == tmp_path
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("AXCORE_CACHE_DIR", "")
    assert _jax.cache_dir() is None


def test_a_cache_that_cannot_be_made_is_a_warning(monkeypatch, tmp_path, caplog, no_cache):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AXCORE_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level("WARNING"), _jax.jax_started():
        pass
    assert "compiled programs are not kept" in caplog.text
