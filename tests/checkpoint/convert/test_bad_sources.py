"""Sources that lie, are cut off, or want out of their directory: one line, exit 2, nothing written.

Every case goes through the command, the way a user meets it.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from axcore.cli import main


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))


def header(entries: dict | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file, whatever its header says."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(start: int, stop: int, shape: list, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


# -- files of one safetensors: name -> (content, words of the error) ------------------------------

HEADERS = {
    "empty": (b"", "truncated: it has 0 bytes"),
    "length-of-an-exabyte": (header({}, length=1 << 60), "header claims 1,152,921,504,606,846,976"),
    "length-beyond-the-file": (header({}, length=5000), "truncated: its header claims 5,000 bytes"),
    "negative-length": (header({}, length=2**64 - 1), "header claims"),
    "no-json": (header(b"\x80\x04K\x01."), "its header is no JSON"),
    "deep-json": (header(b"[" * 100_000), "its header is no JSON"),
    "a-list": (header(b"[1, 2]"), "no JSON object"),
    "no-offsets": (header({"a": {"dtype": "F32", "shape": [1]}}), "entry of tensor 'a' is damaged"),
    "unknown-dtype": (header({"a": entry(0, 4, [1], "Z9")}, bytes(4)), "has the dtype 'Z9'"),
    "negative-shape": (header({"a": entry(0, 4, [-1])}, bytes(4)), "has shape [-1]"),
    "shape-of-floats": (header({"a": entry(0, 4, [1.0])}, bytes(4)), "has shape [1.0]"),
    "huge-shape": (
        header({"a": entry(0, 4, [2**62, 2**62])}, bytes(4)),
        "leave 4",
    ),
    "beyond-the-end": (header({"a": entry(0, 8, [2])}, bytes(4)), "truncated or damaged"),
    "reversed-offsets": (header({"a": entry(4, 0, [1])}, bytes(4)), "truncated or damaged"),
    "overlap": (
        header({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
        "tensor 'b' overlaps tensor 'a'",
    ),
    "gap": (header({"a": entry(4, 8, [1])}, bytes(8)), "leaves a gap after the header"),
    "bytes-left-over": (header({"a": entry(0, 4, [1])}, bytes(9)), "5 bytes that belong to no"),
    "the-same-name-twice": (
        header(
            b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
            b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            bytes(8),
        ),
        "names 'a' twice",
    ),
}


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs the command and checks that it fails as it should; returns the error line."""

    def run(source: Path, *flags: str) -> str:
        out = tmp_path / "somewhere" / "out"
        before = sorted(path.name for path in tmp_path.iterdir())
        flags = ("--out", str(out), "--tokenizer", "byte", "--verify", "never", *flags)
        code = main(["convert", str(source), *flags])
        shown = capsys.readouterr()
        lines = shown.err.strip().splitlines()
        if lines[0].startswith("converting "):  # what is said before tensors are read
            del lines[0]
        assert code == 2 and lines[0].startswith("error: "), shown.err
        assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: "))
        assert shown.out == "" and "Traceback" not in shown.err
        assert sorted(path.name for path in tmp_path.iterdir()) == before
        return "\n".join(lines)

    return run


@pytest.fixture
def directory(tmp_path, settings) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_lies_is_refused(directory, refused, name):
    content, words = HEADERS[name]
    (directory / "model.safetensors").write_bytes(content)
    assert words in refused(directory)


def test_a_file_that_was_cut_off_is_refused(write_hf, tensors, refused):
    path = write_hf(tensors) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in refused(path.parent)


def test_nan_and_infinity_are_refused_by_name(write_hf, tensors, refused):
    tensors["h.1.up.bias"][3] = np.nan
    tensors["lnf.bias"][0] = np.inf
    assert "h.1.up.bias has values that are NaN or infinite" in refused(write_hf(tensors))


def test_codes_in_the_place_of_numbers_are_refused(write_hf, tensors, refused):
    tensors["lnf.bias"] = np.ones(tensors["lnf.bias"].shape, np.int32)
    assert "'lnf.bias' holds int32, expected floating-point numbers" in refused(write_hf(tensors))


def test_what_float16_cannot_hold_is_refused(write_hf, tensors, refused):
    tensors["wpe"][0, 0] = 1e6
    assert "wpe has values that are NaN or infinite, as float16" in refused(
        write_hf(tensors), "--dtype", "float16"
    )


def test_an_unknown_architecture_is_refused_with_near_misses(write_hf, tensors, refused):
    text = refused(write_hf(tensors, architectures=["ToyForCausalML"]))
    assert "the source is 'ToyForCausalML', which no converter knows" in text
    assert "did you mean 'hf:ToyForCausalLM'" in text


