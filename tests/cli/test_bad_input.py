"""Bad input: one line, a hint, exit code 2, and files as they were."""

from __future__ import annotations

import builtins
import errno
import gzip
import os
import shutil
from pathlib import Path

import pytest

from axcore.train import RunDir


def assert_refused(done, *told: str, code: int = 2) -> None:
    """One ``error:`` line and a hint, which say what is told, and nothing on stdout."""
    lines = done.err.splitlines()
    assert done.code == code, done.err
    assert done.out == ""
    assert [line.partition(":")[0] for line in lines] == ["error", "hint"], done.err
    for text in told:
        assert text in done.err


@pytest.fixture
def out(tmp_path):
    """A run's directory that a refused command must not make."""
    path = tmp_path / "out"
    yield path
    assert not path.exists()


# Experiments ----------------------------------------------------------------------------------


def test_an_unknown_experiment_gets_near_misses(train, out):
    assert_refused(train(out, experiment="tiny-ml"), "tiny-ml", "did you mean 'tiny-lm'?")


def test_a_module_that_is_not_there_is_no_experiment(train, out):
    assert_refused(train(out, experiment="no_such_package.exp:f"), "no experiment", "PYTHONPATH")


def test_a_function_that_is_not_there_gets_near_misses(train, out, module):
    name = module("fewfunctions", "def small():\n    pass\n")
    assert_refused(train(out, experiment=f"{name}:smal"), "smal", "did you mean 'small'?")


def test_a_package_missing_inside_an_experiment_is_not_called_no_such_experiment(
    train, out, module
):
    name = module("needs", "import no_such_package_of_mine\n")
    done = train(out, experiment=f"{name}:exp")
    assert_refused(done, "needs 'no_such_package_of_mine'", "install no_such_package_of_mine")
    assert "no experiment" not in done.err


def test_a_function_that_returns_something_else_is_named(train, out, module):
    name = module("returnsint", "def exp():\n    return 3\n")
    assert_refused(train(out, experiment=f"{name}:exp"), "is a int", "Trainer.Config")


def test_a_config_file_that_cannot_be_read_back_names_its_line(train, out, tmp_path):
    text = tmp_path / "config.txt"
    text.write_text('config("axcore.train.Trainer")\nmax_step 3\n')
    done = train(out, experiment=str(text))
    assert done.code == 2 and "line 2" in done.err


def test_a_config_file_that_is_not_there_is_named(train, out):
    assert_refused(train(out, experiment="runs/none/config.txt"), "runs/none/config.txt")


# Flags ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("batch_sise=2", ["batch_sise", "did you mean 'batch_size'?"]),
        ("model.decoder.num_layer=2", ["model.decoder.num_layer", "num_layers"]),
        ("model.nothing.here=2", ["nothing"]),
    ],
)
def test_an_unknown_path_in_set_gets_near_misses(train, out, flag, told):
    assert_refused(train(out, "--set", flag), *told)


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("batch_size=two", ["batch_size", "int"]),
        ("batch_size=2.5", ["batch_size", "2.5", "int"]),
        ("batch_size=True", ["batch_size", "bool", "int"]),
        ("learner.clip_global_norm='a'", ["clip_global_norm"]),
        ("model=3", ["model"]),
    ],
)
def test_a_wrong_type_in_set_names_path_and_type(train, out, flag, told):
    done = train(out, "--set", flag)
    assert done.code == 2 and done.err.count("error: ") == 1
    for text in told:
        assert text in done.err


def test_set_without_a_value_shows_the_form(train, out):
    assert_refused(train(out, "--set", "batch_size"), "path=value")


@pytest.mark.parametrize("steps", ["0", "-3"])
def test_max_step_must_be_positive(train, out, steps):
    assert_refused(train(out, "--max-step", steps), f"--max-step is {steps}", "1 or more")


def test_max_step_must_be_a_number(train, out):
    assert_refused(train(out, "--max-step", "many"), "--max-step", "many")


@pytest.mark.parametrize("path", ["max_step", "batch_size", "seq_len", "accumulation_steps"])
def test_sizes_set_to_zero_are_refused(train, out, path):
    done = train(out, "--set", f"{path}=0")
    assert done.code == 2 and path in done.err


def test_an_unknown_instance_gets_near_misses(train, out):
    assert_refused(train(out, "--instance", "cqu-8"), "unknown instance 'cqu-8'", "'cpu-8'")
    assert_refused(train(out, "--instance", "cpu-0"), "cpu-0")


