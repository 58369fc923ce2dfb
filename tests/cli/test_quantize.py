"""What ``axcore quantize`` refuses before it reads a model."""

from __future__ import annotations

import jax
import pytest

from axcore.inference import load_model, write_model
from axcore.layers import EncoderModel


@pytest.mark.parametrize("recipe", ["int8", "fp8-delayed", "none"])
def test_a_recipe_for_training_stores_nothing_and_is_refused(cli, trained, tmp_path, recipe):
    out = tmp_path / "out"
    done = cli("quantize", "--from", trained.out, "--recipe", recipe, "--out", out)
    assert done.code == 2 and "AX973" in done.err and "int8-weights" in done.err
    assert not out.exists()


@pytest.mark.parametrize("batches", ["0", "-1"])
def test_batches_must_be_positive(cli, trained, tmp_path, batches):
    recipe = ("--recipe", "int8-static", "--data", __file__, "--batches", batches)
    done = cli("quantize", "--from", trained.out, *recipe, "--out", tmp_path / "out")
    assert done.code == 2 and f"--batches is {batches}, expected 1 or more" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("percentile", ["0", "101", "nan"])
def test_a_percentile_must_be_one(cli, trained, tmp_path, percentile):
    recipe = ("--recipe", "int8-static", "--data", __file__, "--percentile", percentile)
    done = cli("quantize", "--from", trained.out, *recipe, "--out", tmp_path / "out")
    assert done.code == 2 and "AX974" in done.err and not (tmp_path / "out").exists()


def test_a_percentile_of_nothing_is_told(cli, trained, tmp_path):
    recipe = ("--recipe", "int8-weights", "--percentile", "99")
    done = cli("quantize", "--from", trained.out, *recipe, "--out", tmp_path / "out")
    assert done.code == 0 and "--percentile has no effect" in done.err


@pytest.mark.parametrize("recipe", ["int8-kv", "fp8-kv"])
def test_a_model_that_never_decodes_has_no_cache_to_quantize(cli, trained, tmp_path, recipe):
    like = load_model(trained.out)
    cfg = like.cfg.copy()
    cfg.model = EncoderModel.Config(vocab_size=264, model_dim=8)
    cfg.model.encoder.num_layers = 1
    cfg.model.encoder.layer.attention.num_heads = 2
    model = cfg.copy().instantiate(name="trainer").model
    source, out = tmp_path / "encoder", tmp_path / "out"
    write_model(source, cfg, model.initialize(jax.random.key(0)), like=like)
    done = cli("quantize", "--from", source, "--recipe", recipe, "--out", out)
    assert done.code == 2 and "AX982" in done.err and "EncoderModel" in done.err
    assert not out.exists()
