"""From prompts to texts: tokens as they come to text, stop strings, batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from axcore.errors import CliError
from axcore.inference._engine import Generation, Generator
from axcore.inference._sampling import GREEDY, Sampling

__all__ = ["Completion", "TextStream", "complete"]


class _Decodes(Protocol):
    def decode(self, ids: Iterable[int]) -> str: ...


class TextStream:
    """The text of tokens that come one by one, up to a stop string.

    What it hands out is final: a character waits for its last byte, and what may be the beginning
    of a stop string waits until it is known.

    Args:
        tokenizer: What makes text of tokens.
        stop: Texts that end the answer; they are no part of it.
    """

    def __init__(self, tokenizer: _Decodes, stop: Sequence[str] = ()):
        if not all(stop):
            raise CliError("a stop string is empty, expected some text", code="AX826")
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids: list[int] = []
        # ids[_from:_to] have been handed on; they are decoded again with what follows, because some
        # tokenizers write the first token of a text differently (without its space).
        self._from = self._to = 0
        self._waiting = ""
        self.text = ""
        self.stopped_by: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens read, up to the one that completed a stop string."""
        return len(self._ids)

    def push(self, tokens: Iterable[int]) -> str:
        """Reads tokens; returns the text that is new and final."""
        given = ""
        for token in tokens:
            if self.stopped_by is not None:
                break
            self._ids.append(token)
            given += self._new_text(self._decoded(last=False))
        return given

    def finish(self) -> str:
        """Returns what was waiting: there are no more tokens."""
        if self.stopped_by is not None:
            return ""
        given = self._new_text(self._decoded(last=True))
        if self.stopped_by is None:
            given += self._waiting
            self.text += self._waiting
            self._waiting = ""
        return given

    def _decoded(self, last: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._from : self._to])
        now = self._tokenizer.decode(self._ids[self._from :])
        if not last and (len(now) <= len(before) or now.endswith("\ufffd")):
            return ""  # a part of a character
        self._from, self._to = self._to, len(self._ids)
        return now[len(before) :]

    def _new_text(self, new: str) -> str:
        text = self._waiting + new
        found = [(text.find(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if found:
            at, _, self.stopped_by = min(found)
            given, self._waiting = text[:at], ""
        else:
            held = max((_overlap(text, stop) for stop in self._stop), default=0)
            given, self._waiting = text[: len(text) - held], text[len(text) - held :]
        self.text += given
        return given


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, and not all of it."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


@dataclasses.dataclass(frozen=True)
class Completion:
    """The continuation of one prompt.

    Attributes:
        text: Up to the end of text, a stop string or the number of tokens asked for.
        token_ids: The tokens read for it, the one that completed a stop string included.
        finish_reason: ``eos``, ``stop`` or ``length``.
    """

    text: str
    token_ids: list[int]
    finish_reason: str


def complete(
    generator: Generator,
    tokenizer: _Decodes,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    stop: Sequence[str] = (),
    slide: bool = False,
    batch_size: int = 8,
    on_text: Callable[[int, str], None] | None = None,
) -> tuple[list[Completion], Generation]:
    """Continues prompts and returns their texts.

    Prompts are batched with others of about their length. Prompt i draws with the seed
    ``sampling.seed + i``, whatever shares its batch.

    Args:
        generator: The model.
        tokenizer: Its tokenizer.
        prompts: Token ids.
        max_tokens: Most tokens per prompt.
        sampling: How tokens are chosen.
        stop: Texts that end an answer; the answer is cut before the first of them.
        slide: See ``Generator.generate``.
        batch_size: Most prompts at a time.
        on_text: Called with a prompt's number and its new text, as soon as that is final.

    Returns:
        A completion per prompt, and the tokens and times of all (of the first batch: the time to
        the first token).

    Raises:
        CliError: See ``Generator.generate``; or an empty stop string.
    """
    streams = [TextStream(tokenizer, stop) for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    ended = [False] * len(prompts)
    ttft, seconds, compile_seconds, rated = None, 0.0, 0.0, 0

    def give(index: int, text: str) -> None:
        if text and on_text is not None:
            on_text(index, text)

    for batch in batches or [[]]:

        def watch(new: list[list[int]], batch: list[int] = batch) -> list[bool]:
            for index, tokens in zip(batch, new, strict=True):
                give(index, streams[index].push(tokens))
            return [streams[index].stopped_by is not None for index in batch]

        made = generator.generate(
            [prompts[i] for i in batch],
            max_tokens,
            sampling,
            seeds=[sampling.seed + i for i in batch],
            slide=slide,
            on_tokens=watch,
        )
        for index, by_model in zip(batch, made.ended, strict=True):
            ended[index] = by_model
        ttft = made.ttft_seconds if ttft is None else ttft
        compile_seconds += made.compile_seconds
        if made.tokens_per_second:
            count = sum(map(len, made.tokens)) - len(batch)
            rated += count
            seconds += count / made.tokens_per_second
    completions = []
    for index, stream in enumerate(streams):
        give(index, stream.finish())
        reason = "stop" if stream.stopped_by is not None else "eos" if ended[index] else "length"
        completions.append(Completion(stream.text, stream._ids, reason))
    tokens = [c.token_ids for c in completions]
    rate = rated / seconds if seconds else 0.0
    return completions, Generation(tokens, ended, ttft or 0.0, rate, compile_seconds)
