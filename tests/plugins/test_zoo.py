"""Broken plugins of every kind: the host stays up, and says which and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from axcore.errors import PluginLookupError

GOOD = """
@hookimpl
def axcore_optimizers():
    return [NamedSpec("good", "math:sqrt")]
"""

# name -> (source, status, words of the reason)
ZOO = {
    "import-error": ("import no_such_package_at_all", "failed", "No module named 'no_such_package"),
    "raises-at-import": ("1 / 0", "failed", "ZeroDivisionError"),
    "exits-at-import": ("raise SystemExit(3)", "failed", "SystemExit: 3"),
    "syntax-error": ("def broken(:", "failed", "SyntaxError"),
    "wrong-signature": (
        "@hookimpl\ndef axcore_kernels(machine):\n    return []",
        "invalid",
        "wrong signature of axcore_kernels",
    ),
    "misspelt-hook": (
        "@hookimpl\ndef axcore_kernals():\n    return []",
        "invalid",
        "unknown hook 'axcore_kernals'; did you mean 'axcore_kernels'",
    ),
    "unmarked-hook": (
        "def axcore_kernels():\n    return []",
        "invalid",
        "axcore_kernels lacks @hookimpl",
    ),
    "wrapper-hook": (
        "@hookimpl(wrapper=True)\ndef axcore_kernels():\n    return (yield)",
        "invalid",
        "no result may depend on order",
    ),
    "first-hook": (
        "@hookimpl(tryfirst=True)\ndef axcore_kernels():\n    return []",
        "invalid",
        "no result may depend on order",
    ),
    "raises-at-call": (
        "@hookimpl\ndef axcore_layers():\n    raise RuntimeError('no licence')",
        "failed",
        "axcore_layers raised RuntimeError: no licence",
    ),
    "exits-at-call": (
        "@hookimpl\ndef axcore_layers():\n    raise SystemExit('bye')",
        "failed",
        "axcore_layers raised SystemExit: bye",
    ),
    "raises-while-yielding": (
        "@hookimpl\ndef axcore_layers():\n"
        "    yield LayerSpec(name='a', target='math:sqrt')\n    raise KeyError('b')",
        "failed",
        "axcore_layers raised KeyError",
    ),
    "returns-none": (
        "@hookimpl\ndef axcore_layers():\n    pass",
        "invalid",
        "axcore_layers returned None, expected an iterable of LayerSpec",
    ),
    "returns-strings": (
        "@hookimpl\ndef axcore_layers():\n    return ['acme.Layer']",
        "invalid",
        "returned 'acme.Layer' (str), expected LayerSpec",
    ),
    "returns-other-spec": (
        "@hookimpl\ndef axcore_layers():\n    return [NamedSpec('a', 'math:sqrt')]",
        "invalid",
        "(NamedSpec), expected LayerSpec",
    ),
    "bad-target": (
        "@hookimpl\ndef axcore_modifiers():\n    return [NamedSpec('a', 'math.sqrt')]",
        "invalid",
        "target is 'math.sqrt', expected 'module:attribute'",
    ),
    "same-name-twice": (
        "@hookimpl\ndef axcore_modifiers():\n    return 2 * [NamedSpec('a', 'math:sqrt')]",
        "invalid",
        "gives the name 'a' twice",
    ),
}


@pytest.mark.parametrize("name", ZOO)
def test_a_broken_plugin_becomes_a_record_with_its_reason(site, name):
    source, status, reason = ZOO[name]
    site.add(name, source)
    site.add("good", GOOD)
    host = site.host()
    record = {r.name: r for r in host.records}[name]
    assert (record.status, record.distribution) == (status, name)
    assert reason in record.reason
    assert "\n" not in record.reason
    assert host.optimizers.get("good").target == "math:sqrt"


def test_all_broken_plugins_together_leave_core_and_the_good_one_at_work(site):
    for name, (source, *_) in ZOO.items():
        site.add(name, source)
    site.add("good", GOOD)
    host = site.host()
    assert {r.name for r in host.records if r.status == "active"} == {"core", "good"}
    assert {r.name for r in host.records} == {"core", "good", *ZOO}
    assert "cpu" in host.instance_types


def test_a_missing_name_chains_the_original_error_of_a_failed_plugin(site):
    site.add("broken", "import no_such_package_at_all")
    with pytest.raises(PluginLookupError, match="broken is failed") as caught:
        site.host().optimizers.get("acme")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_a_missing_name_chains_the_errors_of_all_failed_plugins(site):
    site.add("one", "1 / 0")
    site.add("two", "import no_such_package_at_all")
    with pytest.raises(PluginLookupError) as caught:
        site.host().optimizers.get("acme")
    cause = caught.value.__cause__
    assert isinstance(cause, BaseExceptionGroup)
    assert {type(e) for e in cause.exceptions} == {ZeroDivisionError, ModuleNotFoundError}


def test_the_users_interrupt_during_an_import_is_not_swallowed(site):
    site.add("interrupted", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.host()


def test_an_entry_point_to_a_missing_attribute_fails_alone(site):
    site.add("nowhere", entry_points={"nowhere": "math:no_such_attribute"})
    site.add("good", GOOD)
    assert {r.name: r.status for r in site.host().records}["nowhere"] == "failed"


def test_unreadable_entry_points_of_another_package_are_passed_over(site):
    site.add("good", GOOD)
    info = site.path / "garbage-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: garbage\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(b"[axcore]\n\xff\xfe not = utf = 8\nno equals sign\n")
    assert "good" in site.host().optimizers


def test_a_distribution_without_metadata_is_a_record_not_a_crash(site):
    site.add("good", GOOD)
    info = site.path / "bare-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[axcore]\nbare = math\n")
    host = site.host()
    record = {r.name: r for r in host.records}["bare"]
    assert record.status == "invalid"
    assert "metadata" in record.reason
    assert "good" in host.optimizers


@pytest.mark.parametrize(
    "source",
    ["import jax", "from jax import numpy as jnp", "from jax.numpy import sin", "import {inner}"],
)
@pytest.mark.parametrize("preloaded", [False, True])
def test_touching_jax_at_import_is_invalid(site, source, preloaded):
    inner = site.add("inner", "import jax", entry_points={})
    site.add("heavy", source.format(inner=inner))
    program = f"""
import json, sys
{"import jax" if preloaded else ""}
from axcore.plugins import PluginHost, find_candidates
host = PluginHost(c for c in find_candidates([{str(site.path)!r}]) if c.name == "heavy")
print(json.dumps([r.to_json() for r in host.records]))
"""
    environment = {**os.environ, "PYTHONPATH": f"{site.path}{os.pathsep}{os.getcwd()}"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    (record,) = [r for r in json.loads(done.stdout) if r["name"] == "heavy"]
    assert record["status"] == "invalid"
    assert "imports jax at import" in record["reason"]
