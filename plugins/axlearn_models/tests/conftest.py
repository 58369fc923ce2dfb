"""Foreign models read into memory, and gradients written back under foreign names."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.checkpoint import stack_form
from axcore.checkpoint.convert import ModelFamily, family_of, open_source
from axcore.checkpoint.convert._rules import Application, applications, match_tensors
from axcore.cli import main
from axcore.collection import total_loss
from axcore.layers import StackedTransformer
from axcore.module import Module, flatten_specs
from axcore.train import Trainer

# Test modules of this folder import the settings that stand beside them.
sys.path.insert(0, str(Path(__file__).parent))


@dataclasses.dataclass(frozen=True)
class Imported:
    """A foreign model in memory, its layers one by one."""

    family: ModelFamily
    cfg: Trainer.Config
    model: Module
    params: dict[str, Any]
    applications: tuple[Application, ...]

    def logits(self, ids: np.ndarray) -> np.ndarray:
        @jax.jit
        def run(params: Any, ids: Any) -> Any:
            inputs = {"input_ids": ids}
            return functional(
                self.model, state=params, inputs=inputs, method="logits", is_training=False
            )[0]

        return np.asarray(run(self.params, jnp.asarray(ids, jnp.int32)))

    def gradients(self, ids: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """Mean cross-entropy of each next token, and its gradients by foreign name."""
        ids = jnp.asarray(ids, jnp.int32)

        @jax.jit
        def run(params: Any) -> Any:
            inputs = {"input_ids": ids[:, :-1], "target_ids": ids[:, 1:]}
            result, _ = functional(self.model, state=params, inputs=inputs, is_training=False)
            return jnp.mean(result.loss)

        loss, grads = jax.value_and_grad(run)(self.params)
        return float(loss), self.foreign(grads)

    def call(self, method: str, **inputs: Any) -> np.ndarray:
        """What a method of the model gives in evaluation."""

        @jax.jit
        def run(params: Any, inputs: Any) -> Any:
            return functional(
                self.model, state=params, inputs=inputs, method=method, is_training=False
            )[0]

        return np.asarray(run(self.params, inputs))

    def loss_and_gradients(self, **inputs: Any) -> tuple[float, dict[str, np.ndarray]]:
        """The model's own loss, and its gradients by foreign name."""

        @jax.jit
        def run(params: Any) -> Any:
            _, collection = functional(self.model, state=params, inputs=inputs, is_training=False)
            return total_loss(collection)

        loss, grads = jax.value_and_grad(run)(self.params)
        return float(loss), self.foreign(grads)

    def foreign(self, tree: Any) -> dict[str, np.ndarray]:
        """A tree like the parameters, as arrays by foreign name."""
        leaves = {path: np.asarray(leaf) for path, leaf in stack_form.flatten(tree).items()}
        arrays: dict[str, np.ndarray] = {}
        for item in self.applications:
            ours = [leaves[path] for path in item.paths]
            arrays |= dict(zip(item.foreign, item.transform.to_foreign(ours), strict=True))
        return arrays


def shapes_of(model: Module) -> dict[str, tuple[int, ...]]:
    return {path: spec.shape for path, spec in flatten_specs(model.parameter_specs()).items()}


def in_memory(cfg: Trainer.Config) -> tuple[Trainer.Config, Module]:
    for name in ("encoder", "decoder"):
        if name in cfg.model.fields():
            cfg.set_path(f"model.{name}.stack", StackedTransformer.Config())
    return cfg, cfg.instantiate(name="trainer").model


