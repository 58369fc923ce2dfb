"""``axcore plugins``: what people and programs see."""

from __future__ import annotations

import argparse
import json
import os
import tomllib

import pytest

from axcore.cli import plugins as command
from axcore.errors import CliError, PluginLookupError
from axcore.plugins import reset_host


@pytest.fixture
def run(site, monkeypatch):
    """Runs ``axcore plugins ...`` with the plugins of ``site`` alone."""
    monkeypatch.setenv("AXCORE_STRICT_PLUGINS", "0")

    def run(*argv: str, **host_options):
        parser = argparse.ArgumentParser()
        command.add_parser(parser.add_subparsers(required=True))
        args = parser.parse_args(["plugins", *argv])
        if not args.no_plugins:
            reset_host(site.host(**host_options))
        result = args.run(args)
        assert json.loads(json.dumps(result.data)) == result.data
        return result

    former = reset_host()
    yield run
    reset_host(former)


@pytest.fixture
def mixed(site, hook):
    site.add("acme", hook("optimizers", 'NamedSpec("fast", "math:sqrt", description="quick")'))
    site.add("broken", "1 / 0")
    return site


def test_list_names_every_plugin_with_status_and_reason(mixed, run):
    result = run("list", "--json")
    assert result.exit_code == 0
    by_name = {r["distribution"]: r for r in result.data}
    assert set(by_name) == {"axcore", "acme", "broken"}
    assert set(by_name["broken"]) == {
        "distribution",
        "version",
        "name",
        "status",
        "reason",
        "provides",
    }
    assert by_name["broken"]["status"] == "failed"
    assert by_name["acme"]["provides"] == {"optimizers": ["fast"]}
    rows = [line.split(maxsplit=4) for line in result.text.splitlines()]
    assert ["acme", "1.0", "acme", "active", "1 optimizers"] in rows
    assert any(r[0] == "broken" and "ZeroDivisionError" in r[4] for r in rows)


def test_list_works_in_strict_mode(mixed, run, monkeypatch):
    monkeypatch.setenv("AXCORE_STRICT_PLUGINS", "1")
    assert len(run("list").data) == 3


def test_list_without_plugins_runs_core_alone(run, monkeypatch):
    monkeypatch.setenv("AXCORE_LOAD_PLUGINS", "all")
    result = run("list", "--no-plugins")
    assert {r["distribution"] for r in result.data if r["status"] == "active"} == {"axcore"}
    assert os.environ["AXCORE_LOAD_PLUGINS"] == ""


def test_list_says_when_a_filter_names_no_plugin(mixed, run):
    assert "no installed plugin is called 'acne'" in run("list", disable=["acne"]).text


def test_show_gives_every_spec(mixed, run):
    result = run("show", "acme")
    (data,) = result.data
    assert data["specs"] == {
        "optimizers": [{"name": "fast", "description": "quick", "target": "math:sqrt"}]
    }
    assert "fast  math:sqrt  quick" in result.text


def test_show_gives_the_reason_of_a_broken_one(mixed, run):
    assert "import failed: ZeroDivisionError" in run("show", "broken").text


def test_show_of_an_unknown_plugin_is_an_error_with_near_misses(mixed, run):
    with pytest.raises(PluginLookupError, match=r"did you mean 'acme'\?"):
        run("show", "acmee")


def test_check_exits_with_2_unless_all_are_active_or_disabled(mixed, run):
    result = run("check")
    assert result.exit_code == 2
    assert "broken is failed" in result.text
    assert run("check", disable=["broken"]).exit_code == 0


def test_check_finds_targets_that_lead_nowhere(site, hook, run, capsys):
    site.add("acme", hook("optimizers", 'NamedSpec("fast", "no_such_package.x:y")'))
    assert run("check").exit_code == 0
    result = run("check", "--targets")
    assert result.exit_code == 2
    assert "acme: optimizers 'fast': cannot import 'no_such_package.x'" in result.text
    assert not capsys.readouterr().err
    assert run("check", "--targets", "--json").exit_code == 2
    assert "acme: optimizers 'fast': cannot import" in capsys.readouterr().err  # not in the records


def test_new_writes_a_plugin_that_names_itself(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("new", "Acme.Kernels")
    root = tmp_path / "Acme.Kernels"
    project = tomllib.loads((root / "pyproject.toml").read_text())
    assert project["project"]["name"] == "acme-kernels"
    assert project["project"]["entry-points"]["axcore"] == {"acme-kernels": "acme_kernels.plugin"}
    files = {str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()}
    assert set(result.data["files"]) == files
    assert files >= {
        "src/acme_kernels/plugin.py",
        "src/acme_kernels/layers.py",
        "src/acme_kernels/kernels.py",
        "src/acme_kernels/modifiers.py",
        "tests/test_plugin.py",
        ".github/workflows/test.yml",
        ".gitignore",
        "README.md",
        "CHANGELOG.md",
    }
    for file in files:
        text = (root / file).read_text()
        assert "@NAME@" not in text and "@PACKAGE@" not in text and "@CORE" not in text


def test_the_new_plugin_states_the_range_of_cores_it_was_written_for(tmp_path, run, monkeypatch):
    import axcore

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(axcore, "__version__", "2.7.1")
    run("new", "acme")
    project = tomllib.loads((tmp_path / "acme" / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == ["axcore>=2.7,<2.8"]


@pytest.mark.parametrize(
    "name", ["", "-x", "a b", "../evil", "/tmp/evil", "a/b", "1st", "json", "axcore", "class", "é"]
)
def test_a_name_that_cannot_be_a_package_is_refused(tmp_path, run, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CliError, match="name"):
        run("new", "--", name)
    assert list(tmp_path.iterdir()) == [tmp_path / "site"]


def test_what_exists_is_left_alone(tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "mine.txt").write_text("mine")
    with pytest.raises(CliError, match="exists already"):
        run("new", "acme")
    assert [p.name for p in (tmp_path / "acme").iterdir()] == ["mine.txt"]
