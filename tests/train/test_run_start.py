"""What a run refuses before it touches its directory, and what its text and average give back."""

import numpy as np
import pytest

from axcore import experiments
from axcore.config import Modifier, scaled
from axcore.errors import AxcoreError
from axcore.train import assemble, train
from axcore.train._program import Program
from axcore.train.rundir import RunDir


def micro(**fields):
    cfg = experiments.get("tiny-lm")
    cfg.model.model_dim = 8
    cfg.model.decoder.num_layers = 1
    cfg.model.decoder.layer.attention.num_heads = 2
    cfg.set(max_step=2, batch_size=2, seq_len=16, sample_prompt=None, writers={})
    cfg.evalers["heldout"].set(max_documents=1)
    return cfg.set(**fields)


def run(cfg, out):
    a = assemble(cfg, instance="cpu")
    return train(a.cfg, out=out, instance=a.instance)


def test_evaluation_of_the_average_repeats_what_training_reported(tmp_path):
    from axcore.cli._main import main

    cfg = micro()
    cfg.learner.ema_decay = 0.5
    cfg.evalers["heldout"].use_ema = True
    report = run(cfg, tmp_path / "run").report
    from axcore.inference import load_model

    loaded = load_model(tmp_path / "run", use_ema=True)
    plain = load_model(tmp_path / "run")
    a, b = (m.state["embedding"]["weight"] for m in (loaded, plain))
    assert not np.array_equal(a, b)
    assert main(["eval", "--from", str(tmp_path / "run"), "--json"]) == 0
    assert report["eval"]["loss"] > 0


class Double(Modifier):
    def __call__(self, cfg):
        cfg.model.model_dim = cfg.model.model_dim * 2
        return cfg


def test_the_text_of_a_modified_experiment_is_not_modified_again(tmp_path):
    made = assemble(micro(modifiers=(Double.Config(),)), instance="cpu").cfg
    assert made.model.model_dim == 16
    file = tmp_path / "config.txt"
    file.write_text(made.to_text())
    again = assemble(experiments.get(str(file), trusted=(__name__,)), instance="cpu").cfg
    assert again.model.model_dim == 16 and again.to_text() == made.to_text()


@pytest.mark.parametrize(
    "path",
    [
        "checkpointer.save_every_n_steps",
        "evalers.heldout.every_n_steps",
        "evalers.heldout.max_documents",
    ],
)
def test_settings_that_cannot_be_are_refused_before_the_directory_is_made(tmp_path, path):
    cfg = micro()
    cfg.set_path(path, 0)
    with pytest.raises(AxcoreError, match=r"expected at least 1"):
        run(cfg, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rows_longer_than_the_model_takes_are_refused(tmp_path):
    cfg = micro()
    cfg.model.max_seq_len = 8
    with pytest.raises(AxcoreError, match=r"16 tokens, the model takes at most 8"):
        run(cfg, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_rows_that_do_not_divide_name_the_nearest_batch_sizes(tmp_path):
    made = assemble(micro(batch_size=3), instance="cpu-2")
    with pytest.raises(AxcoreError, match=r"3 rows do not divide over 2 devices") as caught:
        train(made.cfg, out=tmp_path / "run", instance=made.instance)
    assert "2 or 4" in caught.value.hint


def test_an_evaler_with_nothing_to_read_is_refused(tmp_path):
    cfg = micro()
    cfg.input.heldout_fraction = 0.0
    with pytest.raises(AxcoreError, match="AX513"):
        run(cfg, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_directory_in_which_another_run_is_under_way_is_refused_and_left_alone(tmp_path):
    with RunDir(tmp_path / "run").alone():
        with pytest.raises(AxcoreError, match="AX746"):
            run(micro(), tmp_path / "run")
        assert [p.name for p in (tmp_path / "run").iterdir()] == [".lock"]
    assert run(micro(), tmp_path / "run").report["step"] == 2


def test_a_derived_horizon_is_followed(tmp_path):
    assert run(micro(max_step=scaled(1, of="batch_size")), tmp_path / "run").report["step"] == 2


def test_a_run_may_be_of_one_step(tmp_path):
    assert run(micro(max_step=1), tmp_path / "run").report["step"] == 1


@pytest.mark.parametrize("prompt", ["", "\ud800"])
def test_a_prompt_that_cannot_be_continued_is_refused(tmp_path, prompt):
    with pytest.raises(AxcoreError, match=r"AX706|AX532"):
        run(micro(sample_prompt=prompt), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_start_that_failed_at_compiling_does_not_keep_the_corrected_one_out(
    tmp_path, monkeypatch
):
    def fail(*args):
        raise RuntimeError("no such program")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no such program"):
        patch.setattr(Program, "compile_train", fail)
        run(micro(seed=3), tmp_path / "run")
    assert (tmp_path / "run" / "config.txt").exists()
    assert run(micro(), tmp_path / "run").report["step"] == 2
    with pytest.raises(AxcoreError, match="AX742"):
        run(micro(seed=9), tmp_path / "run")


@pytest.mark.parametrize(
    ("path", "value", "hint"),
    [
        ("accumulation_steps", 4, "set batch_size to 4 or 8"),
        ("accumulation_steps", 9, "set batch_size to 9"),
        ("evalers.heldout.every_n_steps", 0, "evalers={}"),
        ("learner.frozen_params", ("**",), "learner.frozen_params"),
        ("learner.ema_decay", 1.0, "0.999"),
    ],
)
def test_what_cannot_be_says_what_can(tmp_path, path, value, hint):
    cfg = micro(batch_size=6)
    cfg.set_path(path, value)
    with pytest.raises(AxcoreError) as caught:
        run(cfg, tmp_path / "run")
    assert hint in str(caught.value.hint) and not (tmp_path / "run").exists()


def test_a_word_in_place_of_a_rate_is_refused_before_the_directory_is_made(tmp_path):
    cfg = micro()
    cfg.learner.optimizer.learning_rate = "fast"
    with pytest.raises(AxcoreError, match=r"learning_rate must be a number or a schedule"):
        run(cfg, tmp_path / "run")
    assert not (tmp_path / "run").exists()