def test_a_registration_that_is_no_family_is_refused(write_hf, tensors, refused):
    assert "expected a ModelFamily" in refused(write_hf(tensors, architectures=["NoFamily"]))


def test_an_architecture_that_is_not_stated_is_asked_for(write_hf, tensors, tmp_path, capsys):
    source = write_hf(tensors, architectures=[])
    flags = ("--tokenizer", "byte", "--verify", "never", "--out", str(tmp_path / "out"))
    assert main(["convert", str(source), *flags]) == 2
    shown = capsys.readouterr().err
    assert "does not say what it is, and no converter fits" in shown and "--family" in shown
    assert "converter hf:NoFamily is left out" in shown
    assert main(["convert", str(source), *flags, "--family", "ToyForCausalLM"]) == 0


# -- shards -----------------------------------------------------------------------------------


def test_a_missing_shard_is_named(write_hf, tensors, refused):
    directory = write_hf(tensors, shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    assert "the shard model-00002-of-00002.safetensors is missing" in refused(directory)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../model.safetensors", "sub/a.safetensors", "..", "C:\\a", "..\\a", ""]
)
def test_an_index_names_plain_files_only(directory, refused, name):
    write_index(directory, {"wte": name})
    assert "expected a file name without a path [AX611]" in refused(directory)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"{", "is no JSON"),
        (b"[]", "is a JSON list"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {"a": 1}}', "expected a file name"),
        (b"\xff\xfe", "is no JSON"),
    ],
    ids=["cut", "list", "empty", "number", "bytes"],
)
def test_a_damaged_index_is_refused(directory, refused, index, words):
    (directory / "model.safetensors.index.json").write_bytes(index)
    assert words in refused(directory)


def test_shards_and_index_must_agree(write_hf, tensors, refused):
    directory = write_hf(tensors, shards=2)
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first, second = sorted(set(weight_map.values()))
    write_index(directory, weight_map | {"ghost": first})
    assert "tensor 'ghost' is not in" in refused(directory)
    name = next(n for n, shard in weight_map.items() if shard == second)
    write_index(directory, weight_map | {name: first})
    assert f"tensor {name!r} of" in refused(directory)


def test_a_tensor_in_two_shards_is_refused(write_hf, tensors, refused):
    directory = write_hf(tensors, shards=2)
    first, second = sorted(directory.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    assert "is in model-00001-of-00002.safetensors and in" in refused(directory)


def test_a_link_out_of_the_directory_is_refused(write_hf, tensors, refused, tmp_path):
    directory = write_hf(tensors)
    (directory / "model.safetensors").rename(tmp_path / "elsewhere")
    (directory / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert "model.safetensors is a link that leads out of the directory" in refused(directory)


def test_a_tokenizer_that_is_a_link_out_is_refused(write_hf, tensors, tmp_path, capsys):
    directory = write_hf(tensors)
    (tmp_path / "secret").write_text("{}")
    (directory / "tokenizer.json").symlink_to(tmp_path / "secret")
    flags = ("--out", str(tmp_path / "out"), "--verify", "never")
    assert main(["convert", str(directory), *flags]) == 2
    assert "tokenizer.json is a link that leads out" in capsys.readouterr().err


def test_links_into_the_blobs_of_a_hub_cache_are_fine(write_hf, tensors, tmp_path):
    snapshots = tmp_path / "models--toy" / "snapshots"
    snapshots.mkdir(parents=True)
    (snapshots.parent / "blobs").mkdir()
    directory = write_hf(tensors).rename(snapshots / "abc")
    for path in list(directory.iterdir()):
        blob = snapshots.parent / "blobs" / path.name
        path.rename(blob)
        path.symlink_to(Path("../../blobs") / path.name)
    out = str(tmp_path / "out")
    flags = ("--tokenizer", "byte", "--verify", "never")
    assert main(["convert", str(directory), "--out", out, *flags]) == 0


# -- the rest of a directory --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is no JSON"),
        (b'"text"', "is a JSON str"),
        (b"\xff", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b'{"quantization_config": {}}', "the weights are quantized"),
    ],
    ids=["cut", "text", "bytes", "deep", "quantized"],
)
def test_an_unreadable_config_is_refused(directory, refused, content, words):
    (directory / "config.json").write_bytes(content)
    assert words in refused(directory)


def test_a_setting_of_another_type_is_refused(write_hf, tensors, refused):
    source = write_hf(tensors, hidden_size="16")
    assert "the setting 'hidden_size' is '16', expected int" in refused(source)


