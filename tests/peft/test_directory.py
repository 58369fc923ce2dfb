"""Adapters on the disk: from a base, trained, merged, exported and attached again."""

import json
import shutil

import jax
import numpy as np
import pytest

from axcore import experiments, functional
from axcore.checkpoint import stack_form
from axcore.config import apply_modifier, config_for
from axcore.errors import CheckpointError
from axcore.inference import load_model
from axcore.layers import StackedTransformer
from axcore.parallel import resolve_instance
from axcore.peft import DoRAModifier, attach_adapter, export_adapter, merge_adapter
from axcore.train import JsonlWriter, optimizers, train

# Two short runs, each of which compiles its program.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("peft-directory")]

IDS = np.arange(12, dtype=np.int32)[None] * 11 % 250


def experiment():
    cfg = experiments.get("tiny-lm")
    cfg.set(batch_size=4, seq_len=16, max_step=2, sample_prompt=None, evalers={})
    cfg.writers = {"jsonl": JsonlWriter.Config()}
    cfg.model.set(model_dim=16)
    cfg.model.decoder.layer.attention.set(num_heads=2)
    cfg.learner.optimizer = config_for(optimizers.adamw, learning_rate=3e-2)
    return cfg


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A base, a run that adapts it, and that run merged and exported."""
    root = tmp_path_factory.mktemp("peft")
    machine = resolve_instance("cpu")
    train(experiment(), out=root / "base", instance=machine)
    tuned = experiment()
    # Unrolled, with adapters in one layer; the base was a scan.
    tuned.model.decoder.stack = StackedTransformer.Config()
    tuned = apply_modifier(
        tuned, DoRAModifier.Config(rank=2, targets=("decoder/layer/1/**/query", "**/down"))
    )
    result = train(tuned, out=root / "tuned", instance=machine, init_from=root / "base")
    (root / "result.json").write_text(json.dumps(result.report["init_from"]))
    merged = merge_adapter(root / "tuned", root / "merged")
    exported = export_adapter(root / "tuned", root / "adapter")
    return root, merged, exported


def logits(directory):
    loaded = load_model(directory)

    @jax.jit
    def run(state):
        return functional(
            loaded.model, state=state, inputs=(IDS,), is_training=False, method="logits"
        )[0]

    return np.asarray(run(loaded.state))


def leaves(directory):
    return stack_form.canonical(stack_form.flatten(load_model(directory).state))


def test_the_base_comes_from_its_directory_and_only_the_adapters_start_anew(places):
    root, *_ = places
    base, tuned = leaves(root / "base"), leaves(root / "tuned")
    for path, value in base.items():
        np.testing.assert_array_equal(np.asarray(tuned[path]), np.asarray(value), path)
    fresh = json.loads((root / "result.json").read_text())["initialized"]
    assert sorted(fresh) == sorted(set(tuned) - set(base))
    assert {path.split("/")[-2] for path in fresh} == {"dot"} and len(fresh) == 9


def test_a_merged_model_computes_what_the_adapted_one_does(places):
    root, merged, _ = places
    adapted, plain, base = (logits(root / name) for name in ("tuned", "merged", "base"))
    np.testing.assert_allclose(plain, adapted, atol=1e-5)
    assert np.abs(adapted - base).max() > 1e-3  # the adapters have learned something
    assert merged["adapters"] == 3 and merged["max_abs_logit_difference"] <= 1e-5


def test_a_merged_model_is_a_plain_one(places):
    root, *_ = places
    loaded = load_model(root / "merged")
    plain = experiment()
    plain.model.decoder.stack = StackedTransformer.Config()
    assert loaded.cfg.to_text() == plain.to_text()
    assert set(leaves(root / "merged")) == set(leaves(root / "base"))
    with pytest.raises(CheckpointError, match="no adapters to merge"):
        merge_adapter(root / "merged", root / "again")


def test_exported_adapters_are_small_and_fit_onto_their_base(places, tmp_path):
    root, _, exported = places
    size = sum(f.stat().st_size for f in (root / "adapter").iterdir())
    base = sum(x.nbytes for x in leaves(root / "base").values())
    assert exported["tensors"] == 9 and exported["size_bytes"] < size < base / 2
    made = attach_adapter(root / "base", root / "adapter", tmp_path / "again")
    assert made["same_base"] and made["adapters"] == 3
    # The base runs as a scan and the adapters were trained unrolled: layer 1 has one more.
    np.testing.assert_allclose(logits(tmp_path / "again"), logits(root / "tuned"), atol=1e-5)


def test_adapters_refuse_another_base(places, tmp_path):
    root, *_ = places
    with pytest.raises(CheckpointError, match="other weights"):
        attach_adapter(root / "merged", root / "adapter", tmp_path / "a")
    made = attach_adapter(root / "merged", root / "adapter", tmp_path / "b", allow_other_base=True)
    assert not made["same_base"]
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("damage", ["no record", "other layer", "truncated", "version", "missing"])
def test_a_damaged_adapter_directory_is_refused_and_nothing_is_written(places, tmp_path, damage):
    root, *_ = places
    adapter = tmp_path / "adapter"
    shutil.copytree(root / "adapter", adapter)
    record = json.loads((adapter / "adapter.json").read_text())
    if damage == "no record":
        (adapter / "adapter.json").write_text("{}")
    elif damage == "other layer":
        record["adapters"][0]["layers"][0] = "decoder/layer/7/feed_forward/down"
    elif damage == "version":
        record["version"] = 2
    elif damage == "missing":
        record["tensors"].popitem()
    else:
        data = (adapter / "adapter.npz").read_bytes()
        (adapter / "adapter.npz").write_bytes(data[: len(data) // 2])
    if damage in ("other layer", "version", "missing"):
        (adapter / "adapter.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="adapter"):
        attach_adapter(root / "merged", adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_merges(places, tmp_path, capsys):
    from axcore.cli import main

    root, *_ = places
    out = tmp_path / "merged"
    assert main(["peft", "merge", "--from", str(root / "tuned"), "--out", str(out), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["adapters"] == 3 and data["out"] == str(out)
    assert main(["peft", "export", "--from", str(out), "--out", str(tmp_path / "none")]) == 2
    assert "no adapters to export" in capsys.readouterr().err
