"""Presence of the vendor's bridge is decided by the attribute that is used, never by metadata."""

import sys
import types
from pathlib import Path

import pytest

from axcore.errors import PluginError
from axlearn_neuron import _presence


def _names_the_way_out(text: str) -> bool:
    return all(part in text for part in ("jax-neuronx", "vendor's", "README.md"))


def test_absent_package_names_package_index_and_document(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_neuronx", None)  # makes the import raise
    with pytest.raises(PluginError) as caught:
        _presence.nki_call()
    assert caught.value.code == "AX291"
    assert isinstance(caught.value.__cause__, ImportError)
    assert _names_the_way_out(str(caught.value))


def test_installed_but_empty_package_is_absent(monkeypatch, tmp_path: Path):
    # What the public 0.0.0 amounts to: metadata says present, there is nothing to call.
    info = tmp_path / "jax_neuronx-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-neuronx\nVersion: 9.9\n")
    (tmp_path / "jax_neuronx").mkdir()
    (tmp_path / "jax_neuronx" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    # What the import puts here is taken away with what stands here now.
    monkeypatch.setitem(sys.modules, "jax_neuronx", None)
    del sys.modules["jax_neuronx"]
    with pytest.raises(PluginError) as caught:
        _presence.nki_call()
    assert caught.value.code == "AX292"
    assert str(tmp_path) in str(caught.value)
    assert _names_the_way_out(str(caught.value))


def test_attribute_that_is_no_function_is_absent(monkeypatch):
    fake = types.ModuleType("jax_neuronx")
    fake.__dict__["nki_call"] = None
    monkeypatch.setitem(sys.modules, "jax_neuronx", fake)
    with pytest.raises(PluginError, match="no function nki_call"):
        _presence.nki_call()


def test_present_function_is_returned(monkeypatch):
    def call():
        return None

    fake = types.ModuleType("jax_neuronx")
    fake.__dict__["nki_call"] = call
    monkeypatch.setitem(sys.modules, "jax_neuronx", fake)
    assert _presence.nki_call() is call
