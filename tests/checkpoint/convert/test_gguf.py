"""GGUF: metadata, block formats, rotary rows, tokenizer, and files that lie about themselves."""

from __future__ import annotations

import importlib
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from axcore.checkpoint.convert import GGUFSource, convert, open_source
from axcore.checkpoint.convert._evidence import model_logits
from axcore.data import ByteTokenizer, load_tokenizer
from axcore.errors import CheckpointError
from axcore.inference import load_model

IDS = np.random.default_rng(1).integers(0, 264, (2, 9)).astype(np.int32)
BLOCKS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture
def gguf():
    return pytest.importorskip("gguf", reason="gguf is not installed")


@pytest.fixture
def write_gguf(gguf, tmp_path):
    """Writes a file with the ``gguf`` package; tensors are arrays, or (bytes, format)."""

    def write(tensors, metadata=(), name="toy.gguf", arch="toy") -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, arch)
        for key, value in dict(metadata).items():
            kind = {int: "uint32", float: "float32", str: "string", list: "array", bool: "bool"}
            getattr(writer, f"add_{kind[type(value)]}")(key, value)
        for key, value in tensors.items():
            if isinstance(value, tuple):
                writer.add_tensor(key, value[0], raw_dtype=value[1])
            else:
                writer.add_tensor(key, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write


SIZES = {"toy.hidden_size": 16, "toy.num_layers": 2, "toy.num_heads": 2, "toy.max_length": 32}


def rotary_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k as GGUF orders them: halves of a head interleaved."""
    split = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


@pytest.fixture
def unfused(tensors):
    """The toy's tensors with q, k and v apart, in GGUF's order."""
    out = {}
    for name, value in tensors.items():
        if ".qkv." in name:
            q, k, v = np.split(value, 3)
            for part, rows in (("q", rotary_pairs(q, 2)), ("k", rotary_pairs(k, 2)), ("v", v)):
                out[name.replace("qkv", part)] = np.ascontiguousarray(rows)
        else:
            out[name] = value
    return out


def test_a_gguf_model_computes_what_its_twin_does(write_gguf, unfused, tensors, tmp_path):
    path = write_gguf(unfused, SIZES)
    tokenizer = ByteTokenizer.Config().instantiate()
    report = convert(path, tmp_path / "out", tokenizer=tokenizer)
    assert report.comparison.max_abs_difference is None
    assert "no oracle" in (report.comparison.reason or "")
    loaded = load_model(tmp_path / "out")
    toy = importlib.import_module("toy_family")
    got = model_logits(loaded.model, loaded.state, IDS)
    np.testing.assert_allclose(got, toy.forward(tensors, IDS, 2), atol=1e-5)


@pytest.mark.parametrize("name", BLOCKS)
def test_block_formats_are_read_in_parts(gguf, write_gguf, monkeypatch, name):
    """Against the package's own reader and its dequantization of the whole tensor."""
    kind = gguf.GGMLQuantizationType[name]
    per_block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (6, 2 * size), np.uint8)
    path = write_gguf({"w": (data, kind), "v": np.ones(3, np.float32)})
    monkeypatch.setattr("axcore.checkpoint.convert._gguf._BLOCK_VALUES", 3 * per_block)
    with GGUFSource(path) as source:
        assert source.infos["w"].shape == (6, 2 * per_block) and source.infos["w"].dtype == name
        got = source.read("w")
    with np.errstate(all="ignore"):
        want = gguf.dequantize(data, kind)
    np.testing.assert_array_equal(got, want)


def test_plain_formats_keep_their_dtype(gguf, write_gguf):
    values = np.arange(8, dtype=np.float32).reshape(2, 4) / 3
    bf16 = gguf.GGMLQuantizationType.BF16
    tensors = {"a": values, "b": values.astype(np.float16)}
    tensors["c"] = (gguf.quants.quantize(values, bf16), bf16)
    with GGUFSource(write_gguf(tensors)) as source:
        assert [source.read(n).dtype.name for n in "abc"] == ["float32", "float16", "bfloat16"]
        np.testing.assert_array_equal(source.read("a"), values)
        np.testing.assert_allclose(source.read("c").astype(np.float32), values, rtol=0.004)


