"""Metric writers: what they write, what a kill leaves behind, and that none stops training."""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from axcore.config import Config
from axcore.train._flat_metrics import flat_metrics
from axcore.train.loss_plot import plot_loss
from axcore.train.writers import (
    BaseWriter,
    ConsoleWriter,
    JsonlWriter,
    TensorBoardWriter,
    WriterGroup,
    read_metrics,
)


def opened(writer_class: type[BaseWriter], out: Path, step: int = 0, **kw) -> BaseWriter:
    writer = writer_class.Config(**kw).instantiate()
    writer.open(out, step=step, max_step=10)
    return writer


def write_rows(out: Path, steps, loss=1.5) -> None:
    writer = opened(JsonlWriter, out, step=min(steps))
    for step in steps:
        writer.write(step, {"loss": loss, "tokens": step * 64})
    writer.close()


# -- JSON lines ---------------------------------------------------------------------------------


def test_an_object_per_step(tmp_path):
    write_rows(tmp_path, [1, 2])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 1.5, "tokens": 64},
        {"step": 2, "loss": 1.5, "tokens": 128},
    ]


def test_each_line_is_there_at_once(tmp_path):
    writer = opened(JsonlWriter, tmp_path)
    writer.write(1, {"loss": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 1.0}
    writer.close()


def test_the_last_line_of_a_step_holds_training_and_evaluation(tmp_path):
    writer = opened(JsonlWriter, tmp_path)
    writer.write(1, {"loss": 1.0, "tokens": 64})
    writer.write(1, {"heldout/loss": 2.0})
    writer.write(2, {"loss": 0.5, "tokens": 128})
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 1.0, "tokens": 64, "heldout/loss": 2.0},
        {"step": 2, "loss": 0.5, "tokens": 128},
    ]


def test_a_resumed_run_appends_and_the_last_line_of_a_step_counts(tmp_path):
    write_rows(tmp_path, [1, 2, 3], loss=1.0)
    write_rows(tmp_path, [3, 4], loss=2.0)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["loss"]) for r in rows] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"\0\0\0\0", b"{}", b'{"step": 3'])
def test_a_torn_last_line_is_removed(tmp_path, torn):
    write_rows(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + torn)
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    write_rows(tmp_path, [3])
    assert path.read_bytes().startswith(before + b'{"step": 3, "loss"')
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]


def test_a_last_line_without_its_end_is_completed(tmp_path):
    write_rows(tmp_path, [1, 2])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    write_rows(tmp_path, [3])
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3]


def test_a_file_of_nothing_but_a_torn_line_is_emptied(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step"')
    write_rows(tmp_path, [1])
    assert [r["step"] for r in read_metrics(path)] == [1]


def test_numbers_that_json_lacks_are_null(tmp_path):
    writer = opened(JsonlWriter, tmp_path)
    writer.write(1, {"loss": float("nan"), "a": float("inf"), "b": np.float32(0.5)})
    writer.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert row == {"step": 1, "loss": None, "a": None, "b": 0.5}


def test_vectors_are_lists(tmp_path):
    writer = opened(JsonlWriter, tmp_path)
    writer.write(1, {"loss": 1.0, "load": (0.5, float("nan"))})
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 1.0, "load": [0.5, None]}
    ]


def test_a_kill_loses_no_finished_line(tmp_path):
    body = """
import sys
from pathlib import Path
from axcore.train.writers import JsonlWriter
writer = JsonlWriter.Config().instantiate()
writer.open(Path(sys.argv[1]), step=0, max_step=10)
step = 0
while True:
    step += 1
    writer.write(step, {"loss": 1.0, "note" * 20: 2.0})
    print(step, flush=True)
"""
    command = [sys.executable, "-c", body, str(tmp_path)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(20)]
        process.kill()
        lines += process.stdout.readlines()
    announced = int(lines[-1])
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows][:announced] == list(range(1, announced + 1))


# -- TensorBoard --------------------------------------------------------------------------------