@pytest.mark.parametrize("flag", ["--instance", "--init-from"])
def test_what_is_empty_is_not_taken_as_not_given(train, out, flag):
    assert_refused(train(out, flag, ""), flag, "is empty")


def test_an_unknown_modifier_is_named(train, out):
    done = train(out, "--modifier", "acme:fast")
    assert done.code == 2 and "acme:fast" in done.err


@pytest.mark.parametrize(
    ("arguments", "told"), [("rank=2,rank=3", "'rank=3' twice"), ("=2", "'=2' without a name")]
)
def test_a_modifiers_arguments_are_named_once(train, out, arguments, told):
    assert told in train(out, "--modifier", f"lora:{arguments}").err


def test_an_unknown_distribution_in_use_is_named(train, out):
    done = train(out, "--use", "acme-kernels")
    assert done.code == 2 and "acme-kernels" in done.err


# Data -----------------------------------------------------------------------------------------


def data(kind: str, *paths: object) -> tuple[str, ...]:
    listed = ", ".join(repr(str(p)) for p in paths)
    return (
        *("--set", f'input.source=config("axcore.data.{kind}")'),
        *("--set", f"input.source.paths=({listed},)"),
    )


def test_an_empty_file_is_refused(train, out, tmp_path):
    file = tmp_path / "empty.txt"
    file.write_text("")
    assert_refused(train(out, *data("TextFiles", file)), "empty.txt")


def test_a_binary_file_is_refused(train, out, tmp_path):
    file = tmp_path / "binary.txt"
    file.write_bytes(bytes(range(256)) * 4)
    assert_refused(train(out, *data("TextFiles", file)), "binary.txt")


def test_a_missing_file_is_refused_with_near_misses(train, out, tmp_path):
    (tmp_path / "notes.txt").write_text("text")
    done = train(out, *data("TextFiles", tmp_path / "note.txt"))
    assert_refused(done, "note.txt", "did you mean 'notes.txt'?")


def test_a_pattern_that_matches_nothing_is_refused(train, out, tmp_path):
    assert_refused(train(out, *data("TextFiles", tmp_path / "*.txt")), "matches no file")


def test_an_unreadable_file_is_refused(train, out, tmp_path, monkeypatch):
    file = tmp_path / "secret.txt"
    file.write_text("text")
    file.chmod(0)
    if os.access(file, os.R_OK):  # root reads every file
        real = builtins.open

        def refuse(path, *args, **kwargs):
            if str(path) == str(file):
                raise PermissionError(errno.EACCES, "Permission denied", str(file))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(builtins, "open", refuse)
    assert_refused(train(out, *data("TextFiles", file)), "secret.txt")


def test_a_directory_in_place_of_a_file_is_refused(train, out, tmp_path):
    (tmp_path / "folder").mkdir()
    assert_refused(train(out, *data("TextFiles", tmp_path / "folder")), "directory")


def test_a_cut_off_gzip_file_is_refused(train, out, tmp_path):
    file = tmp_path / "cut.txt.gz"
    file.write_bytes(gzip.compress(os.urandom(4000))[:-100])
    assert_refused(train(out, *data("TextFiles", file)), "cut.txt.gz")


def test_a_broken_line_of_json_names_file_and_line(train, out, tmp_path):
    file = tmp_path / "rows.jsonl"
    good = '{"text": "some words"}\n'
    file.write_text(good * 3 + '{"text": "cut\n' + good * 3)
    assert_refused(train(out, *data("JsonLines", file)), "rows.jsonl", "4")