def test_metadata_come_as_python_values(write_gguf):
    said = {"toy.eps": 1e-5, "toy.names": ["a", "ä"], "toy.numbers": [1, 2], "toy.yes": True}
    with open_source(write_gguf({"w": np.ones(4, np.float32)}, {**SIZES, **said})) as source:
        assert source.architecture == "toy"
        assert {key: source.config[key] for key in (*SIZES, *said)} == {**SIZES, **said}


def test_the_tokenizer_and_chat_template_come_along(write_gguf, unfused, tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = ["<s>", "</s>", *sorted(ByteLevel.alphabet()), "ab"]
    said = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}!",
    }
    convert(write_gguf(unfused, {**SIZES, **said}), tmp_path / "out", verify="never")
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    assert tokenizer.encode("ab").tolist() == [tokens.index("ab")]
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    chat = tokenizer.encode_chat([{"role": "user", "content": "ab"}])
    assert tokenizer.decode(chat) == "ab!"
    assert str(tmp_path / "out" / "tokenizer") in (tmp_path / "out" / "config.txt").read_text()


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r"axcore\[convert\]"):
        open_source(tmp_path / "a.gguf")


# -- files that lie -----------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    dims = b"".join(struct.pack("<Q", n) for n in shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def file(*tensors: bytes, keys: tuple[bytes, ...] = (), data: bytes = b"", **counts: int) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ",
        counts.get("version", 3),
        counts.get("num_tensors", len(tensors)),
        counts.get("num_keys", len(keys)),
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


LIES = {
    "empty": (b"", "truncated"),
    "magic": (b"GGML" + bytes(60), "does not begin with GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
    "version-1": (file(version=1), "version 1 of the format"),
    "tensors-without-end": (file(num_tensors=1 << 40), "more than the 1,048,576 allowed"),
    "keys-without-end": (file(num_keys=1 << 60), "more than the 1,048,576 allowed"),
    "keys-that-are-not-there": (file(num_keys=9), "truncated"),
    "string-without-end": (file(keys=(struct.pack("<Q", 1 << 60),)), "truncated"),
    "array-without-end": (
        file(keys=(text("k") + struct.pack("<IIQ", 9, 4, 1 << 60),)),
        "truncated",
    ),
    "strings-without-end": (
        file(keys=(text("k") + struct.pack("<IIQ", 9, 8, 1 << 60),)),
        "truncated: an array of",
    ),
    "nested-array": (file(keys=(text("k") + struct.pack("<IIQ", 9, 9, 1),)), "unknown type 9"),
    "unknown-type": (file(keys=(text("k") + struct.pack("<I", 77),)), "unknown type 77"),
    "key-twice": (file(keys=(text("k") + struct.pack("<IB", 0, 1),) * 2), "has 'k' twice"),
    "dims-without-end": (
        file(text("w") + struct.pack("<I", 1 << 30) + bytes(32)),
        "has 1073741824 dims",
    ),
    "unknown-format": (file(tensor("w", [4], kind=999), data=bytes(16)), "the format 999"),
    "rows-off-the-block": (file(tensor("w", [7], kind=2), data=bytes(64)), "no multiple of Q4_0"),
    "cut-off": (file(tensor("w", [64]), data=bytes(100)), "truncated: tensor 'w' ends"),
    "huge": (file(tensor("w", [1 << 62, 1 << 62]), data=bytes(16)), "truncated: tensor 'w' ends"),
    "off-the-grid": (file(tensor("w", [4], offset=3), data=bytes(64)), "off the grid"),
    "beyond": (file(tensor("w", [4], offset=1 << 62), data=bytes(64)), "truncated: tensor 'w'"),
    "overlap": (
        file(tensor("a", [16]), tensor("b", [16], offset=32), data=bytes(128)),
        "tensor 'b' overlaps tensor 'a'",
    ),
    "name-twice": (
        file(tensor("a", [8]), tensor("a", [8], offset=32), data=bytes(64)),
        "names tensor 'a' twice",
    ),
    "alignment": (
        file(keys=(text("general.alignment") + struct.pack("<II", 4, 3),)),
        "expected a power of two",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_file_that_lies_is_refused(gguf, tmp_path, name):
    content, words = LIES[name]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_source(tmp_path / "a.gguf")
    assert words in caught.value.message
    assert caught.value.exit_code == 2


def test_any_prefix_of_a_file_is_refused_or_never_read_beyond(write_gguf, tmp_path):
    whole = write_gguf({"w": np.ones((4, 8), np.float32)}, SIZES).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_source(path)