def events(out: Path) -> list:
    """Returns (step, value) of what the files hold."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = (out / "tensorboard").iterdir()
    data, found = path.read_bytes(), []
    while data:  # a record: length (8), its checksum (4), event, checksum (4)
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        found += [(event.step, value) for value in event.summary.value]
        data = data[16 + size :]
    return found


def test_tensorboard_files_hold_the_scalars(tmp_path):
    pytest.importorskip("tensorboardX")
    writer = opened(TensorBoardWriter, tmp_path)
    writer.write(3, {"loss": 1.5})
    writer.close()
    assert [(step, v.tag, v.simple_value) for step, v in events(tmp_path)] == [(3, "loss", 1.5)]


def test_tensorboard_files_hold_vectors_as_histograms(tmp_path):
    pytest.importorskip("tensorboardX")
    writer = opened(TensorBoardWriter, tmp_path)
    writer.write(3, {"load": (0.5, 0.25, 0.25, float("nan")), "nothing": (float("nan"),)})
    writer.close()
    ((_, value),) = events(tmp_path)
    assert (value.tag, value.histo.num, value.histo.sum) == ("load", 3.0, 1.0)
    assert (value.histo.min, value.histo.max) == (0.25, 0.5)


def test_a_missing_extra_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    group = WriterGroup({"tensorboard": TensorBoardWriter.Config().instantiate()})
    with caplog.at_level(logging.WARNING):
        group.open(tmp_path, step=0, max_step=1)
    assert "pip install 'axcore[tensorboard]'" in group.failures["tensorboard"]
    assert "tensorboardX" in caplog.text


# -- console ------------------------------------------------------------------------------------


def test_lines_come_now_and_then_when_there_is_no_terminal(tmp_path, capsys):
    writer = opened(ConsoleWriter, tmp_path, every_seconds=1e6)
    for step in range(1, 11):
        more = {"heldout/loss": 2.0} if step == 5 else {}
        writer.write(step, {"loss": 1.25, "tokens": 1, "tokens_per_second": 1234.5, **more})
    writer.close()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "step 1/10  loss 1.2500  1,234 tokens/s",
        "step 5/10  loss 1.2500  1,234 tokens/s  heldout/loss 2.0000",
        "step 10/10  loss 1.2500  1,234 tokens/s",
    ]


def test_a_terminal_shows_a_bar_that_ends(tmp_path):
    body = """
from pathlib import Path
from axcore.train.writers import ConsoleWriter
writer = ConsoleWriter.Config().instantiate()
writer.open(Path("."), step=0, max_step=3)
for step in (1, 2, 3):
    writer.write(step, {"loss": 1.25, "heldout/loss": 2.0})
