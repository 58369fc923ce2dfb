"""Names that load on first use."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with one lazy name and one lazy submodule, and what it has loaded of them."""
    folder = tmp_path / "lazy_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from axcore.lazy import lazy_attributes\n"
        "homes = {'value': 'lazy_package._home', 'part': 'lazy_package.part'}\n"
        "__getattr__, __dir__ = lazy_attributes(globals(), homes)\n"
    )
    (folder / "_home.py").write_text("value = object()\n")
    (folder / "part.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("lazy_package")
    for name in [n for n in sys.modules if n.partition(".")[0] == "lazy_package"]:
        del sys.modules[name]


def test_nothing_is_loaded_before_its_first_use(package):
    assert {"value", "part"} <= set(dir(package))
    assert not {"lazy_package._home", "lazy_package.part"} & set(sys.modules)


def test_a_name_is_loaded_once(package):
    first = package.value
    assert first is sys.modules["lazy_package._home"].value
    assert vars(package)["value"] is first


def test_a_submodule_is_itself(package):
    assert package.part is sys.modules["lazy_package.part"]


def test_an_unknown_name_is_missing_as_in_any_module(package):
    with pytest.raises(AttributeError, match="module 'lazy_package' has no attribute 'vlaue'"):
        package.vlaue
    assert not hasattr(package, "__path_of_nothing__")


@pytest.mark.parametrize(
    "name",
    ["axcore", "axcore.ops", "axcore.testing", "axcore.train", "axlearn_moe", "axlearn_rope"],
)
def test_every_public_name_of_a_package_leads_somewhere(name):
    package = pytest.importorskip(name)
    assert [n for n in package.__all__ if not hasattr(package, n)] == []
    assert set(package.__all__) <= set(dir(package))
