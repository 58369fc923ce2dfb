"""``axcore generate``: several prompts, streaming, stop strings; ``axcore eval --text``."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from axcore.data import ByteTokenizer
from axcore.inference import load_model


def test_several_prompts_are_answered_in_order(cli, trained, tmp_path):
    texts = ["The ", "A longer p", "x"]
    flags = ("--max-tokens", 3, "--temperature", 1.0, "--seed", 4, "--json")
    words = [word for text in texts for word in ("--prompt", text)]
    data = cli("generate", "--from", trained.out, *words, *flags).json
    assert [c["prompt"] for c in data["completions"]] == texts
    for i, made in enumerate(data["completions"]):
        alone = cli(
            *("generate", "--from", trained.out, "--prompt", texts[i], "--max-tokens", 3),
            *("--temperature", 1.0, "--seed", 4 + i, "--json"),
        ).json
        assert made["token_ids"] == alone["token_ids"]
    (tmp_path / "p.txt").write_text("\n".join(texts) + "\n\n")
    lines = [json.dumps(texts[0]), json.dumps({"prompt": texts[1]}), json.dumps(texts[2])]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    for name in ("p.txt", "p.jsonl"):
        again = cli("generate", "--from", trained.out, "--prompts", tmp_path / name, *flags).json
        assert again["completions"] == data["completions"]
    shown = cli("generate", "--from", trained.out, *words, *flags[:-1]).out
    assert f"[1] A longer p{data['completions'][1]['text']}" in shown


def test_streamed_text_is_the_text(cli, trained):
    flags = ("generate", "--from", trained.out, "--prompt", "The ", "--max-tokens", 11)
    assert cli(*flags, "--stream").out == cli(*flags).out
    done = cli(*flags, "--stream", "--json")
    assert done.json["text"] == cli(*flags, "--json").json["text"], "stdout is one JSON document"


def test_a_stop_string_ends_the_answer(cli, trained):
    flags = ("generate", "--from", trained.out, "--prompt", "The ", "--max-tokens", 11)
    flags += ("--temperature", 1.0, "--json")
    whole = cli(*flags).json
    assert whole["finish_reason"] == "length"
    stop = whole["text"][2:4]
    cut = cli(*flags, "--stop", stop, "--stop", "never there").json
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["finish_reason"] == "stop" and cut["tokens"] < whole["tokens"]


def test_a_chat_has_a_system_message_when_asked_for(cli, trained, monkeypatch):
    heard = []

    def encode_chat(self, messages):
        heard.append(messages)
        return self.encode("<hi>")

    monkeypatch.setattr(ByteTokenizer, "encode_chat", encode_chat)
    words = ("--chat", "hi", "--system", "Be brief.", "--max-tokens", 2)
    assert cli("generate", "--from", trained.out, *words).code == 0
    assert [m["role"] for m in heard[0]] == ["system", "user"]


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--prompt", "a", "--prompt", "b", "--stream"], "AX824"),
        (["--prompt", "a", "--system", "b"], "AX824"),
        (["--prompt", "a", "--batch-size", "0"], "AX824"),
        (["--prompt", "a", "--stop", ""], "AX826"),
        (["--prompt", "a", "--min-p", "2"], "AX820"),
        (["--prompts", "nowhere.txt"], "AX827"),
        (["--prompts", "empty.txt"], "AX827"),
        (["--prompts", "bad.jsonl"], "AX827"),
        (["--prompts", "number.jsonl"], "AX827"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value,
)
def test_what_cannot_be_generated_is_refused(cli, trained, tmp_path, monkeypatch, flags, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bad.jsonl").write_text('"a"\n{')
    (tmp_path / "number.jsonl").write_text("3")
    done = cli("generate", "--from", trained.out, *flags, "--max-tokens", 2)
    assert done.code == 2 and code in done.err and not done.out.strip("a")


def test_evaluation_reads_long_texts_with_context(cli, trained, tmp_path):
    """Against the whole text under the model, window by window, in numpy."""
    import jax
    import jax.numpy as jnp

    from axcore import functional

    text = "The quick brown fox, größer than 16 bytes. " * 2
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    done = cli(
        *("eval", "--from", trained.out, "--text", tmp_path / "a.txt"),
        *("--context", 12, "--stride", 5, "--batch-size", 3, "--json"),
    ).json
    loaded = load_model(trained.out)
    ids = [256, *text.encode(), 257]
    nats = 0.0

    @jax.jit
    def scores(ids):
        return functional(
            loaded.model, state=loaded.state, inputs=(ids,), method="logits", is_training=False
        )[0]

    for target in range(1, len(ids)):
        # The first window that has the target as a target.
        window = max(0, math.ceil((target - 12) / 5)) * 5
        logits = scores(jnp.asarray([(ids[window:target] + [0] * 12)[:12]]))
        row = np.asarray(logits, np.float64)[0, target - window - 1]
        nats += np.log(np.exp(row - row.max()).sum()) + row.max() - row[ids[target]]
    assert done["metrics"]["num_targets"] == len(ids) - 1
    expected = nats / math.log(2) / len(text.encode())
    assert done["metrics"]["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    assert (done["context"], done["stride"]) == (12, 5)


@pytest.mark.parametrize(
    "flags",
    [["--context", "99"], ["--context", "0"], ["--stride", "0"], ["--context", "8"]],
    ids="-".join,
)
def test_windows_that_cannot_be_are_refused(cli, trained, tmp_path, flags):
    (tmp_path / "a.txt").write_text("abc")
    text = [] if flags[1] == "8" else ["--text", tmp_path / "a.txt"]
    done = cli("eval", "--from", trained.out, *text, *flags)
    assert done.code == 2 and "AX833" in done.err