def test_a_broken_line_of_json_is_skipped_when_asked(train, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [f'{{"text": "some words of document {i}"}}\n' for i in range(40)]
    file.write_text("".join([*rows[:20], '{"text": "cut\n', *rows[20:]]))
    flags = (*data("JsonLines", file), "--set", "input.source.on_bad_line=skip", "--json")
    flags += ("--set", "sample_prompt=None")
    done = train(tmp_path / "out", *flags)
    assert done.code == 0, done.err
    assert done.json["data"]["skipped"] == 1


def test_too_few_documents_to_hold_any_out_are_refused(train, out, tmp_path):
    file = tmp_path / "one.txt"
    file.write_text("one document")
    done = train(out, *data("TextFiles", file))
    assert_refused(done, "too few to hold out", "split")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(train, out):
    assert_refused(train(out, "--set", "model.vocab_size=100"), "model.vocab_size=264")


# Output directories ---------------------------------------------------------------------------


def test_another_experiments_directory_is_left_alone_and_the_diff_shown(train, trained, contents):
    before = contents(trained.out)
    done = train(trained.out, "--set", "seed=9")
    assert_refused(done, "seed: 0 -> 9", str(trained.out))
    assert contents(trained.out) == before


def test_a_directory_with_foreign_files_is_left_alone(train, tmp_path, contents):
    out = tmp_path / "photos"
    out.mkdir()
    (out / "cat.jpg").write_bytes(b"meow")
    before = contents(out)
    assert_refused(train(out), "cat.jpg")
    assert contents(out) == before


def test_a_file_in_place_of_the_directory_is_left_alone(train, tmp_path):
    out = tmp_path / "out"
    out.write_text("mine")
    done = train(out)
    assert done.code == 2 and "is a file" in done.err
    assert out.read_text() == "mine"


def test_another_end_of_the_run_needs_extend(train, trained, contents):
    before = contents(trained.out)
    done = train(trained.out, "--max-step", "5")
    assert_refused(done, "max_step: 3 -> 5", "--extend")
    assert contents(trained.out) == before


def test_a_directory_that_cannot_be_made_is_named(train, tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def refuse(path, *args, **kwargs):
        if "locked" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", refuse)
    done = train(tmp_path / "locked" / "out")
    assert_refused(done, "locked", "Permission denied")


def test_a_checkpoint_of_another_model_names_the_tensors(train, trained, tmp_path, contents):
    out = tmp_path / "run"
    shutil.copytree(trained.out, out)
    run = RunDir(out)
    text = run.config.read_text()
    assert "model.model_dim: 8" in text
    run.config.write_text(text.replace("model.model_dim: 8", "model.model_dim: 16"))
    before = contents(out / "checkpoints")
    done = train(out, "--set", "model.model_dim=16")
    assert done.code == 2
    assert "of another model" in done.err and "tensors differ" in done.err
    assert "model/decoder/final_norm/scale has shape [8], expected [16]" in done.err
    assert contents(out / "checkpoints") == before


def test_a_full_disk_keeps_the_last_good_checkpoint_and_says_so(
    train, trained, tmp_path, contents, monkeypatch
):
    from axcore.checkpoint import _failure

    out = tmp_path / "run"
    shutil.copytree(trained.out, out)
    before = contents(out / "checkpoints")
    monkeypatch.setattr(_failure, "free_bytes", lambda root: 10)
    done = train(out, "--max-step", "4", "--extend")
    assert done.code == 2
    assert "the disk is full" in done.err and "step 3" in done.err and "hint: " in done.err
    assert contents(out / "checkpoints") == before


# Model directories ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["generate", "--prompt", "a", "--max-tokens", "2"], ["eval"]], ids=lambda c: c[0]
)
@pytest.mark.parametrize("kind", ["missing", "empty", "file", "foreign", "no checkpoints"])
def test_what_is_no_model_directory_is_refused(cli, trained, tmp_path, command, kind):
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("mine")
    elif kind != "missing":
        place.mkdir()
    if kind == "foreign":
        (place / "cat.jpg").write_bytes(b"meow")
    if kind == "no checkpoints":
        shutil.copy(trained.out / "config.txt", place)
    done = cli(command[0], "--from", place, *command[1:])
    assert_refused(done, "no model directory", str(place))


def test_a_step_that_is_not_saved_is_named(cli, trained):
    done = cli(
        *("generate", "--from", trained.out, "--prompt", "a", "--max-tokens", "2"),
        *("--step", "77"),
    )
    assert done.code == 2 and "77" in done.err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["--prompt", "", "--max-tokens", "2"], "no tokens"),
        (["--prompt", "a", "--max-tokens", "99", "--no-slide"], "slide"),
        (["--prompt", "a", "--max-tokens", "2", "--temperature", "-1"], "temperature"),
        (["--prompt", "a", "--max-tokens", "2", "--top-p", "0"], "top_p"),
        (["--chat", "hi", "--max-tokens", "2"], "no chat template"),
        (["--max-tokens", "2"], "--prompt"),
        (["--prompt", "a"], "--max-tokens"),
    ],
)
def test_generation_that_cannot_be_is_refused(cli, trained, flags, told):
    done = cli("generate", "--from", trained.out, *flags)
    assert done.code == 2 and told in done.err and done.out == ""
    assert done.err.startswith("error: ") and len(done.err.splitlines()) <= 2


def test_evaluation_of_a_file_that_is_not_there_is_refused(cli, trained, tmp_path):
    done = cli("eval", "--from", trained.out, "--text", tmp_path / "no.txt")
    assert_refused(done, "no.txt")
