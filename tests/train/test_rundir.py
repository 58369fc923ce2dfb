"""A run's directory: resumed by the same config, refused to anything else, never damaged."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from axcore import experiments
from axcore.config import Config, Configurable
from axcore.errors import TrainError
from axcore.parallel import PipelineModifier
from axcore.train.rundir import RunDir, text_changes


class Watch(Configurable):
    class Config(Configurable.Config):
        every: int = 1


class Run(Configurable):
    class Config(Configurable.Config):
        max_step: int = 10
        dim: int = 4
        rate: float = 0.1
        mesh_shape: tuple[int, ...] = (1,)
        checkpointer: Watch.Config = Watch.Config()
        remat: str = "none"


def text(**kw) -> str:
    return Run.Config(**kw).to_text()


def snapshot(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def refused(run: RunDir, config: str, code: str, **kw) -> TrainError:
    """The error of a refused run; the directory is as before."""
    before = snapshot(run.root)
    with pytest.raises(TrainError) as caught:
        run.prepare(config, **kw)
    assert snapshot(run.root) == before
    assert caught.value.code == code
    assert caught.value.exit_code == 2
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


def test_a_new_directory_gets_config_and_provenance(tmp_path):
    run = RunDir(tmp_path / "a" / "b")
    assert run.prepare(text(), provenance={"dim": []}) == ()
    assert run.config.read_text() == text() == run.config_text
    assert json.loads(run.provenance.read_text()) == {"dim": []}
    assert sorted(p.name for p in run.root.iterdir()) == ["config.txt", "provenance.json"]


def test_checking_touches_nothing(tmp_path):
    assert RunDir(tmp_path / "new").check(text()) == ()
    assert not (tmp_path / "new").exists()


def test_the_same_config_resumes(tmp_path):
    run = RunDir(tmp_path)
    run.prepare(text())
    run.metrics.write_text("{}")
    assert RunDir(tmp_path).prepare(text()) == ()
    assert run.metrics.read_text() == "{}"


def test_another_experiment_is_refused_with_the_differences(tmp_path):
    run = RunDir(tmp_path)
    run.prepare(text())
    error = refused(run, text(dim=8, rate=0.5), "AX742")
    assert "dim: 4 -> 8; rate: 0.1 -> 0.5" in error.message


def test_another_kind_of_config_is_refused(tmp_path):
    run = RunDir(tmp_path)
    run.prepare(text())
    error = refused(run, Watch.Config().to_text(), "AX742")
    assert "(type): config(" in error.message


def test_many_differences_are_counted(tmp_path):
    run = RunDir(tmp_path)
    run.prepare('config("a.B")\n' + "".join(f"f{i}: 0\n" for i in range(30)))
    error = refused(run, 'config("a.B")\n' + "".join(f"f{i}: 1\n" for i in range(30)), "AX742")
    assert "f9: 0 -> 1; and 20 more" in error.message


@pytest.mark.parametrize(
    "change,kind",
    [
        ({"mesh_shape": (4,)}, "hardware"),
        ({"remat": "full"}, "hardware"),
        ({"checkpointer": Watch.Config(every=3)}, "watching"),
    ],
)
def test_hardware_and_watching_may_change(tmp_path, change, kind):
    run = RunDir(tmp_path)
    run.prepare(text())
    (noted,) = run.prepare(text(**change))
    assert noted.kind == kind
    assert run.config_text == text(**change)


def test_a_run_goes_on_as_a_pipeline(tmp_path):
    cfg = experiments.get("tiny-lm")
    run = RunDir(tmp_path / "run")
    run.prepare(cfg.to_text())
    staged = PipelineModifier.Config(num_microbatches=4).instantiate()(cfg.copy())
    assert {c.kind for c in run.prepare(staged.to_text())} == {"hardware"}
    staged.model.decoder.stack.set(layer_values={"scale": (1.0, 2.0)})
    assert "layer_values" in refused(run, staged.to_text(), "AX742").message


def test_a_run_goes_on_after_an_upgrade_that_added_a_field(tmp_path):
    new = experiments.get("tiny-lm").to_text()
    line = "model.z_loss_weight: 0.0\n"
    old = new.replace(line, "")
    assert old != new
    run = RunDir(tmp_path / "run")
    run.prepare(old)
    assert run.prepare(new) == ()
    changed = new.replace(line, "model.z_loss_weight: 0.5\n")
    assert "model.z_loss_weight" in refused(run, changed, "AX742").message


def test_the_horizon_is_raised_only_on_request(tmp_path):
    run = RunDir(tmp_path)
    run.prepare(text())
    error = refused(run, text(max_step=20), "AX743")
    assert "max_step: 10 -> 20" in error.message
    assert "--extend" in error.hint
    (noted,) = run.prepare(text(max_step=20), extend=True)
    assert str(noted) == "max_step: 10 -> 20"
    assert run.config_text == text(max_step=20)


def test_the_horizon_is_never_lowered(tmp_path):
    run = RunDir(tmp_path)
    run.prepare(text())
    assert "--extend" not in refused(run, text(max_step=5), "AX743", extend=True).hint


def test_foreign_files_are_named_and_left_alone(tmp_path):
    for i in range(12):
        (tmp_path / f"photo{i:02}.jpg").write_bytes(b"x")
    error = refused(RunDir(tmp_path), text(), "AX741")
    assert "photo00.jpg, photo01.jpg" in error.message
    assert "and 2 more" in error.message


@pytest.mark.parametrize("content", [b"[settings]\n", b"\xff\xfe", b""])
def test_somebody_elses_config_txt_is_foreign(tmp_path, content):
    (tmp_path / "config.txt").write_bytes(content)
    assert "config.txt" in refused(RunDir(tmp_path), text(), "AX741").message


def test_what_a_kill_left_before_the_config_stood_is_no_obstacle(tmp_path):
    (tmp_path / ".config.txt.partial").write_text("config(")
    run = RunDir(tmp_path)
    run.prepare(text())
    assert [p.name for p in tmp_path.iterdir()] == ["config.txt"]


def test_notes_beside_a_run_are_left_alone(tmp_path):
    run = RunDir(tmp_path)
    run.prepare(text())
    (tmp_path / "notes.txt").write_text("mine")
    run.prepare(text())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_is_refused(tmp_path):
    path = tmp_path / "out"
    path.write_text("x")
    with pytest.raises(TrainError, match="is a file") as caught:
        RunDir(path).prepare(text())
    assert caught.value.code == "AX740"
    assert path.read_text() == "x"


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(TrainError, match="cannot be written") as caught:
        RunDir(tmp_path / "file" / "out").prepare(text())
    assert caught.value.code == "AX744"


def test_a_failed_write_keeps_the_old_content(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    run.prepare(text())

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(TrainError, match="No space left on device"):
        run.prepare(text(mesh_shape=(2,)))
    assert run.config_text == text()
    assert [p.name for p in tmp_path.iterdir()] == ["config.txt"]


@pytest.mark.parametrize(
    "make,reason",
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.write_text(""), "is a file"),
        (lambda p: p.mkdir(), "has no config.txt"),
        (lambda p: RunDir(p).prepare(text()), "has no checkpoints yet"),
    ],
)
def test_what_is_no_model_directory_is_refused(tmp_path, make, reason):
    path = tmp_path / "model"
    make(path)
    with pytest.raises(TrainError, match=reason) as caught:
        RunDir(path).require_model()
    assert caught.value.code == "AX745"


def test_a_model_directory_gives_its_config(tmp_path):
    run = RunDir(tmp_path)
    run.prepare(text())
    run.checkpoints.mkdir()
    assert Config.from_text(run.require_model(), trusted=(__name__,)).to_text() == text()


def test_text_changes_name_new_and_absent_lines():
    old, new = "config('A')\na: 1\nb: 'x: y'\n", "config('A')\nb: 'x: z'\nc: 3\n"
    assert list(map(str, text_changes(old, new))) == [
        "a: 1 (gone)",
        "b: 'x: y' -> 'x: z'",
        "c: 3 (new)",
    ]


def test_a_directory_in_use_is_refused_and_free_again_afterwards(tmp_path):
    run = RunDir(tmp_path / "run")
    with run.alone():
        run.prepare(text())
        with pytest.raises(TrainError) as caught, RunDir(run.root).alone():
            pass
    assert caught.value.code == "AX746"
    with RunDir(run.root).alone():
        pass


def test_a_process_that_was_killed_holds_no_directory(tmp_path):
    code = (
        "import os, sys; from axcore.train.rundir import RunDir; "
        "RunDir(sys.argv[1]).alone().__enter__(); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]
    run = RunDir(tmp_path)
    with run.alone():
        assert run.prepare(text()) == ()


class Tokenizer:
    """A stand-in that saves one file and, like one read from files, may find them in place."""

    def __init__(self, name: str, source: Path | None = None):
        self.name, self.source = name, source

    def save(self, directory: Path) -> None:
        directory.mkdir(exist_ok=True)
        content = self.name if self.source is None else self.source.read_text()
        (directory / self.name).write_text(content)


def started(root: Path, **kw) -> RunDir:
    """A directory as a start leaves it that ended before its first step."""
    run = RunDir(root)
    with run.alone():
        run.prepare(text(**kw), provenance={}, tokenizer=Tokenizer("bytes"))
    run.metrics.touch()
    run.checkpoints.mkdir()
    run.tensorboard.mkdir()
    (run.tensorboard / "events").write_bytes(b"header")
    return run


@pytest.mark.parametrize("change", [{"dim": 8}, {"max_step": 5}])
def test_a_start_that_made_no_step_is_replaced(tmp_path, change):
    run = started(tmp_path)
    assert run.check(text(**change)) == () and run.config_text == text()
    assert run.prepare(text(**change), provenance={"dim": []}) == ()
    assert run.config_text == text(**change)
    assert json.loads(run.provenance.read_text()) == {"dim": []}
    assert not run.tokenizer.exists()


def test_a_replaced_start_leaves_no_tokenizer_beside_the_new_one(tmp_path):
    run = started(tmp_path)
    read_in_place = Tokenizer("pairs", source=run.tokenizer / "bytes")
    run.prepare(text(dim=8), provenance={}, tokenizer=read_in_place)
    assert {p.name: p.read_text() for p in run.tokenizer.iterdir()} == {"pairs": "bytes"}
    assert not list(tmp_path.glob(".tok*"))


def test_a_start_goes_on_with_the_same_config_and_keeps_what_is_there(tmp_path):
    run = started(tmp_path)
    (run.tokenizer / "mine").write_text("x")
    run.prepare(text(), provenance={}, tokenizer=Tokenizer("bytes"))
    assert sorted(p.name for p in run.tokenizer.iterdir()) == ["bytes", "mine"]
    (noted,) = run.prepare(text(remat="full"), provenance={}, tokenizer=Tokenizer("bytes"))
    assert noted.kind == "hardware" and (run.tokenizer / "mine").exists()


@pytest.mark.parametrize(
    "made",
    [
        lambda run: run.metrics.write_text('{"step": 1}\n'),
        lambda run: run.metrics.unlink(),  # events without lines of JSON: metrics for all we know
        lambda run: (run.checkpoints / "3.partial").mkdir(),
        lambda run: run.report.write_text("{}"),
        lambda run: run.conversion.write_text("{}"),
        lambda run: (run.root / "notes.txt").write_text("mine"),
        lambda run: run.provenance.unlink(),  # no start of ours wrote the config
    ],
    ids=["metrics", "events", "checkpoint", "report", "conversion", "notes", "config"],
)
def test_what_more_than_a_start_has_left_is_not_replaced(tmp_path, made):
    run = started(tmp_path)
    made(run)
    refused(run, text(dim=8), "AX742", provenance={}, tokenizer=Tokenizer("pairs"))
    refused(run, text(max_step=5), "AX743", provenance={}, tokenizer=Tokenizer("pairs"))
