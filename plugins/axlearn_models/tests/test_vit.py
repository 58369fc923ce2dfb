"""ViT: published settings, training on images, and transformers' outputs, both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from axcore import experiments
from axcore.checkpoint.convert import load_family
from axcore.errors import CheckpointError
from axcore.layers import MeanPooler, RMSNorm

NAME = "hf:ViTForImageClassification"
# config.json of google/vit-base-patch16-224, its classes numbered instead of named.
VIT_B16 = {
    "architectures": ["ViTForImageClassification"],
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 768,
    "id2label": {str(i): f"class {i}" for i in range(1000)},
    "image_size": 224,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "label2id": {f"class {i}": str(i) for i in range(1000)},
    "layer_norm_eps": 1e-12,
    "model_type": "vit",
    "num_attention_heads": 12,
    "num_channels": 3,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "qkv_bias": True,
    "transformers_version": "4.13.0.dev0",
}


def computed(cfg: Any) -> dict[str, str]:
    lines = cfg.model.lines().items()
    return {p: v for p, v in lines if not p.endswith(("compute_dtype", "rate"))}


def test_published_settings_give_the_member_of_the_catalog():
    cfg = load_family(NAME).config(VIT_B16, {})
    assert computed(cfg) == computed(experiments.get("vit-B16"))


@pytest.mark.parametrize("member", [n for n in experiments.names() if n.startswith("vit-")])
def test_a_member_survives_the_way_through_foreign_settings(member):
    cfg, family = experiments.get(member), load_family(NAME)
    assert computed(family.config(family.foreign_config(cfg), {})) == computed(cfg)


@pytest.mark.parametrize(
    "change",
    [{"hidden_act": "mish"}, {"surprise": 1}, {"model_type": "deit"}],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_implemented_is_refused_by_name(change):
    with pytest.raises(CheckpointError, match=next(iter(change))) as caught:
        load_family(NAME).config({**VIT_B16, **change}, {})
    assert caught.value.code == "AX614"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("pooler", MeanPooler.Config()),
        ("class_token", False),
        ("encoder.final_norm", RMSNorm.Config(eps=1e-12)),
        ("encoder.layer.feed_forward.up.bias", False),
        ("num_classes", 0),
    ],
    ids=lambda value: value.rsplit(".", 1)[-1] if isinstance(value, str) else "",
)
def test_what_a_foreign_config_cannot_say_is_not_exported(path, value):
    cfg = experiments.get("vit-test")
    cfg.model.set_path(path, value)
    with pytest.raises(CheckpointError) as caught:
        load_family(NAME).foreign_config(cfg)
    assert caught.value.code == "AX622"


def test_a_test_member_trains_and_evaluates(cli, tmp_path):
    out = tmp_path / "run"
    done = cli("train", "vit-test", "--max-step", 3, "--out", out)
    assert done["step"] == 3
    assert 1.5 < done["eval"]["loss"] < 4.0  # near the logarithm of 10
    assert 0 <= done["eval"]["accuracy"] <= 1
    assert "bits_per_byte" not in done["eval"]
    assert not (out / "tokenizer").exists()
    again = cli("eval", "--from", out)
    assert again["metrics"]["loss"] == pytest.approx(done["eval"]["loss"], rel=1e-5)
    (tmp_path / "text.txt").write_text("no image")
    with pytest.raises(AssertionError, match="AX833"):
        cli("eval", "--from", out, "--text", tmp_path / "text.txt")
    with pytest.raises(AssertionError, match="AX530"):
        cli("generate", "--from", out, "--prompt", "A", "--max-tokens", 2)


def test_images_of_a_file_are_learned_on_simulated_devices(cli, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 16, 16)).astype(np.uint8)
    np.savez(tmp_path / "images.npz", images=pixels, labels=np.arange(64) % 10)
    flags = ["--set", 'input.source=config("axcore.data.NpzImages")', "--instance", "cpu-4"]
    flags += ["--set", f"input.source.path={tmp_path / 'images.npz'}"]
    done = cli("train", "vit-test", "--max-step", 1, "--out", tmp_path / "run", *flags)
    assert np.isfinite(done["loss"])
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["data"]["images"] == 64


@pytest.mark.slow
def test_the_test_member_learns_to_read_digits(cli, tmp_path):
    done = cli("train", "vit-test", "--out", tmp_path / "run")
    assert done["eval"]["accuracy"] > 0.3  # a tenth by chance, of 200 images


# -- against transformers --------------------------------------------------------------------------

SIZES: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_channels=3,
    patch_size=4,
    num_labels=5,
)


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def run(model: Any, pixels: np.ndarray) -> Any:
    import torch

    return model(torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))).logits


def gradients_as_saved(model: Any, directory: Path) -> dict[str, np.ndarray]:
    """By the names in files, which are not those in memory."""
    from safetensors.numpy import load_file

    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    "extra",
    [dict(image_size=16), dict(image_size=[8, 12], qkv_bias=False, hidden_act="gelu_new")],
    ids=["square", "oblong-no-biases"],
)
@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
def test_an_imported_model_computes_the_same(
    extra, random_model, close, close_gradients, read_model, tmp_path
):
    import torch

    theirs, directory = random_model("ViTForImageClassification", "ViTConfig", **{**SIZES, **extra})
    ours = read_model(directory)
    size = extra["image_size"]
    sides = (size, size) if isinstance(size, int) else size
    pixels, labels = images(3, *sides, 3), np.array([4, 0, 2])
    logits = run(theirs, pixels)
    close(ours.call("logits", images=pixels), logits.detach().numpy())

    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels))
    loss.backward()
    our_loss, gradients = ours.loss_and_gradients(images=pixels, labels=labels.astype(np.int32))
    assert our_loss == pytest.approx(loss.item(), rel=1e-5)
    expected = gradients_as_saved(theirs, tmp_path)
    close_gradients(gradients, expected)


@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
def test_an_exported_model_computes_the_same(transformers, of_config, write_model, close, tmp_path):
    ours = of_config(experiments.get("vit-test"), load_family(NAME))
    directory = write_model(ours, tmp_path / "exported")
    theirs, report = transformers.ViTForImageClassification.from_pretrained(
        directory, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    pixels = images(2, 16, 16, 1)
    close(ours.call("logits", images=pixels), run(theirs.eval(), pixels).detach().numpy())


@pytest.mark.oracle
@pytest.mark.xdist_group("torch-models")
def test_the_command_converts_both_ways_with_evidence(random_model, cli, tmp_path):
    sizes = dict(SIZES, image_size=16)
    _, directory = random_model("ViTForImageClassification", "ViTConfig", **sizes)
    done = cli("convert", directory, "--out", tmp_path / "ours", "--verify", "always")
    assert done["family"] == NAME
    assert done["max_abs_logit_difference"] < 1e-4
    back = cli("convert", tmp_path / "ours", "--export", "hf", "--out", tmp_path / "back")
    assert back["max_abs_logit_difference"] < 1e-4
