"""The manifest notices what happened to the files of a step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from axcore.checkpoint import _manifest

MIB = 1 << 20


def written(directory: Path, sizes: dict[str, int], checksums: bool = True) -> _manifest.Manifest:
    for name, size in sizes.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(name).randbytes(size))
    arrays = {"a/w": _manifest.ArrayRecord("a.w", (2, 3), "bfloat16", None)}
    return _manifest.write(directory, 7, arrays, checksums=checksums)


def test_it_reads_back_what_was_written(tmp_path):
    manifest = written(tmp_path, {"x": 10, "sub/y": 0})
    assert _manifest.read(tmp_path) == manifest
    assert manifest.step == 7
    assert manifest.size_bytes == 10
    assert _manifest.verify(tmp_path, manifest) is None


@pytest.mark.parametrize("size", [1, 7, 8, 4095, 4096, 4097, MIB // 4 + 1, MIB + 3])
def test_any_flipped_bit_is_found(tmp_path, size):
    manifest = written(tmp_path, {"x": size})
    data = bytearray((tmp_path / "x").read_bytes())
    for offset in {0, size // 3, size // 2, size - 1}:
        for bit in (0, 7):
            data[offset] ^= 1 << bit
            (tmp_path / "x").write_bytes(data)
            assert _manifest.verify(tmp_path, manifest) == "x differs from its checksum"
            data[offset] ^= 1 << bit
    (tmp_path / "x").write_bytes(data)
    assert _manifest.verify(tmp_path, manifest) is None


@pytest.mark.parametrize("length", [1, 8, 512, 4096, 100_000])
def test_zeroed_and_moved_ranges_are_found(tmp_path, length):
    manifest = written(tmp_path, {"x": MIB})
    good = (tmp_path / "x").read_bytes()
    for start in (0, 4096, 5000, MIB - length):
        (tmp_path / "x").write_bytes(good[:start] + bytes(length) + good[start + length :])
        assert _manifest.verify(tmp_path, manifest) is not None
    swapped = good[4096:8192] + good[:4096] + good[8192:]
    (tmp_path / "x").write_bytes(swapped)
    assert _manifest.verify(tmp_path, manifest) is not None


def test_segments_of_large_files_are_joined(tmp_path, monkeypatch):
    whole = written(tmp_path, {"x": 3 * MIB + 5, "y": 100})
    monkeypatch.setattr(_manifest, "_SEGMENT_BYTES", MIB)
    assert _manifest.verify(tmp_path, whole) is None
    data = bytearray((tmp_path / "x").read_bytes())
    data[2 * MIB] ^= 1
    (tmp_path / "x").write_bytes(data)
    assert _manifest.verify(tmp_path, whole) == "x differs from its checksum"


def test_without_checksums_sizes_are_compared(tmp_path):
    manifest = written(tmp_path, {"x": 10}, checksums=False)
    (tmp_path / "x").write_bytes(b"0123456789")
    assert _manifest.verify(tmp_path, manifest) is None
    (tmp_path / "x").write_bytes(b"012345678")
    assert _manifest.verify(tmp_path, manifest) == "x has 9 bytes, 10 were written"


def test_another_format_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(_manifest, "_FORMAT", 99)
    written(tmp_path, {"x": 1})
    monkeypatch.undo()
    assert "has format 99, this version reads 1" in str(_manifest.read(tmp_path))