writer.close()
"""
    primary, secondary = pty.openpty()
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", body]
    shown = b""
    # Read meanwhile: a pseudo terminal holds 4 KiB, and a slow process draws its bar more often.
    with subprocess.Popen(command, stderr=secondary, env=env) as done:
        os.close(secondary)
        try:
            while chunk := os.read(primary, 4096):
                shown += chunk
        except OSError:
            pass  # the end of a pseudo terminal
    os.close(primary)
    assert done.returncode == 0, shown
    assert b"3/3" in shown and b"loss 1.2500" in shown and b"heldout/loss 2.0000" in shown


# -- isolation ----------------------------------------------------------------------------------


class Failing(BaseWriter):
    class Config(BaseWriter.Config):
        method: str = "write"

    def __init__(self, cfg: Config):
        super().__init__(cfg)
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.cfg.method == name:
            raise OSError(28, "No space left on device")

    def open(self, out, *, step, max_step):
        self._call("open")

    def write(self, step, metrics):
        self._call("write")

    def close(self):
        self._call("close")


@pytest.mark.parametrize(
    "method,calls",
    [
        ("open", ["open", "close"]),
        ("write", ["open", "write", "close"]),
        ("close", ["open", "write", "write", "close"]),
    ],
)
def test_a_failing_writer_is_reported_once_and_others_go_on(tmp_path, caplog, method, calls):
    failing = Failing.Config(method=method).instantiate()
    group = WriterGroup({"bad": failing, "jsonl": JsonlWriter.Config().instantiate()})
    with caplog.at_level(logging.WARNING):
        group.open(tmp_path, step=0, max_step=2)
        group.write(1, {"loss": 1.0})
        group.write(2, {"loss": 1.0})
        group.close()
    assert failing.calls == calls
    assert list(group.failures) == ["bad"]
    assert "No space left on device" in group.failures["bad"]
    assert len([r for r in caplog.records if "metric writer bad" in r.getMessage()]) == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2


def test_writers_that_know_numbers_only_get_no_vectors(tmp_path):
    class Keeping(BaseWriter):
        def __init__(self, cfg: BaseWriter.Config):
            super().__init__(cfg)
            self.got: list[dict] = []

        def write(self, step, metrics):
            self.got.append(dict(metrics))

    class KeepingAll(Keeping):
        takes_vectors = True

    metrics = {"loss": 1.0, "load": (0.5, 0.5)}
    writers = [kind(BaseWriter.Config()) for kind in (Keeping, KeepingAll)]
    WriterGroup({str(i): writer for i, writer in enumerate(writers)}).write(1, metrics)
    assert [writer.got for writer in writers] == [[{"loss": 1.0}], [metrics]]


def test_an_interrupt_is_not_swallowed(tmp_path):
    class Interrupting(Failing):
        def write(self, step, metrics):
            raise KeyboardInterrupt

    group = WriterGroup({"x": Interrupting(Failing.Config())})
    with pytest.raises(KeyboardInterrupt):
        group.write(1, {})


def test_writer_configs_round_trip_as_text():
    cfg = ConsoleWriter.Config(every_seconds=3.0)
    assert Config.from_text(cfg.to_text()) == cfg


# -- what is written ----------------------------------------------------------------------------


def test_layers_of_a_scan_are_written_one_by_one_scalars_and_vectors():
    values = {
        "loss": np.float32(1.5),
        "summaries": {
            "layer/0:2:1/load": np.array([[0.1, 0.9], [0.5, 0.5]], np.float32),
            "layer/0:2:1/entropy": np.array([0.25, 0.5], np.float32),
            "count": np.array([3, 4], np.int32),
            "matrix": np.zeros((2, 2), np.float32),
        },
    }
    scalars, vectors = flat_metrics(values)
    assert scalars == {"loss": 1.5, "layer/0/entropy": 0.25, "layer/1/entropy": 0.5}
    # 0.1 and not 0.10000000149011612: as many digits as a float32 has.
    assert vectors == {"layer/0/load": (0.1, 0.9), "layer/1/load": (0.5, 0.5), "count": (3.0, 4.0)}


# -- the picture --------------------------------------------------------------------------------


def test_the_loss_is_plotted(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    writer = opened(JsonlWriter, tmp_path)
    for step in range(1, 301):
        held_out = {"heldout/loss": 2.0} if step % 100 == 0 else {}
        writer.write(step, {"loss": 1 / step if step != 7 else float("nan"), **held_out})
    writer.close()
    target = tmp_path / "plots" / "loss.png"
    assert plot_loss(tmp_path / "metrics.jsonl", target, title="tiny") is None
    height, width = image.imread(target).shape[:2]
    assert (width, height) == (960, 540)
    assert [p.name for p in target.parent.iterdir()] == ["loss.png"]


def test_without_matplotlib_the_reason_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    reason = plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert "pip install 'axcore[plots]'" in str(reason)
    assert not (tmp_path / "loss.png").exists()


def test_without_a_loss_there_is_a_reason(tmp_path):
    pytest.importorskip("matplotlib")
    assert "no loss yet" in str(plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png"))


def test_a_plot_that_cannot_be_made_is_a_reason_and_no_error(tmp_path):
    pytest.importorskip("matplotlib")
    metrics = tmp_path / "metrics.jsonl"
    metrics.mkdir()
    assert "cannot be read" in str(plot_loss(metrics, tmp_path / "loss.png"))
    metrics.rmdir()
    metrics.write_text('{"step": 1, "loss": 2.0}\n')
    (tmp_path / "plots").write_text("in the way")
    assert "cannot be written" in str(plot_loss(metrics, tmp_path / "plots" / "loss.png"))
