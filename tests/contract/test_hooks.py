"""Every hook: documented signature, one registry, one spec class, no result by order of calls."""

from __future__ import annotations

import ast
import inspect
import typing
from pathlib import Path

import pytest

from axcore.plugins import (
    HOOKS,
    CallbackSpec,
    Candidate,
    CompilerOptionSpec,
    CompilerSpec,
    InstanceTypeSpec,
    KernelSpec,
    LayerSpec,
    MeshRuleSpec,
    NamedSpec,
    PluginHost,
    QuantizationSpec,
    Registry,
    hookimpl,
    hookspecs,
)
from axcore.testing import hook_docs

ROOT = Path(__file__).parents[2]
SPECS = [
    NamedSpec("toy", "math:pi"),
    KernelSpec(op="rms_norm", implementation="toy", platforms=("npu",), target="math:pi"),
    InstanceTypeSpec(pattern="toy-*", family="toy", platform="npu", target="math:pi"),
    CompilerSpec(platform="npu", target="math:pi"),
    MeshRuleSpec(name="toy", pattern="toy-*", target="math:pi", reason="measured"),
    CompilerOptionSpec(name="toy", pattern="toy-*", key="k", value=1, reason="measured"),
    QuantizationSpec(name="toy", dtypes=("int8",), scope="weights", target="math:pi"),
    LayerSpec(name="toy", target="math:pi"),
    CallbackSpec(name="toy", events=("step",), target="math:pi"),
]
EXAMPLES = {type(spec): spec for spec in SPECS}

# The contract of DESIGN 5: hooks are added, never removed or renamed within a major version.
NAMES = """
kernels instance_types compilers mesh_rules compiler_options quantization layers modifiers
experiments optimizers sources tokenizers writers checkpointers launchers converters commands
callbacks
""".split()


def test_the_hooks_are_those_of_the_contract():
    assert [hook.kind for hook in HOOKS] == NAMES


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_what_a_hook_returns_lands_in_its_registry(hook):
    spec = EXAMPLES[hook.spec]

    class Plugin:
        pass

    setattr(Plugin, hook.name, staticmethod(hookimpl(lambda: (s for s in [spec]))))
    host = PluginHost([Candidate("acme", "1.0", "acme", lambda: Plugin)])
    assert host.records[1].status == "active", host.records[1].reason
    assert host.records[1].provides == {hook.kind: (spec.name,)}
    registry = getattr(host, hook.kind)
    assert isinstance(registry, Registry)
    name = f"acme:{spec.name}" if hook.qualified else spec.name
    assert registry.get(name) is spec
    assert registry.owner(name) == "acme"
    if hook.spec is not CompilerOptionSpec:  # a value, no code
        assert registry.load(name) == 3.141592653589793


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_a_hook_documents_what_it_returns_and_how_results_combine(hook):
    function = getattr(hookspecs, hook.name)
    assert list(inspect.signature(function).parameters) == []
    assert typing.get_args(typing.get_type_hints(function)["return"]) == (hook.spec,)
    assert len(hook.doc.split("Combining:")) == 2
    assert typing.get_type_hints(PluginHost)[hook.kind] == Registry[hook.spec]


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_no_hook_gives_the_first_or_a_past_result(hook):
    options = getattr(hookspecs, hook.name).axcore_spec
    assert not options["firstresult"] and not options["historic"]


def test_the_page_of_hooks_is_current():
    page = (ROOT / "docs" / "hooks.md").read_text()
    assert page == hook_docs.render(), "run: python -m axcore.testing.hook_docs"


def test_only_the_host_speaks_to_pluggy():
    wrong = []
    for path in [*(ROOT / "axcore").rglob("*.py"), *(ROOT / "plugins").glob("*/src/**/*.py")]:
        if path.parent == ROOT / "axcore" / "plugins":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{path}:{node.lineno}" for n in names if n.split(".")[0] == "pluggy"]
    assert not wrong