def nested(leaves: Mapping[str, np.ndarray]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = jnp.asarray(np.ascontiguousarray(leaf), jnp.float32)
    return tree


@pytest.fixture(scope="session")
def read_model() -> Callable[..., Imported]:
    """Reads a foreign model, every tensor in float32."""

    def read(path: str | Path, name: str | None = None) -> Imported:
        with open_source(path) as source:
            _, family = family_of(source, name)
            cfg, model = in_memory(family.config(source.config, source.infos))
            found = match_tensors(family.rules(cfg), shapes_of(model), source.infos)
            leaves: dict[str, np.ndarray] = {}
            for item in found.applications:
                arrays = [source.read(foreign).astype(np.float32) for foreign in item.foreign]
                ours = item.transform.to_ours(arrays, item.shapes)
                leaves |= dict(zip(item.paths, ours, strict=True))
        return Imported(family, cfg, model, nested(leaves), found.applications)

    return read


@pytest.fixture(scope="session")
def of_config() -> Callable[..., Imported]:
    """Random parameters of an experiment, as a family would write them."""

    def make(cfg: Trainer.Config, family: ModelFamily) -> Imported:
        cfg, model = in_memory(cfg.copy())
        generator = np.random.default_rng(0)
        leaves = {
            path: generator.normal(float("scale" in path), 0.2, shape)
            for path, shape in shapes_of(model).items()
        }
        rules = applications(family.rules(cfg), shapes_of(model))
        return Imported(family, cfg, model, nested(leaves), rules)

    return make


@pytest.fixture(scope="session")
def write_model() -> Callable[[Imported, Path], Path]:
    """Writes a model in Hugging Face's layout."""

    def write(imported: Imported, directory: Path) -> Path:
        from safetensors.numpy import save_file

        directory.mkdir(parents=True)
        arrays = imported.foreign(imported.params)
        arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        save_file(arrays, directory / "model.safetensors", metadata={"format": "pt"})
        settings = imported.family.foreign_config(imported.cfg)
        (directory / "config.json").write_text(json.dumps(settings))
        return directory

    return write


@pytest.fixture(scope="session")
def transformers() -> Iterator[Any]:
    """The library, without its network."""
    reason = "the oracle: pip install torch transformers"
    pytest.importorskip("torch", reason=reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pytest.importorskip("transformers", reason=reason)


@pytest.fixture(scope="session")
def random_model(transformers, tmp_path_factory) -> Callable[..., tuple[Any, Path]]:
    """Makes a random model of transformers, no bias or norm of it trivial, and saves it."""
    import torch

    def make(model: str, config: str, **settings: Any) -> tuple[Any, Path]:
        made = getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
        generator = torch.Generator().manual_seed(0)
        for name, parameter in made.named_parameters():
            is_scale = name.lower().endswith("norm.weight") or "layernorm_" in name
            mean = float(is_scale and name.endswith("weight"))
            parameter.data.normal_(mean, 0.2, generator=generator)
        directory = tmp_path_factory.mktemp("model")
        made.save_pretrained(directory)
        return made, directory

    return make


@pytest.fixture(scope="session")
def close() -> Callable[[np.ndarray, np.ndarray], None]:
    """Compares two float32 implementations: to 1e-4 of the largest value, or of one."""

    def check(ours: np.ndarray, theirs: np.ndarray) -> None:
        largest = min(1.0, max(1e-3, float(np.abs(theirs).max())))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * largest)

    return check


@pytest.fixture(scope="session")
def close_gradients() -> Callable[[Mapping[str, np.ndarray], Mapping[str, np.ndarray]], None]:
    """Compares the gradients of two float32 implementations, by name: as ``close`` does each.

    Some are zero but for rounding: a key's bias moves all scores of a query alike, which changes no
    softmax. What is left of such a sum is the rounding of its terms, which are as large as other
    gradients of the model and meet in another order with another number of threads: 1e-6 of the
    model's largest gradient, 8 float32 roundings, is not compared.
    """

    def check(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
        assert set(ours) == set(theirs)
        largest = {name: float(np.abs(gradient).max()) for name, gradient in theirs.items()}
        rounding = 1e-6 * max(largest.values())
        for name, gradient in theirs.items():
            atol = max(rounding, 1e-4 * min(1.0, largest[name]))
            np.testing.assert_allclose(ours[name], gradient, rtol=1e-4, atol=atol, err_msg=name)

    return check


@pytest.fixture(scope="session")
def cli() -> Callable[..., Any]:
    """Runs ``axcore`` in this process; returns the JSON document of a command that succeeds."""

    def run(*argv: object) -> Any:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*map(str, argv), "--json"])
        assert code == 0, out.getvalue() + err.getvalue()
        return json.loads(out.getvalue())

    return run
