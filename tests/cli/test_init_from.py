"""``axcore train --init-from``: parameters of another run, checked before anything is written."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

from axcore.inference import load_model

STILL = ("--set", "learner.optimizer.learning_rate.peak=0.0", "--set", "max_step=1")


def same(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def test_a_run_starts_with_the_parameters_of_another(train, trained, tmp_path):
    done = train(tmp_path / "run", "--init-from", trained.out, *STILL)
    assert done.code == 0, done.err
    # At a rate of zero the only step changes nothing.
    assert same(load_model(tmp_path / "run").state, load_model(trained.out).state)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    said = {"directory": str(trained.out), "step": 3, "initialized": [], "dropped": []}
    assert report["init_from"] == said


@pytest.mark.slow
def test_the_other_stack_form_and_dtype_are_no_obstacle(train, trained, tmp_path):
    flags = ["--set", "model.param_dtype=bfloat16"]
    flags += ["--set", 'model.decoder.stack=config("axcore.layers.RepeatedTransformer")']
    done = train(tmp_path / "run", "--init-from", trained.out, *STILL, *flags)
    assert done.code == 0, done.err
    got = load_model(tmp_path / "run").state["embedding"]["weight"]
    want = load_model(trained.out).state["embedding"]["weight"]
    assert got.dtype == "bfloat16" and np.array_equal(got, want.astype("bfloat16"))


def test_another_shape_is_named_and_nothing_written(train, trained, tmp_path):
    done = train(tmp_path / "run", "--init-from", trained.out, "--set", "model.model_dim=16")
    assert done.code == 2
    assert "decoder/final_norm/bias has shape [8] there, [16] here" in done.err
    assert "AX606" in done.err
    assert not (tmp_path / "run").exists()


def test_what_is_no_model_directory_is_refused(train, tmp_path):
    done = train(tmp_path / "run", "--init-from", tmp_path / "nothing")
    assert done.code == 2 and "no model directory" in done.err
    assert not (tmp_path / "run").exists()


def test_a_run_under_way_goes_on_from_its_own_checkpoint(train, trained, tmp_path):
    out = tmp_path / "run"
    assert train(out, *STILL).code == 0
    before = load_model(out).state
    done = train(out, "--init-from", trained.out, *STILL)
    assert done.code == 0 and "goes on from its own checkpoint" in done.err
    assert same(load_model(out).state, before)


@pytest.mark.parametrize("same_config", [True, False])
def test_training_in_the_directory_of_a_model_that_was_made_names_init_from(
    cli, train, trained, tmp_path, contents, same_config
):
    from axcore.inference import write_model

    made = tmp_path / "made"
    like = load_model(trained.out)
    write_model(made, like.cfg, like.state, like=like)
    before = contents(made)
    if same_config:
        done = cli("train", made / "config.txt", "--out", made, "--instance", "cpu")
    else:
        done = train(made, "--set", "seed=9")
    assert done.code == 2 and ("AX981" if same_config else "AX742") in done.err
    assert f"--init-from {made}" in done.err
    assert contents(made) == before
