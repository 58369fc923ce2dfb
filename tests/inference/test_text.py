"""Tokens to text as they come: split characters, stop strings, batches of prompts."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axcore.data import ByteTokenizer
from axcore.errors import CliError
from axcore.inference import Generation, Sampling, TextStream, complete


class Pieces:
    """A tokenizer whose tokens are the given texts; the first of a text loses its space."""

    def __init__(self, *pieces: str):
        self.pieces = pieces

    def decode(self, ids):
        return "".join(self.pieces[i] for i in ids).removeprefix(" ")


BYTES = ByteTokenizer.Config().instantiate()


@given(st.text(), st.integers(1, 5))
def test_pieces_add_up_to_the_text(text, size):
    ids = BYTES.encode(text).tolist()
    stream = TextStream(BYTES)
    parts = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    parts.append(stream.finish())
    assert "".join(parts) == text == stream.text


@given(st.lists(st.integers(0, 255)))
def test_bytes_that_are_no_text_add_up_to_what_decode_gives(ids):
    stream = TextStream(BYTES)
    parts = [stream.push([i]) for i in ids] + [stream.finish()]
    assert "".join(parts) == BYTES.decode(ids)


def test_a_character_waits_for_its_last_byte():
    stream = TextStream(BYTES)
    parts = [stream.push([byte]) for byte in "aé😀".encode()]
    assert parts == ["a", "", "é", "", "", "", "😀"]


def test_words_keep_their_spaces():
    stream = TextStream(Pieces(" the", " cat", " sat"))
    assert [stream.push([i]) for i in range(3)] == ["the", " cat", " sat"]


ALPHABET = st.text("ab<|", max_size=12)


@given(ALPHABET, st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=3), st.data())
def test_the_text_ends_before_the_first_stop_string(text, stops, data):
    """However the text is cut into tokens, and nothing after the stop is ever given out."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    pieces = [piece for piece in pieces if piece]
    stream = TextStream(Pieces(*pieces), stops)
    given_out = "".join(stream.push([i]) for i in range(len(pieces))) + stream.finish()
    # The earliest that is complete: by the token that completes it, then by where it begins.
    expected, used = text, len(pieces)
    for used in range(1, len(pieces) + 1):
        so_far = "".join(pieces[:used])
        places = [so_far.find(stop) for stop in stops if stop in so_far]
        if places:
            expected = so_far[: min(places)]
            break
    assert given_out == stream.text == expected
    assert stream.num_tokens == used or not pieces
    assert (stream.stopped_by is None) == (not any(stop in text for stop in stops))


def test_what_may_begin_a_stop_string_waits():
    stream = TextStream(Pieces("yes", "<|", "no", "<", "|end", "|>", "more"), ["<|end|>"])
    assert [stream.push([i]) for i in range(7)] == ["yes", "", "<|no", "", "", "", ""]
    assert (stream.text, stream.stopped_by, stream.num_tokens) == ("yes<|no", "<|end|>", 6)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(CliError, match="AX826"):
        TextStream(BYTES, ["a", ""])


@dataclasses.dataclass
class Replay:
    """A generator that gives each prompt its answer, chunk by chunk."""

    answers: dict[tuple[int, ...], list[int]]
    calls: list[tuple[list[tuple[int, ...]], list[int]]] = dataclasses.field(default_factory=list)

    def generate(self, prompts, max_tokens, sampling, *, seeds, slide, on_tokens):
        self.calls.append(([tuple(p) for p in prompts], list(seeds)))
        tokens = [self.answers[tuple(p)][:max_tokens] for p in prompts]
        out = [[] for _ in prompts]
        done = [False] * len(prompts)
        for i in range(0, max_tokens, 3):
            new = [[] if done[r] else row[i : i + 3] for r, row in enumerate(tokens)]
            for row, part in zip(out, new, strict=True):
                row += part
            done = [a or b for a, b in zip(done, on_tokens(new), strict=True)]
        ended = [len(self.answers[tuple(p)]) < max_tokens for p in prompts]
        return Generation(out, ended, 0.5, 10.0, 0.0)


def test_prompts_are_batched_by_length_and_answered_in_order():
    answers = {
        (1, 1, 1): list(b"long answer"),
        (2,): list(b"hi"),
        (3, 3): list(b"one STOP two"),
    }
    replay, heard = Replay(answers), {0: "", 1: "", 2: ""}

    def hear(index, text):
        heard[index] += text

    made, total = complete(
        replay,  # pyright: ignore[reportArgumentType]
        BYTES,
        list(answers),
        9,
        Sampling(seed=5),
        stop=[" STOP"],
        batch_size=2,
        on_text=hear,
    )
    assert [c.text for c in made] == ["long answ", "hi", "one"] == list(heard.values())
    assert [c.finish_reason for c in made] == ["length", "eos", "stop"]
    assert bytes(made[2].token_ids) == b"one STOP"
    assert replay.calls == [([(2,), (3, 3)], [6, 7]), ([(1, 1, 1)], [5])]
    assert total.ttft_seconds == 0.5
