"""Autoregressive generation with the model's own prefill and decode methods.

Prompts of different lengths share a batch: they are padded on the right with position -1, which
caches neither store nor show. Decoding runs in device-side chunks, so the host is asked once per
chunk and not once per token.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.collection import OutputCollection, apply_state_updates
from axcore.context import Target, functional
from axcore.errors import CliError
from axcore.layers import init_cache, merge_state
from axcore.module import Module

__all__ = ["Generation", "Generator", "Sampling"]

_log = logging.getLogger("axcore.inference")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: Divides the logits; 0 takes the largest (greedy).
        top_k: Only the k largest logits take part; 0 for all.
        top_p: Only the smallest set of tokens with this much probability takes part (nucleus
            sampling, arXiv:1904.09751); 1.0 for all.
        seed: Seed of the draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise CliError(
                f"got temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}; "
                "expected temperature >= 0, top_k >= 0, 0 < top_p <= 1",
                code="AX820",
            )
        if not -(2**63) <= self.seed < 2**63:
            raise CliError(f"seed is {self.seed}, expected a number of 64 bits", code="AX820")

    def choose(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Returns int32 (batch,) tokens for float32 (batch, vocab_size) logits."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k:
            kth = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits < kth, -jnp.inf, logits)
        if self.top_p < 1.0:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            probs = jax.nn.softmax(ordered, axis=-1)
            # A token is in when what comes before it has less than top_p; the first always is.
            inside = jnp.cumsum(probs, axis=-1) - probs < self.top_p
            least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.random.categorical(key, logits, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated.

    Attributes:
        tokens: Generated token ids per prompt, without the end-of-text token.
        ttft_seconds: Time to the first token, compilation excluded.
        tokens_per_second: Generated tokens of all prompts over the time after the first.
        compile_seconds: Time spent compiling.
    """

    tokens: list[list[int]]
    ttft_seconds: float
    tokens_per_second: float
    compile_seconds: float


