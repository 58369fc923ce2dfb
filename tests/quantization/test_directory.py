"""A run with a recipe, started from by another, quantized with its adapter, and read again."""

import json

import jax
import numpy as np
import pytest

from axcore import experiments
from axcore.config import Config, apply_modifier, config_for
from axcore.errors import CheckpointError
from axcore.inference import load_model, quantize_directory
from axcore.module import flatten_specs
from axcore.parallel import resolve_instance
from axcore.peft import LoRAModifier
from axcore.plugins import host
from axcore.quantization import QuantizeModifier, is_recipe_state
from axcore.train import JsonlWriter, optimizers, train

# Four short runs, each of which compiles its program.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("quantization-directory")]


def experiment(**fields):
    cfg = experiments.get("tiny-lm")
    cfg.set(batch_size=4, seq_len=16, max_step=2, sample_prompt=None, evalers={}, **fields)
    cfg.writers = {"jsonl": JsonlWriter.Config()}
    cfg.model.set(model_dim=16)
    cfg.model.decoder.layer.attention.set(num_heads=2)
    cfg.learner.optimizer = config_for(optimizers.adamw, learning_rate=1e-2)
    return cfg


def recipe(name):
    return QuantizeModifier.Config(recipe=name).instantiate().recipe_config()


def histories(state):
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    found = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in flat}
    return {p: np.asarray(x) for p, x in found.items() if is_recipe_state(p)}


@pytest.fixture(scope="module")
def delayed(tmp_path_factory):
    """A run of two steps with delayed scaling, in microbatches."""
    root = tmp_path_factory.mktemp("quantization")
    cfg = experiment(accumulation_steps=2)
    cfg = apply_modifier(cfg, QuantizeModifier.Config(recipe="fp8-delayed"))
    train(cfg, out=root / "delayed", instance=resolve_instance("cpu"))
    return root / "delayed"


def test_the_history_is_saved_and_restored(delayed):
    found = histories(load_model(delayed).state)
    assert len(found) == 12
    for path, history in found.items():
        assert (history[:, :2] > 0).all() and not history[:, 2:].any(), path


def test_a_run_without_the_recipe_drops_its_state_and_says_so(delayed, tmp_path):
    result = train(
        experiment(), out=tmp_path / "run", instance=resolve_instance("cpu"), init_from=delayed
    )
    said = result.report["init_from"]
    assert len(said["dropped"]) == 12 and not said["initialized"]
    assert not histories(load_model(tmp_path / "run").state)


def test_a_run_with_another_recipe_says_what_was_dropped_and_what_starts_anew(delayed, tmp_path):
    """From delayed scaling to int8, which keeps nothing, and back."""

    def go_on(name, recipe_name, source):
        cfg = apply_modifier(experiment(), QuantizeModifier.Config(recipe=recipe_name))
        result = train(cfg, out=tmp_path / name, instance=resolve_instance("cpu"), init_from=source)
        return result.report["init_from"]

    there = go_on("int8", "int8", delayed)
    assert len(there["dropped"]) == 12 and not there["initialized"]
    assert all(is_recipe_state(path) for path in there["dropped"])
    back = go_on("again", "fp8-delayed", tmp_path / "int8")
    assert sorted(back["initialized"]) == sorted(there["dropped"]) and not back["dropped"]


def test_a_quantized_directory_generates_and_does_not_pass_for_a_plain_one(delayed, tmp_path):
    out = tmp_path / "served"
    report = quantize_directory(delayed, [recipe("int8-weights"), recipe("int8-kv")], out)
    assert report["products"] == 12 and len(report["dropped"]) == 24
    assert report["bytes_after"] < report["bytes_before"]
    assert json.loads((out / "quantization.json").read_text())["products"] == 12
    loaded = load_model(out)
    weight = loaded.state["decoder"]["layer"]["0:2:1"]["feed_forward"]["up"]["weight"]
    assert weight.dtype == "int8"
    with pytest.raises(CheckpointError, match=r"is int8 there, float32 here") as error:
        train(experiment(), out=tmp_path / "run", instance=resolve_instance("cpu"), init_from=out)
    assert error.value.code == "AX606"
    assert not (tmp_path / "run").exists()
    text = (out / "config.txt").read_text()
    stored = Config.from_text(text, trusted=tuple(host().trusted_packages()))
    tuned = apply_modifier(stored, LoRAModifier.Config(rank=2, targets="**/up"))
    with pytest.raises(CheckpointError, match="quantize` on that run"):
        train(tuned, out=tmp_path / "run", instance=resolve_instance("cpu"), init_from=out)


def test_an_adapter_trains_on_beside_quantized_weights(delayed, tmp_path):
    machine = resolve_instance("cpu")
    tuned = apply_modifier(experiment(), LoRAModifier.Config(rank=2, targets="**/up"))
    train(tuned, out=tmp_path / "tuned", instance=machine, init_from=delayed)
    quantize_directory(tmp_path / "tuned", [recipe("int4-weights")], tmp_path / "served")
    text = (tmp_path / "served" / "config.txt").read_text()
    cfg = Config.from_text(text, trusted=tuple(host().trusted_packages()))
    train(cfg, out=tmp_path / "again", instance=machine, init_from=tmp_path / "served")
    before, after = load_model(tmp_path / "served"), load_model(tmp_path / "again")
    specs = flatten_specs(before.model.parameter_specs())
    changed = [
        path
        for path in specs
        if not np.array_equal(_at(before.state, path), _at(after.state, path))
    ]
    assert sorted(path.rsplit("/", 1)[-1] for path in changed) == ["lora_a", "lora_b"]


def _at(state, path):
    for part in path.split("/"):
        state = state[part]
    return np.asarray(state)
