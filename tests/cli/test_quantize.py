"""What ``axcore quantize`` refuses before it reads a model."""

from __future__ import annotations

import pytest


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
