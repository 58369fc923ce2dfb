"""The suite that every plugin's tests subclass: it is found, valid, light, and leads somewhere."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import importlib_metadata
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from axcore.plugins import PluginHost, Spec, load_target

__all__ = ["PluginConformance"]

_LOAD_WITHOUT_FRAMEWORKS = """
import importlib, json, sys
heavy = {"jax", "jaxlib", "torch", "tensorflow"}
found = {}
for target in json.loads(sys.argv[1]):
    importlib.import_module(target.partition(":")[0])
    found.update({name: target for name in heavy & set(sys.modules) if name not in found})
print(json.dumps(found))
"""


class PluginConformance:
    """Checks one installed distribution.

    Attributes:
        distribution: The distribution's name.
        optional_packages: Top-level packages that some targets need and that may be absent; by
            default those that only an extra asks for, under the name of their distribution.

    Example:
        ```python
        class TestPlugin(PluginConformance):
            distribution = "acme-kernels"
        ```
    """

    distribution: str
    optional_packages: tuple[str, ...] | None = None

    def test_is_installed_with_an_entry_point(self) -> None:
        assert self._entry_points(), (
            f"{self.distribution} has no entry point in the group 'axcore'; after an edit of "
            "pyproject.toml, install it again"
        )

    def test_is_active(self, plugin_host: PluginHost) -> None:
        records = self._records(plugin_host)
        assert records, f"{self.distribution} is not among the installed plugins"
        for record in records:
            assert record.status == "active", f"{record.label} is {record.status}: {record.reason}"

    def test_states_which_core_it_runs_with(self) -> None:
        texts = importlib_metadata.requires(self.distribution) or []
        requirements = [Requirement(text) for text in texts]
        on_core = [r for r in requirements if canonicalize_name(r.name) == "axcore"]
        assert on_core, f"{self.distribution} does not require axcore; state a range"
        operators = {s.operator for r in on_core for s in r.specifier}
        assert operators & {">=", ">", "~=", "=="}, (
            f"{self.distribution} requires {on_core[0]}: state the oldest axcore it was tested with"
        )

    def test_its_package_states_the_version_that_is_installed(self) -> None:
        stated: set[str] = set()
        for entry in self._entry_points():
            package = importlib.import_module(entry.value.partition(":")[0].partition(".")[0])
            stated |= {package.__version__} if hasattr(package, "__version__") else set()
        installed = importlib_metadata.version(self.distribution)
        assert stated <= {installed}, f"{stated} is stated, {installed} is installed"

    def test_imports_no_framework_when_it_is_found(self) -> None:
        modules = [f"{e.value.partition(':')[0]}:plugin" for e in self._entry_points()]
        self._check_light(modules, "the plugin module is imported by every command")

    def test_supports_and_detect_import_no_framework(self, plugin_host: PluginHost) -> None:
        targets = [
            getattr(spec, field)
            for spec in self._specs(plugin_host)
            for field in ("supports", "detect")
            if getattr(spec, field, None)
        ]
        self._check_light(targets, "supports and detect run before any device is touched")

    def test_targets_lead_to_code(self, plugin_host: PluginHost) -> None:
        optional = self.optional_packages
        if optional is None:
            optional = _packages_of_extras(self.distribution)
        absent: list[str] = []
        for spec in self._specs(plugin_host):
            for field in ("target", "supports", "detect"):
                target = getattr(spec, field, None)
                if target is None:
                    continue
                try:
                    load_target(target, where=f"{type(spec).__name__}({spec.name!r})")
                except Exception as error:  # whatever importing the target raises
                    name = _absent_module(error)
                    if name.partition(".")[0] not in optional:
                        raise
                    absent.append(f"{target} needs {name}")
        if absent:
            pytest.skip("; ".join(absent))

    def _entry_points(self) -> list[importlib_metadata.EntryPoint]:
        distribution = importlib_metadata.distribution(self.distribution)
        return list(distribution.entry_points.select(group="axcore"))

    def _records(self, plugin_host: PluginHost):
        name = canonicalize_name(self.distribution)
        return [r for r in plugin_host.records if r.distribution == name]

    def _specs(self, plugin_host: PluginHost) -> list[Spec]:
        name = canonicalize_name(self.distribution)
        return [
            spec
            for registry in plugin_host.registries().values()
            for _, spec, owner in registry.items()
            if owner == name
        ]

    def _check_light(self, targets: list[str], why: str) -> None:
        done = subprocess.run(
            [sys.executable, "-c", _LOAD_WITHOUT_FRAMEWORKS, json.dumps(targets)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert not found, f"{why}; these import a framework: {found}"


def _absent_module(error: BaseException | None) -> str:
    """The module whose absence is behind an error, or ``""``."""
    while error is not None:
        if isinstance(error, ImportError):
            return error.name or ""
        error = error.__cause__
    return ""


def _packages_of_extras(distribution: str) -> tuple[str, ...]:
    """Packages that only an extra of a distribution asks for, by the name that is imported."""
    requirements = map(Requirement, importlib_metadata.requires(distribution) or [])
    asked = [r for r in requirements if r.marker and "extra" in str(r.marker)]
    return tuple(canonicalize_name(r.name).replace("-", "_") for r in asked)
