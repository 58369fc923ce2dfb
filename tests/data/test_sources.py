"""Sources: what is a document, and what bad input says."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pydoc_data.topics
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from axcore.data import JsonLines, Mixture, Parquet, PythonReference, TextFiles, TextInput
from axcore.errors import DataError


def _texts(cfg) -> list[str]:
    return [d.text for d in cfg.instantiate()]


def _fails(cfg, code: str) -> DataError:
    """The error of preparing ``cfg``, checked for the form that all of them have."""
    source = cfg.instantiate()
    with pytest.raises(DataError) as caught:
        source.prepare()
    error = caught.value
    assert error.code == code, error
    assert error.hint, error
    assert error.exit_code == 2
    assert "\n" not in error.message
    return error


# --- text files ---------------------------------------------------------------------------------


def test_a_file_is_a_document_byte_for_byte(tmp_path: Path):
    text = "Grüße\r\n\r\n日本語 😀\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert _texts(TextFiles.Config(paths=(str(tmp_path / "a.txt"),))) == [text]


def test_patterns_find_files_at_any_depth_sorted_and_once(tmp_path: Path):
    for name in ("b.txt", "a.txt", "sub/deep/c.txt", "d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    cfg = TextFiles.Config(paths=(str(tmp_path / "**/*.txt"), str(tmp_path / "a.txt")))
    assert _texts(cfg) == ["a.txt", "b.txt", "sub/deep/c.txt"]
    assert [d.id for d in cfg.instantiate()] == ["a.txt", "b.txt", "sub/deep/c.txt"]


def test_gzip_files_are_recognized_by_content(tmp_path: Path):
    for name in ("a.txt.gz", "b.txt"):
        (tmp_path / name).write_bytes(gzip.compress(f"text of {name}".encode()))
    assert _texts(TextFiles.Config(paths=(str(tmp_path / "*"),))) == [
        "text of a.txt.gz",
        "text of b.txt",
    ]


def test_gzip_documents_survive_a_cache_too_small_for_them(tmp_path: Path):
    for i in range(3):
        (tmp_path / f"{i}.gz").write_bytes(gzip.compress(f"one {i}\n\ntwo {i}".encode()))
    cfg = TextFiles.Config(paths=(str(tmp_path / "*.gz"),), split="paragraph", cache_bytes=1)
    assert _texts(cfg) == [f"{w} {i}" for i in range(3) for w in ("one", "two")]


def test_paragraphs_are_documents_when_asked(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes("\n\nfirst ü\nline\n\n \t\n\nsecond\r\n\r\nthird\n\n\n".encode())
    cfg = TextFiles.Config(paths=(str(path),), split="paragraph")
    assert _texts(cfg) == ["first ü\nline", "second", "third"]
    assert [d.id for d in cfg.instantiate()] == ["a.txt#0", "a.txt#1", "a.txt#2"]


def test_documents_are_cut_at_a_separator_when_asked(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("one<|end|>two\n\nstill two<|end|>  <|end|>")
    cfg = TextFiles.Config(paths=(str(path),), split="separator", separator="<|end|>")
    assert _texts(cfg) == ["one", "two\n\nstill two"]


def test_a_separator_must_be_given(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x")
    _fails(TextFiles.Config(paths=(str(tmp_path / "a.txt"),), split="separator"), "AX506")


def test_a_byte_order_mark_is_no_text(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert _texts(TextFiles.Config(paths=(str(tmp_path / "a.txt"),))) == ["hello"]


def test_a_name_that_looks_like_a_pattern_is_a_file_if_it_exists(tmp_path: Path):
    (tmp_path / "notes [1].txt").write_text("hello")
    assert _texts(TextFiles.Config(paths=(str(tmp_path / "notes [1].txt"),))) == ["hello"]


def test_large_files_are_read_like_small_ones(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("ä" * (9 * 2**20) + "\n\nend")
    source = TextFiles.Config(paths=(str(path),), split="paragraph").instantiate()
    assert len(source) == 2
    assert source[1].text == "end"


def test_ids_and_split_do_not_change_when_the_directory_moves(tmp_path: Path):
    hashes = []
    for folder in ("here", "elsewhere"):
        (tmp_path / folder / "sub").mkdir(parents=True)
        for name in ("a.txt", "sub/b.txt"):
            (tmp_path / folder / name).write_text(name)
        source = TextFiles.Config(paths=(str(tmp_path / folder / "**/*.txt"),)).instantiate()
        hashes.append((source.hashes().tolist(), source.fingerprint()))
    assert hashes[0] == hashes[1]


# --- bad files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TextFiles, JsonLines, Parquet])
def test_a_missing_file_is_named_with_its_near_misses(tmp_path: Path, kind):
    (tmp_path / "train.txt").write_text("x")
    error = _fails(kind.Config(paths=(str(tmp_path / "trian.txt"),)), "AX501")
    assert error.where == str(tmp_path / "trian.txt")
    assert "train.txt" in (error.hint or "")


@pytest.mark.parametrize("kind", [TextFiles, JsonLines, Parquet])
def test_a_pattern_without_matches_is_an_error(tmp_path: Path, kind):
    error = _fails(kind.Config(paths=(str(tmp_path / "*.txt"),)), "AX501")
    assert "*.txt" in error.message


@pytest.mark.parametrize("name", ["pipe.txt", "*.txt"])
def test_a_pipe_is_an_error_and_not_waited_for(tmp_path: Path, name):
    os.mkfifo(tmp_path / "pipe.txt")
    error = _fails(TextFiles.Config(paths=(str(tmp_path / name),)), "AX501")
    assert error.where == str(tmp_path / "pipe.txt")


def test_a_link_that_leads_nowhere_says_where(tmp_path: Path):
    (tmp_path / "link.txt").symlink_to("/no/such/file")
    error = _fails(TextFiles.Config(paths=(str(tmp_path / "link.txt"),)), "AX501")
    assert "/no/such/file" in error.message


def test_no_paths_at_all_is_an_error():
    _fails(TextFiles.Config(paths=()), "AX501")


def test_a_directory_says_how_to_name_its_files(tmp_path: Path):
    assert "**" in (_fails(TextFiles.Config(paths=(str(tmp_path),)), "AX501").hint or "")


@pytest.mark.parametrize("content", [b"", b" \n\n\t\n"])
@pytest.mark.parametrize("split", ["file", "paragraph"])
def test_an_empty_text_file_is_an_error(tmp_path: Path, content, split):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    error = _fails(TextFiles.Config(paths=(str(path),), split=split), "AX502")
    assert error.where == str(path)


@pytest.mark.parametrize("kind", [JsonLines, Parquet])
def test_an_empty_file_is_an_error(tmp_path: Path, kind):
    path = tmp_path / "a"
    path.write_bytes(b"")
    assert _fails(kind.Config(paths=(str(path),)), "AX502").where == str(path)


@pytest.mark.parametrize("kind", [TextFiles, JsonLines])
def test_a_binary_file_is_an_error_with_the_offset(tmp_path: Path, kind):
    path = tmp_path / "a.txt"
    path.write_bytes(b"some text\0\x01\x02")
    assert "offset 9" in _fails(kind.Config(paths=(str(path),)), "AX503").message


@pytest.mark.parametrize("offset", [0, 100, 2**20 - 1, 2**20, 2**20 + 5])
def test_undecodable_text_is_an_error_with_the_offset(tmp_path: Path, offset):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * offset + b"\xe9 latin" + b"x" * 2**20)
    error = _fails(TextFiles.Config(paths=(str(path),)), "AX503")
    assert f"0xe9 at offset {offset} " in error.message
    assert "iconv" in (error.hint or "")


def test_utf16_says_how_to_convert(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes("hello".encode("utf-16"))
    assert "UTF-16" in (_fails(TextFiles.Config(paths=(str(path),)), "AX503").hint or "")


@pytest.mark.parametrize("cut", [5, -4])
def test_a_damaged_gzip_file_is_an_error(tmp_path: Path, cut):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b"hello " * 1000)[:cut])
    assert _fails(TextFiles.Config(paths=(str(path),)), "AX504").where == str(path)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs /proc/self/mem")
@pytest.mark.parametrize("kind", [TextFiles, JsonLines])
def test_an_unreadable_file_is_an_error(kind):
    # Reading it fails for every user, root included.
    assert _fails(kind.Config(paths=("/proc/self/mem",)), "AX504").where == "/proc/self/mem"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_an_error(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("secret")
    path.chmod(0)
    assert "ermission" in _fails(TextFiles.Config(paths=(str(path),)), "AX504").message


def test_bad_files_are_skipped_counted_and_reported_when_asked(tmp_path: Path, caplog):
    (tmp_path / "a.txt").write_text("good")
    (tmp_path / "b.txt").write_bytes(b"")
    (tmp_path / "c.txt").write_bytes(b"\0")
    source = TextFiles.Config(paths=(str(tmp_path / "*.txt"),), on_bad_file="skip").instantiate()
    assert [d.text for d in source] == ["good"]
    assert [Path(s.where).name for s in source.skipped()] == ["b.txt", "c.txt"]
    assert source.describe()["skipped"] == 2
    assert "skipped 2" in caplog.text


def test_skipping_every_file_is_an_error(tmp_path: Path):
    (tmp_path / "b.txt").write_bytes(b"")
    cfg = TextFiles.Config(paths=(str(tmp_path / "*.txt"),), on_bad_file="skip")
    assert "b.txt" in (_fails(cfg, "AX502").hint or "")


def test_a_file_that_shrinks_after_the_check_is_noticed(tmp_path: Path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("long text here")
    cfg = TextFiles.Config(paths=(str(tmp_path / "*.txt"),), cache_bytes=1)
    source = cfg.instantiate()
    source.prepare()
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"has changed.*got 5 bytes, expected 14"):
        source[0]


def test_a_large_file_that_shrinks_after_the_check_is_noticed(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("x" * 17 * 2**20 + "\n\nend")
    source = TextFiles.Config(paths=(str(path),), split="paragraph").instantiate()
    source.prepare()
    os.truncate(path, 2**20)
    with pytest.raises(DataError, match="has changed"):
        source[1]


def test_bad_data_are_found_before_a_batch_is_made(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n' * 50 + "{broken\n")
    source = JsonLines.Config(paths=(str(tmp_path / "a.jsonl"),))
    inputs = TextInput.Config(source=source, batch_size=1, seq_len=4, seed=0).instantiate()
    with pytest.raises(DataError, match=":51"):
        inputs.iterator()


def test_building_the_input_touches_no_file():
    source = TextFiles.Config(paths=("/nonexistent/*.txt",))
    TextInput.Config(source=source, batch_size=1, seq_len=4, seed=0).instantiate()


# --- JSON lines ---------------------------------------------------------------------------------


def _jsonl(tmp_path: Path, *lines: str | bytes, **fields) -> JsonLines.Config:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(x.encode() if isinstance(x, str) else x for x in lines))
    return JsonLines.Config(paths=(str(path),), **fields)


def test_a_field_of_each_line_is_a_document(tmp_path: Path):
    lines = [json.dumps({"id": i, "body": f"日本 {i}\nline"}) for i in range(3)]
    cfg = _jsonl(tmp_path, *lines, "", field="body")
    assert _texts(cfg) == [f"日本 {i}\nline" for i in range(3)]


def test_compressed_json_lines_are_read(tmp_path: Path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n'))
    assert _texts(JsonLines.Config(paths=(str(path),))) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "cut of', "not valid JSON"),
        ("not json", "not valid JSON"),
        ("[1, 2]", "expected a JSON object"),
        ('{"txet": "x"}', "did you mean 'txet'"),
        ('{"other": "x"}', "it has other"),
        ('{"text": 5}', "expected a string"),
        ('{"text": "\\ud800"}', "surrogate"),
        (b'{"text": "\xff"}', "not UTF-8"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_a_broken_line_is_an_error_with_file_and_line_or_skipped(tmp_path: Path, line, says):
    good = '{"text": "good"}'
    error = _fails(_jsonl(tmp_path, good, "", line, good), "AX505")
    assert error.where == f"{tmp_path / 'a.jsonl'}:3"
    assert says in error.message
    assert "on_bad_line" in (error.hint or "")

    source = _jsonl(tmp_path, good, "", line, good, on_bad_line="skip").instantiate()
    assert [d.text for d in source] == ["good", "good"]
    assert [s.where for s in source.skipped()] == [f"{tmp_path / 'a.jsonl'}:3"]


def test_a_broken_line_is_an_error_even_where_bad_files_are_skipped(tmp_path: Path):
    _fails(_jsonl(tmp_path, '{"text": "good"}', "{", on_bad_file="skip"), "AX505")


# --- Parquet ------------------------------------------------------------------------------------


@pytest.fixture
def parquet_file(tmp_path: Path) -> Path:
    pa = pytest.importorskip("pyarrow", reason="needs the extra `parquet`")
    import pyarrow.parquet as pq

    table = pa.table({"text": [f"doc {i} ü" for i in range(10)] + [None], "n": list(range(11))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    return tmp_path / "a.parquet"


def test_rows_of_a_column_are_documents_in_any_order_of_access(parquet_file: Path):
    cfg = Parquet.Config(paths=(str(parquet_file),), cache_bytes=1)
    source = cfg.instantiate()
    assert len(source) == 11
    for i in (9, 0, 5, 9):
        assert source[i].text == f"doc {i} ü"
        assert source[i].id == f"a.parquet#{i}"
    assert source[10].text == ""
    assert len(source.hashes()) == 11


def test_a_missing_or_unfit_column_is_named(parquet_file: Path):
    error = _fails(Parquet.Config(paths=(str(parquet_file),), column="txt"), "AX507")
    assert "text" in (error.hint or "")
    _fails(Parquet.Config(paths=(str(parquet_file),), column="n"), "AX507")


def test_text_given_as_parquet_and_the_reverse(parquet_file: Path, tmp_path: Path):
    (tmp_path / "a.txt").write_text("plain text, long enough to have a footer")
    _fails(Parquet.Config(paths=(str(tmp_path / "a.txt"),)), "AX503")
    hint = _fails(TextFiles.Config(paths=(str(parquet_file),)), "AX503").hint
    assert "Parquet" in (hint or "")


def test_without_pyarrow_the_error_names_the_extra(parquet_file: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    hint = _fails(Parquet.Config(paths=(str(parquet_file),)), "AX508").hint
    assert "axcore[parquet]" in (hint or "")


# --- the embedded reference ---------------------------------------------------------------------


def test_the_python_reference_is_the_topics_sorted_by_name():
    source = PythonReference.Config().instantiate()
    names = sorted(pydoc_data.topics.topics)
    assert [d.id for d in source] == names
    assert source[0].text == pydoc_data.topics.topics[names[0]]
    joined = "\n\n".join(pydoc_data.topics.topics[n] for n in names).encode()
    assert source.describe()["sha256"] == hashlib.sha256(joined).hexdigest()
    assert len(joined) > 300_000


def test_a_python_without_topics_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    _fails(PythonReference.Config(), "AX501")


# --- mixtures -----------------------------------------------------------------------------------


def _mixture(tmp_path: Path, **fields) -> Mixture.Config:
    sources = {}
    for name, count in (("web", 30), ("code", 5), ("wiki", 12)):
        path = tmp_path / f"{name}.txt"
        path.write_text("\n\n".join(f"{name} {i}" for i in range(count)))
        sources[name] = TextFiles.Config(paths=(str(path),), split="paragraph")
    return Mixture.Config(sources=sources, **fields)


def test_a_mixture_draws_in_the_proportion_of_its_weights(tmp_path: Path):
    source = _mixture(tmp_path, weights={"web": 5, "code": 3, "wiki": 2})
    inputs = TextInput.Config(source=source, batch_size=4, seq_len=8, seed=0).instantiate()
    order = inputs.order()
    drawn = Counter(inputs.source[order[i]].id.split("/")[0] for i in range(10_000))
    assert drawn == {"web": 5000, "code": 3000, "wiki": 2000}


def test_a_mixture_is_deterministic_and_resumable(tmp_path: Path):
    def make():
        source = _mixture(tmp_path, weights={"web": 5, "code": 3, "wiki": 2})
        cfg = TextInput.Config(source=source, batch_size=4, seq_len=8, seed=0, prefetch=0)
        return cfg.instantiate().iterator()

    a, b = make(), make()
    for _ in range(7):
        next(a)
    b.restore(a.state())
    np.testing.assert_array_equal(next(a)["input_ids"], next(b)["input_ids"])


def test_each_source_of_a_mixture_is_split(tmp_path: Path):
    inputs = TextInput.Config(
        source=_mixture(tmp_path), batch_size=4, seq_len=8, seed=0, heldout_fraction=0.1
    ).instantiate()
    names = {"web", "code", "wiki"}
    assert {d.id.split("/")[0] for d in inputs.heldout().documents()} == names
    assert {d.id.split("/")[0] for d in inputs.train_documents()} == names


def test_a_mixture_of_mixtures_multiplies_weights(tmp_path: Path):
    inner = _mixture(tmp_path, weights={"web": 1, "code": 1, "wiki": 2})
    outer = Mixture.Config(
        sources={"in": inner, "ref": PythonReference.Config()}, weights={"in": 3, "ref": 1}
    )
    groups = outer.instantiate().groups()
    assert {g.name: g.weight for g in groups} == {
        "in/web": 0.75,
        "in/code": 0.75,
        "in/wiki": 1.5,
        "ref": 1.0,
    }


@pytest.mark.parametrize(
    "weights", [{"web": 1}, {"web": 1, "code": 1, "wiki": 0}, {"web": 1, "code": 1, "wikki": 1}]
)
def test_weights_that_do_not_fit_are_an_error(tmp_path: Path, weights):
    _fails(_mixture(tmp_path, weights=weights), "AX520")


def test_a_bad_source_inside_a_mixture_is_named(tmp_path: Path):
    cfg = Mixture.Config(sources={"a": TextFiles.Config(paths=("/no/such/file",))})
    assert _fails(cfg, "AX501").where == "/no/such/file"