def test_pickled_weights_are_refused_with_a_way_out(directory, refused):
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    text = refused(directory)
    assert "is a pickle, which can run any code and is never read" in text
    assert "safe_serialization=True" in text
    assert "is never read" in refused(directory / "pytorch_model.bin")


def test_a_pipe_is_refused_and_not_waited_for(directory, refused):
    os.mkfifo(directory / "model.safetensors")
    assert "is no regular file" in refused(directory)


@pytest.mark.parametrize("name", ["nothing", "notes.txt", "empty"])
def test_what_is_no_model_is_refused(tmp_path, refused, name):
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    text = refused(tmp_path / name)
    assert "no such file" in text or "--format" in text or "no config.json" in text


def test_an_output_that_exists_is_refused_and_left_alone(write_hf, tensors, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    flags = ("--out", str(out), "--tokenizer", "byte", "--verify", "never")
    assert main(["convert", str(write_hf(tensors)), *flags]) == 2
    assert "exists already; nothing was written" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_an_output_that_no_file_system_can_name_is_refused(write_hf, tensors, tmp_path, capsys):
    out = tmp_path / ("n" * 300)
    assert main(["convert", str(write_hf(tensors)), "--out", str(out), "--verify", "never"]) == 2
    assert "cannot be written: File name too long" in capsys.readouterr().err


def test_a_foreign_partial_directory_is_left_alone(write_hf, tensors, tmp_path, capsys):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "mine.txt").write_text("mine")
    flags = ("--out", str(tmp_path / "out"), "--tokenizer", "byte", "--verify", "never")
    assert main(["convert", str(write_hf(tensors)), *flags]) == 2
    assert "holds files that are not ours" in capsys.readouterr().err
    assert (partial / "mine.txt").read_text() == "mine"


def test_what_a_kill_left_behind_is_cleared(write_hf, tensors, tmp_path):
    partial = tmp_path / "out.partial"
    (partial / "checkpoints").mkdir(parents=True)
    (partial / ".lock").touch()
    flags = ("--out", str(tmp_path / "out"), "--tokenizer", "byte", "--verify", "never")
    assert main(["convert", str(write_hf(tensors)), *flags]) == 0
    assert not partial.exists()
    assert not (tmp_path / "out" / ".lock").exists()


# -- npz --------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def write_npz(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def npy(array: np.ndarray, **kwargs) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, **kwargs)
    return buffer.getvalue()


def test_object_arrays_are_never_unpickled(tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    objects = npy(np.array([Bomb()], object), allow_pickle=True)
    text = refused(write_npz(tmp_path / "a.npz", [("w.npy", objects)]))
    assert "array 'w' holds Python objects" in text
    assert not (tmp_path / "unpickled").exists()


NUMBERS = npy(np.zeros((4, 4), np.float32))


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([("w.npy", NUMBERS[:-8])], "takes 64 bytes; the archive holds 56"),
        ([("w.npy", NUMBERS.replace(b"(4, 4)", b"(4**9)"))], "damaged header"),
        ([("w.npy", NUMBERS.replace(b"(4, 4)", b"(9**9)"))], "damaged header"),
        ([("w.npy", b"text")], "damaged header"),
        ([("notes.txt", b"text")], "'notes.txt' is no array"),
        ([("w.npy", npy(np.array(["a", "b"])))], "which is not one of numbers"),
        ([("__config__.npy", npy(np.array("{")))], "__config__ is no JSON"),
        ([("__config__.npy", npy(np.array("[]")))], "is no JSON object"),
    ],
    ids=["cut", "code-in-shape", "more-code", "no-npy", "text", "strings", "json", "list"],
)
def test_a_damaged_archive_is_refused(tmp_path, refused, members, words):
    assert words in refused(write_npz(tmp_path / "a.npz", members))


def test_a_cut_archive_and_a_flipped_bit_are_refused(tmp_path, refused, tensors, settings):
    settings = {"model_type": "toy", **settings}
    whole = tmp_path / "whole.npz"
    np.savez(whole, __config__=json.dumps(settings), **tensors)
    (tmp_path / "cut.npz").write_bytes(whole.read_bytes()[:-100])
    assert "is no npz archive" in refused(tmp_path / "cut.npz")
    data = bytearray(whole.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "flipped.npz").write_bytes(data)
    assert "is damaged: Bad CRC-32" in refused(tmp_path / "flipped.npz")


def test_an_archive_with_a_name_twice_is_refused(tmp_path, refused):
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = write_npz(tmp_path / "a.npz", [("w.npy", NUMBERS), ("w.npy", NUMBERS)])
    assert "has 'w' twice" in refused(path)
