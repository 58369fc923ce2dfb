"""Tokenizers that live in files: round trips, special tokens, saving, and files that are wrong."""

from __future__ import annotations

import base64
import json
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axcore.data import (
    ByteTokenizer,
    FileTokenizer,
    GGUFTokenizer,
    HFTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    find_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from axcore.errors import DataError

CORPUS = [
    "the cat sat on the mat, and the other cat sat on the hat",
    "def f(x):\n    return x + 123\n",
    "über Straße, naïve café; 日本語 テキスト",
] * 4
KINDS = ["hf", "tiktoken", "sentencepiece", "gguf-gpt2", "gguf-llama"]
BOS, EOS = "<|bos|>", "<|eos|>"


def _gguf_of(path):
    """The metadata that a GGUF file of this ``tokenizer.json`` has."""
    model = json.loads((path / "tokenizer.json").read_text())["model"]
    vocab = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.token_type": np.array([3] * 3 + [1] * (len(vocab) - 3), np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": np.uint32(0),
        "tokenizer.ggml.eos_token_id": np.uint32(1),
    }


def _sentencepiece_gguf(model: bytes):
    import sentencepiece

    p = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(p.vocab_size())

    def kind(i):
        names = ("is_unknown", "is_control", "is_byte", "is_unused")
        return next((k for k, n in zip((2, 3, 6, 5), names, strict=True) if getattr(p, n)(i)), 1)

    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [p.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": np.array([p.get_score(i) for i in ids], np.float32),
        "tokenizer.ggml.token_type": [kind(i) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A directory with the file of each kind."""
    for package in ("tokenizers", "tiktoken", "sentencepiece"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    import sentencepiece

    root = tmp_path_factory.mktemp("tokenizers")
    train_tokenizer(CORPUS, 300, root / "hf")
    (root / "tiktoken").mkdir()
    ranks = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"at"]
    lines = [base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(ranks)]
    (root / "tiktoken/ranks.tiktoken").write_bytes(b"".join(lines))
    (root / "sentencepiece").mkdir()
    (root / "corpus.txt").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(root / "corpus.txt"),
        model_prefix=str(root / "sentencepiece/tokenizer"),
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return root


@pytest.fixture(scope="module")
def tokenizers(sources) -> dict[str, FileTokenizer]:
    tiktoken = TiktokenTokenizer.Config(
        path=str(sources / "tiktoken"),
        pattern="cl100k",
        special_tokens={BOS: 260, EOS: 261},
        bos_token=BOS,
        eos_token=EOS,
        add_bos=True,
    )
    model = (sources / "sentencepiece/tokenizer.model").read_bytes()
    return {
        "hf": HFTokenizer.Config(path=str(sources / "hf")).instantiate(),
        "tiktoken": tiktoken.instantiate(),
        "sentencepiece": SentencePieceTokenizer.Config(
            path=str(sources / "sentencepiece")
        ).instantiate(),
        "gguf-gpt2": GGUFTokenizer.from_metadata(_gguf_of(sources / "hf")),
        "gguf-llama": GGUFTokenizer.from_metadata(_sentencepiece_gguf(model)),
    }


# SentencePiece writes a space as U+2581, so that character comes back as a space.
TEXT = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"))
    | st.sampled_from(["the cat", " 123", BOS, EOS, "<s>", "</s>", "\n\n", "  ", "é"])
).map("".join)


@pytest.mark.parametrize("kind", KINDS)
def test_any_text_survives_a_round_trip(tokenizers, kind):
    tokenizer = tokenizers[kind]

    @given(TEXT)
    def check(text):
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32 and tokenizer.decode(ids) == text
        assert not set(ids.tolist()) & set(tokenizer.special_tokens.values())

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_found_only_when_asked_for(tokenizers, kind):
    tokenizer = tokenizers[kind]
    name = next(n for n, i in tokenizer.special_tokens.items() if i == tokenizer.eos_id)
    marked = tokenizer.encode_markup(f"the{name}cat").tolist()
    assert marked.count(tokenizer.eos_id) == 1
    assert tokenizer.decode(marked).replace(" ", "") == "thecat"
    assert tokenizer.eos_id not in tokenizer.encode(f"the{name}cat")


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_tokenizer_loads_as_an_equal_one(tokenizers, kind, tmp_path):
    saved = tokenizers[kind]
    saved.save(tmp_path / "tokenizer")
    loaded = load_tokenizer(tmp_path / "tokenizer")
    assert type(loaded) is type(saved) and loaded.fingerprint() == saved.fingerprint()
    for name in ("vocab_size", "bos_id", "eos_id", "pad_id", "stop_ids", "special_tokens"):
        assert getattr(loaded, name) == getattr(saved, name)
    text = "the über cat 123"
    assert loaded.encode_prompt(text).tolist() == saved.encode_prompt(text).tolist()
    assert "path: None" in loaded.cfg.to_text(), "names no place of the machine that saved it"
    loaded.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").fingerprint() == saved.fingerprint()
    assert find_tokenizer(tmp_path).fingerprint() == saved.fingerprint()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_outside_the_vocabulary_are_no_text(tokenizers, kind):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode("cat").tolist()
    assert tokenizer.decode([-1, *ids, 10**6]) == "cat"
    assert max(ids) < tokenizer.vocab_size


def test_gguf_metadata_give_the_tokens_of_the_original(tokenizers):
    pairs = [("hf", "gguf-gpt2"), ("sentencepiece", "gguf-llama")]

    @given(TEXT)
    def check(text):
        for original, copy in pairs:
            assert tokenizers[original].encode(text).tolist() == (
                tokenizers[copy].encode(text).tolist()
            )

    check()


@pytest.mark.parametrize(
    ("kind", "original", "changes"),
    [
        (HFTokenizer, "hf", {"tokenizer.ggml.add_bos_token": True}),
        (SentencePieceTokenizer, "sentencepiece", {}),
    ],
    ids=["gpt2", "llama"],
)
def test_gguf_metadata_become_files_that_others_read(sources, tmp_path, kind, original, changes):
    path = sources / original
    metadata = (
        _gguf_of(path)
        if original == "hf"
        else _sentencepiece_gguf((path / "tokenizer.model").read_bytes())
    )
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    ours = GGUFTokenizer.from_metadata({**metadata, **changes, "tokenizer.chat_template": template})
    for name, content in ours.foreign_files().items():
        (tmp_path / name).write_bytes(content)
    read = kind.Config(path=str(tmp_path)).instantiate()
    chat = [{"role": "user", "content": "über the mat"}]
    assert read.encode_prompt("the cat").tolist() == ours.encode_prompt("the cat").tolist()
    assert read.encode_chat(chat).tolist() == ours.encode_chat(chat).tolist()
    assert (read.bos_id, read.eos_id) == (ours.bos_id, ours.eos_id)
    assert read.encode_prompt("the cat")[0] == ours.bos_id


def test_prompts_open_with_bos_where_the_tokenizer_says_so(tokenizers):
    for kind, opens in dict(hf=False, tiktoken=True, sentencepiece=True).items():
        tokenizer = tokenizers[kind]
        plain, prompt = tokenizer.encode("the").tolist(), tokenizer.encode_prompt("the").tolist()
        assert prompt == ([tokenizer.bos_id, *plain] if opens else plain)
    byte = ByteTokenizer.Config().instantiate()
    assert byte.encode_prompt("a").tolist() == [97]


def test_a_post_processor_that_adds_bos_counts(sources, tmp_path):
    data = json.loads((sources / "hf/tokenizer.json").read_text())
    piece = {"SpecialToken": {"id": BOS, "type_id": 0}}
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}},
    }
    data["truncation"] = dict(direction="Right", max_length=2, strategy="LongestFirst", stride=0)
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    tokenizer = HFTokenizer.Config(path=str(tmp_path), bos_token=BOS).instantiate()
    assert tokenizer.encode_prompt("the cat").tolist()[0] == 0
    assert tokenizer.decode(tokenizer.encode("the cat sat")) == "the cat sat", "not truncated"


def test_stop_ids_are_those_of_the_generation_config(sources, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((sources / "hf/tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    tokenizer = HFTokenizer.Config(path=str(tmp_path), eos_token=EOS).instantiate()
    assert tokenizer.stop_ids == (1, 2)


def test_training_gives_the_same_tokenizer_again(sources, tmp_path):
    again = train_tokenizer(CORPUS, 300, tmp_path)
    saved = (sources / "hf/tokenizer.json").read_bytes()
    assert (tmp_path / "tokenizer.json").read_bytes() == saved
    assert again.vocab_size == 300 and (again.bos_id, again.eos_id, again.pad_id) == (0, 1, 2)
    text = " ".join(CORPUS[:3])
    assert len(again.encode(text)) < 0.8 * len(text.encode()), "its corpus gets shorter"


@pytest.mark.parametrize(
    ("texts", "size", "pattern", "message"),
    [
        (["a"], 258, "qwen2", "259"),
        (["a"], 10**9, "qwen2", "at most 4,194,304"),
        ([], 300, "qwen2", "no text"),
        (["a"], 300, "x", "gpt2"),
    ],
)
def test_impossible_training_is_refused(tmp_path, texts, size, pattern, message):
    with pytest.raises(DataError, match=message):
        train_tokenizer(texts, size, tmp_path, pattern=pattern)


def test_training_leaves_what_is_there(tmp_path):
    (tmp_path / "tokenizer.json").write_text("of another model")
    with pytest.raises(DataError, match="AX543"):
        train_tokenizer(["a"], 300, tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "of another model"
    with pytest.raises(DataError, match="cannot be made"):
        train_tokenizer(["a"], 300, tmp_path / "tokenizer.json")


def test_a_word_of_a_megabyte_is_trained_on(tmp_path):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    word = "a" * 2**20
    made = train_tokenizer([word, " " * 2**20], 270, tmp_path)
    assert made.decode(made.encode(word[:5000])) == word[:5000]
    assert len(made.encode(word[:5000])) < 500


def test_the_fingerprint_follows_the_files(sources, tmp_path):
    one = HFTokenizer.Config(path=str(sources / "hf")).instantiate()
    other = train_tokenizer(CORPUS, 290, tmp_path)
    same = train_tokenizer(CORPUS, 300, tmp_path / "same")
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()


def test_making_one_touches_no_file():
    tokenizer = HFTokenizer.Config(path="/nowhere").instantiate()
    with pytest.raises(DataError, match="AX533") as caught:
        tokenizer.encode("a")
    assert "tokenizer.json" in caught.value.hint
    with pytest.raises(DataError, match="no path"):
        HFTokenizer.Config().instantiate().encode("a")


class _Evil:
    def __reduce__(self):
        return (sys.exit, (7,))


@pytest.mark.parametrize("cls", [HFTokenizer, SentencePieceTokenizer, TiktokenTokenizer])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\x00\xff" * 50, pickle.dumps(_Evil()), b"[" * 100_000, b"YQ== 0\n"],
    ids=["empty", "brace", "list", "binary", "pickle", "nested", "short"],
)
def test_damaged_files_are_refused_with_their_name(sources, cls, content, tmp_path):
    path = tmp_path / cls.main_files[0]
    path.write_bytes(content)
    fields = dict(pattern="gpt2") if cls is TiktokenTokenizer else {}
    with pytest.raises(DataError, match="AX534") as caught:
        cls.Config(path=str(tmp_path), **fields).instantiate().encode("a")
    assert str(tmp_path) in str(caught.value)


def test_an_id_beyond_int32_is_refused(sources):
    model = {"type": "BPE", "vocab": {"a": 0, "b": 4_000_000_000}, "merges": []}
    with pytest.raises(DataError, match="4,000,000,000, more than int32"):
        HFTokenizer.from_content(json.dumps({"version": "1.0", "model": model}))


def test_a_file_far_too_large_is_not_read(tmp_path):
    path = tmp_path / "tokenizer.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole: takes no space
    with pytest.raises(DataError, match="more than"):
        HFTokenizer.Config(path=str(path)).instantiate().encode("a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'"),
        ({"tokenizer.ggml.pre": "qwen"}, "pre-tokenizer 'qwen'"),
        ({"tokenizer.ggml.merges": ["ab"]}, "no pair"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "twice"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokens"),
        ({"tokenizer.ggml.merges": [1, 2]}, "merges"),
    ],
)
def test_gguf_metadata_that_cannot_be_are_refused(sources, change, message):
    with pytest.raises(DataError, match=message):
        GGUFTokenizer.from_metadata(_gguf_of(sources / "hf") | change)
    with pytest.raises(DataError, match="no tokenizer"):
        GGUFTokenizer.from_metadata({"general.architecture": "llama"})


def test_a_rank_file_needs_its_pattern(sources):
    path = str(sources / "tiktoken/ranks.tiktoken")
    with pytest.raises(DataError, match="AX538"):
        find_tokenizer(path).encode("a")
    with pytest.raises(DataError, match="AX538") as caught:
        TiktokenTokenizer.Config(path=path, pattern="gpt3").instantiate().encode("a")
    assert "gpt2" in caught.value.hint


def test_a_special_token_that_is_not_there_is_named(sources):
    tokenizer = HFTokenizer.Config(path=str(sources / "hf"), eos_token="</s>").instantiate()
    with pytest.raises(DataError, match="eos_token") as caught:
        _ = tokenizer.eos_id
    assert EOS in caught.value.hint


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_is_an_error(tokenizers, kind):
    with pytest.raises(DataError, match="AX532"):
        tokenizers[kind].encode("a\ud800")


def test_a_package_that_is_missing_is_named(sources, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match="AX536") as caught:
        HFTokenizer.Config(path=str(sources / "hf")).instantiate().encode("a")
    assert "axcore[tokenizers]" in caught.value.hint


def test_a_tokenizer_is_found_by_any_of_its_files(sources, tmp_path):
    assert isinstance(find_tokenizer(sources / "hf/tokenizer.json"), HFTokenizer)
    assert isinstance(find_tokenizer(sources / "sentencepiece"), SentencePieceTokenizer)
    model = sources / "sentencepiece/tokenizer.model"
    assert isinstance(find_tokenizer(model), SentencePieceTokenizer)
    for path in (tmp_path, tmp_path / "nothing", sources / "corpus.txt"):
        with pytest.raises(DataError, match="AX530"):
            find_tokenizer(path)
