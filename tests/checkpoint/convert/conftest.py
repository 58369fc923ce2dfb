"""A plugin with a made-up family, and files of it written by other libraries."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from axcore.testing import only_distribution, write_distribution

PLUGIN = """
from axcore.plugins import NamedSpec, hookimpl

@hookimpl
def axcore_converters():
    return [
        NamedSpec("hf:ToyForCausalLM", "toy_family:HuggingFaceToy"),
        NamedSpec("gguf:toy", "toy_family:GGUFToy"),
        NamedSpec("npz:toy", "toy_family:NpzToy"),
        NamedSpec("hf:NoFamily", "math:pi"),
    ]
"""
SETTINGS = {
    "architectures": ["ToyForCausalLM"],
    "activation": "gelu_tanh",
    "vocab_size": 264,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "max_length": 32,
}


@pytest.fixture(scope="module", autouse=True)
def _toy_plugin(tmp_path_factory):
    """The only plugin of these tests; the folder's other modules need nothing of it."""
    site = tmp_path_factory.mktemp("site")
    write_distribution(site, "toy", PLUGIN, module="toy_plugin")
    (site / "toy_family.py").write_text((Path(__file__).parent / "toy_family.py").read_text())
    with only_distribution(site, "toy"):
        yield
    for name in ("toy_plugin", "toy_family"):
        sys.modules.pop(name, None)


def toy_tensors(*, layers=2, dim=16, vocab=264, length=32, seed=0) -> dict[str, np.ndarray]:
    """Random tensors of a member of the family, by foreign name."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    tensors = {"wte": draw(vocab, dim), "wpe": draw(length, dim)}
    for i in range(layers):
        for name, out, into in (
            ("qkv", 3 * dim, dim),
            ("out", dim, dim),
            ("up", 4 * dim, dim),
            ("down", dim, 4 * dim),
        ):
            tensors[f"h.{i}.{name}.weight"] = draw(out, into)
            tensors[f"h.{i}.{name}.bias"] = draw(out)
        for name in ("ln1", "ln2"):
            tensors[f"h.{i}.{name}.weight"] = 1 + draw(dim)
            tensors[f"h.{i}.{name}.bias"] = draw(dim)
    return tensors | {"lnf.weight": 1 + draw(dim), "lnf.bias": draw(dim)}


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return toy_tensors()


@pytest.fixture
def settings() -> dict:
    return dict(SETTINGS)


@pytest.fixture
def write_hf(tmp_path):
    """Writes a Hugging Face directory with the ``safetensors`` package."""
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

    def write(tensors, settings=SETTINGS, *, shards=1, name="source", **changes) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps({**settings, **changes}))
        if shards == 1:
            numpy.save_file(tensors, directory / "model.safetensors")
            return directory
        index: dict[str, str] = {}
        for number in range(shards):
            file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(tensors.items())[number::shards])
            numpy.save_file(part, directory / file)
            index |= dict.fromkeys(part, file)
        write_index(directory, index)
        return directory

    return write


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
