"""Core and the catalog name no feature of a plugin in a signature, a config field or a branch."""

from __future__ import annotations

import fnmatch
import functools
from pathlib import Path

import pytest

from axcore.testing.loc import Leak, find_leaks

ROOT = Path(__file__).parents[2]
FOLDERS = ("axcore", "plugins/axlearn_models/src")

# Plugin -> the words by which its features would be known. Generic words that core uses in another
# sense are left out: `mixture` (of data sets), `sparse`, `linear`, `scaling`.
WORDS = {
    "axlearn-rope": {"rope", "rotary", "mrope", "yarn", "ntk"},
    "axlearn-moe": {"moe", "expert", "experts", "router", "routed", "routing"},
    "axlearn-tpu": {"tpu", "splash", "libtpu"},
    "axlearn-gpu": {"gpu", "cuda", "cudnn", "triton", "fp8"},
    "axlearn-neuron": {"neuron", "trainium", "nki"},
}

# (file pattern, kind, word pattern) -> why it is none. No exemption is for an argument.
EXEMPT = {
    ("axcore/parallel/mesh.py", "field", "expert"): "a mesh axis: part of core's contract, as the "
    "logical axis `experts` is; any package may split a dim over it",
    ("axcore/parallel/cost/*.py", "branch", "*expert*"): "accounting of parameters that carry the "
    "logical axis `experts`: it asks for the axis, whoever uses it, and for no layer",
    ("axcore/parallel/traits.py", "branch", "*expert*"): "the same, for mesh rules",
    (
        "axcore/parallel/traits.py",
        "field",
        "*expert*",
    ): "what that accounting found",
    ("axcore/parallel/fit.py", "branch", "*expert*"): "arithmetic of the mesh axis `expert`",
    ("plugins/axlearn_models/src/*/convert.py", "branch", "*"): "reads and writes the files of "
    "another library, which name their settings and tensors so; no model looks at it",
    ("plugins/axlearn_models/src/*/_hugging_face.py", "branch", "*"): "the same, shared by the "
    "converters: refuses settings that the other format cannot say",
    ("plugins/axlearn_models/src/*/_gemma_files.py", "branch", "*"): "the same, for one family",
    ("plugins/axlearn_models/src/*/_mixture*.py", "branch", "*"): "the same, for mixtures, and "
    "what to install when the package of their layer is missing; only those families import it",
}


def is_exempt(leak: Leak, exemption: tuple[str, str, str]) -> bool:
    file, kind, name = exemption
    path = str(leak.path.relative_to(ROOT))
    return kind == leak.kind and fnmatch.fnmatch(path, file) and fnmatch.fnmatch(leak.name, name)


@functools.cache
def leaks_in(folder: str) -> list[Leak]:
    return find_leaks([ROOT / folder], set().union(*WORDS.values()))


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_names_a_plugins_feature(folder):
    found = [leak for leak in leaks_in(folder) if not any(is_exempt(leak, e) for e in EXEMPT)]
    assert not found, "\n".join(map(str, found))


def test_every_plugin_has_its_words():
    plugins = {path.name for path in (ROOT / "plugins").iterdir() if (path / "src").is_dir()}
    assert {name.replace("-", "_") for name in WORDS} == plugins - {"axlearn_models"}


@pytest.mark.parametrize("exemption", EXEMPT, ids=lambda e: e[0])
def test_every_exemption_is_still_needed(exemption):
    leaks = [leak for folder in FOLDERS for leak in leaks_in(folder)]
    assert any(is_exempt(leak, exemption) for leak in leaks)
