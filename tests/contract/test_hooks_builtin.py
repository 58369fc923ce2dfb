"""Core's own specs: every name leads to code that is there."""

from __future__ import annotations

import pytest

from axcore import builtin
from axcore.plugins import PluginHost, load_target

CORE = PluginHost([])
TARGETS = sorted(
    (kind, name, field, getattr(spec, field))
    for kind, registry in CORE.registries().items()
    for name, spec, _ in registry.items()
    for field in ("target", "supports", "detect")
    if getattr(spec, field, None)
)


@pytest.mark.parametrize(("kind", "name", "field", "target"), TARGETS)
def test_every_target_of_core_resolves(kind, name, field, target):
    assert load_target(target) is not None


def test_core_registers_something_of_each_basic_kind():
    kinds = {kind for kind, *_ in TARGETS}
    assert kinds >= {"kernels", "instance_types", "optimizers", "sources", "tokenizers", "writers"}


def test_the_module_of_core_specs_is_a_plugin_module():
    assert {name for name in vars(builtin) if name.startswith("axcore_")}