class Generator:
    """Generates with a model that has ``prefill`` and ``decode``.

    Args:
        model: The module.
        state: Its parameters and state.
        max_seq_len: Longest sequence the model's positions allow, in tokens; None for no limit.
        eos_id: Token that ends a text, or None.
        target: What the program is built for.
        chunk: Tokens per device call.
    """

    def __init__(
        self,
        model: Module,
        state: Mapping[str, Any],
        *,
        max_seq_len: int | None,
        eos_id: int | None = None,
        target: Target | None = None,
        chunk: int = 32,
    ):
        self.model, self.state = model, state
        self.max_seq_len, self.eos_id = max_seq_len, eos_id
        self._target, self._chunk = target, chunk
        self._compiled: dict[Any, Any] = {}
        self._compile_seconds = 0.0

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling = Sampling(),
        *,
        slide: bool = False,
        on_tokens: Callable[[list[list[int]]], None] | None = None,
    ) -> Generation:
        """Continues each prompt by up to ``max_tokens`` tokens.

        Args:
            prompts: Token ids, at least one per prompt.
            max_tokens: Most tokens to generate per prompt.
            sampling: How tokens are chosen.
            slide: When the model's positions run out, go on from the last half of the text instead
                of refusing. One prompt only.
            on_tokens: Called with the new tokens of each prompt after each chunk.

        Raises:
            CliError: An empty prompt, a non-positive ``max_tokens``, or more tokens than the model
                has positions for.
        """
        longest = self._check(prompts, max_tokens, slide)
        limit = self.max_seq_len
        if limit is None or longest + max_tokens <= limit:
            return self._generate(prompts, max_tokens, sampling, on_tokens)
        # Slide: rounds of what fits, each from the last half of the text so far.
        _log.info("past %d tokens it goes on from the last half of the text", limit)
        text, out = list(prompts[0]), []
        ttft, seconds, compile_seconds = None, 0.0, 0.0
        while len(out) < max_tokens:
            window = text[-min(len(text), limit // 2) :] if len(text) >= limit else text
            room = min(limit - len(window), max_tokens - len(out))
            part = self._generate(
                [window],
                room,
                dataclasses.replace(sampling, seed=sampling.seed + len(out)),
                on_tokens,
            )
            new = part.tokens[0]
            out += new
            text += new
            ttft = part.ttft_seconds if ttft is None else ttft
            seconds += len(new) / part.tokens_per_second if part.tokens_per_second else 0.0
            compile_seconds += part.compile_seconds
            if len(new) < room:
                break
        rate = len(out) / seconds if seconds else 0.0
        return Generation([out], ttft or 0.0, rate, compile_seconds)

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int, slide: bool) -> int:
        if max_tokens < 1:
            raise CliError(f"max_tokens is {max_tokens}, expected at least 1", code="AX821")
        if not prompts or not all(len(p) for p in prompts):
            raise CliError(
                "a prompt has no tokens, expected at least one",
                code="AX821",
                hint="give a prompt that is not empty",
            )
        longest = max(map(len, prompts))
        limit = self.max_seq_len
        if limit is not None and longest + max_tokens > limit and not (slide and len(prompts) == 1):
            raise CliError(
                f"a prompt of {longest} tokens and {max_tokens} to generate exceed the model's "
                f"{limit} positions",
                code="AX822",
                hint=f"ask for at most {max(limit - longest, 0)} tokens, shorten the prompt, or "
                "let it slide: go on from the last half of the text",
            )
        return longest

    # -- the device programs ---------------------------------------------------------------

    def _step(
        self, caches: Any, ids: jax.Array, positions: jax.Array, method: str, state: Any
    ) -> tuple[Any, jax.Array]:
        logits, collection = functional(
            self.model,
            state=merge_state(state, caches),
            inputs=(ids, positions),
            is_training=False,
            method=method,
            target=self._target,
        )
        return _updated(caches, collection), logits

    def _prefill_fn(self, sampling: Sampling, batch: int, max_len: int):
        def prefill(state: Any, ids: jax.Array, positions: jax.Array, key: jax.Array):
            caches = init_cache(self.model, batch, max_len)
            caches, logits = self._step(caches, ids, positions, "prefill", state)
            return caches, sampling.choose(logits, key)

        return prefill

    def _decode_fn(self, sampling: Sampling, num: int):
        def decode(state: Any, caches: Any, token: jax.Array, position: jax.Array, key: jax.Array):
            def one(carry: Any, i: jax.Array) -> tuple[Any, jax.Array]:
                caches, token, position = carry
                caches, logits = self._step(
                    caches, token[:, None], position[:, None], "decode", state
                )
                token = sampling.choose(logits, jax.random.fold_in(key, i))
                return (caches, token, position + 1), token

            (caches, token, position), tokens = jax.lax.scan(
                one, (caches, token, position), jnp.arange(num)
            )
            return caches, position, tokens.T

        return decode

    def _compile(
        self, name: tuple[Any, ...], fn: Callable[..., Any], *args: Any, **jit: Any
    ) -> Any:
        if name not in self._compiled:
            start = time.perf_counter()
            self._compiled[name] = jax.jit(fn, **jit).lower(*args).compile()
            self._compile_seconds += time.perf_counter() - start
        return self._compiled[name]

    def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling,
        on_tokens: Callable[[list[list[int]]], None] | None,
    ) -> Generation:
        batch, longest = len(prompts), max(map(len, prompts))
        limit = self.max_seq_len
        # Lengths are rounded up so that few programs serve all requests.
        padded = _round_up(longest, limit)
        max_len = _round_up(longest + max_tokens, limit)
        ids = np.zeros((batch, padded), np.int32)
        positions = np.full((batch, padded), -1, np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            positions[row, : len(prompt)] = np.arange(len(prompt))
        key = jax.random.key(sampling.seed)
        sampling = dataclasses.replace(sampling, seed=0)  # an argument of the programs: the key
        before = self._compile_seconds
        state = self.state
        prefill = self._compile(
            ("prefill", sampling, batch, padded, max_len),
            self._prefill_fn(sampling, batch, max_len),
            state,
            ids,
            positions,
            key,
        )
        start = time.perf_counter()
        caches, token = prefill(state, ids, positions, jax.random.fold_in(key, 0))
        first = np.asarray(token)
        ttft = time.perf_counter() - start
        out: list[list[int]] = [[] for _ in prompts]
        done = np.zeros(batch, bool)
        self._take(out, done, first[:, None], on_tokens)
        position = jnp.asarray([len(p) for p in prompts], jnp.int32)
        made, seconds = 1, 0.0
        while made < max_tokens and not done.all():
            num = min(self._chunk, max_tokens - made)
            call_key = jax.random.fold_in(key, made)
            decode = self._compile(
                ("decode", sampling, batch, max_len, num),
                self._decode_fn(sampling, num),
                state,
                caches,
                token,
                position,
                call_key,
                donate_argnums=1,
            )
            start = time.perf_counter()
            caches, position, tokens = decode(state, caches, token, position, call_key)
            new = np.asarray(tokens)
            seconds += time.perf_counter() - start
            token = tokens[:, -1]
            self._take(out, done, new, on_tokens)
            made += num
        count = sum(map(len, out)) - batch
        rate = max(count, 0) / seconds if seconds else 0.0
        return Generation(out, ttft, rate, self._compile_seconds - before)

    def _take(
        self,
        out: list[list[int]],
        done: np.ndarray,
        new: np.ndarray,
        on_tokens: Callable[[list[list[int]]], None] | None,
    ) -> None:
        """Appends new tokens (batch, n) to what was generated, up to each row's end of text."""
        taken: list[list[int]] = []
        for row, tokens in enumerate(new.tolist()):
            kept: list[int] = []
            for token in tokens if not done[row] else ():
                if token == self.eos_id:
                    done[row] = True
                    break
                kept.append(token)
            out[row] += kept
            taken.append(kept)
        if on_tokens is not None:
            on_tokens(taken)


def _updated(caches: dict[str, Any], collection: OutputCollection) -> dict[str, Any]:
    """Returns the caches with their updates; what else a model updates is not generation's say."""

    def is_cache(path: str) -> bool:
        node: Any = caches
        for part in path.split("/"):
            if not isinstance(node, Mapping) or part not in node:
                return False
            node = node[part]
        return True

    updates = {p: e for p, e in collection.state_updates.items() if is_cache(p)}
    return apply_state_updates(caches, OutputCollection(state_updates=updates))


def _round_up(length: int, limit: int | None) -> int:
    rounded = max(16, 1 << (length - 1).bit_length())
    return rounded if limit is None else min(rounded, limit)
