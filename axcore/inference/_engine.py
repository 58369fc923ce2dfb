"""Autoregressive generation with the model's own prefill and decode methods.

Prompts of different lengths share a batch: they are padded on the right with position -1, which
caches neither store nor show. Rows that have ended go on at position -1, so they change nothing.
Decoding runs in device-side chunks, so the host is asked once per chunk and not once per token.

Programs are compiled per bucket: batches are rounded up to a power of two, lengths to a power of
two up to 256 and to a multiple of 256 above. Numbers (temperature, seeds, tokens to make) are
arguments; only which sampling steps take part is part of the program.
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
from axcore.inference._sampling import GREEDY, Chooser, Sampling, row_keys
from axcore.layers import init_cache, merge_state
from axcore.module import Module

__all__ = ["Generation", "Generator", "OnTokens"]

_log = logging.getLogger("axcore.inference")

# Called with the new tokens of each prompt; may return which prompts are finished.
OnTokens = Callable[[list[list[int]]], Sequence[bool] | None]


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was generated.

    Attributes:
        tokens: Generated token ids per prompt, without the end-of-text token.
        ended: Per prompt, whether the model ended it (and not the number of tokens asked for).
        ttft_seconds: Time to the first token, compilation excluded.
        tokens_per_second: Generated tokens of all prompts over the time after the first.
        compile_seconds: Time spent compiling.
    """

    tokens: list[list[int]]
    ended: list[bool]
    ttft_seconds: float
    tokens_per_second: float
    compile_seconds: float


class Generator:
    """Generates with a model that has ``prefill`` and ``decode``.

    Args:
        model: The module.
        state: Its parameters and state.
        max_seq_len: Longest sequence the model's positions allow, in tokens; None for no limit.
        eos_id: Token or tokens that end a text, or None.
        target: What the program is built for.
        chunk: Tokens per device call.
    """

    def __init__(
        self,
        model: Module,
        state: Mapping[str, Any],
        *,
        max_seq_len: int | None,
        eos_id: int | Sequence[int] | None = None,
        target: Target | None = None,
        chunk: int = 32,
    ):
        missing = [name for name in ("prefill", "decode") if not hasattr(model, name)]
        if missing:
            raise CliError(
                f"the model ({type(model).__name__}) cannot generate: it has no {missing[0]}",
                code="AX825",
                hint="encoders and classifiers make no text",
            )
        if hasattr(model, "encode"):
            raise CliError(
                f"the model ({type(model).__name__}) cannot generate from a prompt alone: "
                "its decoder reads what its encoder made of a source",
                code="AX825",
                hint="call its encode, prefill and decode",
            )
        self.model, self.state = model, state
        self.max_seq_len = max_seq_len
        ids = () if eos_id is None else (eos_id,) if isinstance(eos_id, int) else tuple(eos_id)
        self._eos_ids = np.array(ids, np.int32)
        self._target, self._chunk = target, chunk
        self._compiled: dict[Any, Any] = {}
        self._compile_seconds = 0.0

    @property
    def num_programs(self) -> int:
        """How many programs have been compiled."""
        return len(self._compiled)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        *,
        seeds: Sequence[int] | None = None,
        slide: bool = False,
        on_tokens: OnTokens | None = None,
    ) -> Generation:
        """Continues each prompt by up to ``max_tokens`` tokens.

        Args:
            prompts: Token ids, at least one per prompt.
            max_tokens: Most tokens to generate per prompt.
            sampling: How tokens are chosen.
            seeds: A seed per prompt; None counts up from ``sampling.seed``.
            slide: When the model's positions run out, go on from the last half of the text instead
                of refusing (which is then all that repetition is counted in). One prompt only.
            on_tokens: Called with the new tokens of each prompt after each chunk; the prompts that
                it returns True for are finished.

        Raises:
            CliError: An empty prompt, a token that the model does not know, a non-positive
                ``max_tokens``, or more tokens than the model has positions for.
        """
        longest = self._check(prompts, max_tokens, slide)
        if seeds is None:
            seeds = range(sampling.seed, sampling.seed + len(prompts))
        limit = self.max_seq_len
        if limit is None or longest + max_tokens <= limit:
            return self._generate(prompts, max_tokens, sampling, seeds, 0, on_tokens)
        # Slide: rounds of what fits, each from the last half of the text so far.
        _log.info("past %d tokens it goes on from the last half of the text", limit)
        text, out = list(prompts[0]), []
        ttft, seconds, compile_seconds, stopped = None, 0.0, 0.0, False

        def watch(new: list[list[int]]) -> Sequence[bool] | None:
            nonlocal stopped
            finished = on_tokens(new) if on_tokens is not None else None
            stopped = stopped or (finished is not None and bool(finished[0]))
            return finished

        part = None
        while len(out) < max_tokens and not stopped:
            window = text[-max(1, min(len(text), limit // 2)) :] if len(text) >= limit else text
            room = min(limit - len(window), max_tokens - len(out))
            part = self._generate([window], room, sampling, seeds, len(out), watch)
            new = part.tokens[0]
            out += new
            text += new
            ttft = part.ttft_seconds if ttft is None else ttft
            seconds += len(new) / part.tokens_per_second if part.tokens_per_second else 0.0
            compile_seconds += part.compile_seconds
            stopped = stopped or part.ended[0]
        rate = len(out) / seconds if seconds else 0.0
        ended = part is not None and part.ended[0]
        return Generation([out], [ended], ttft or 0.0, rate, compile_seconds)

    def _check(self, prompts: Sequence[Sequence[int]], max_tokens: int, slide: bool) -> int:
        if max_tokens < 1:
            raise CliError(f"max_tokens is {max_tokens}, expected at least 1", code="AX821")
        if not prompts or not all(len(p) for p in prompts):
            raise CliError(
                "a prompt has no tokens, expected at least one",
                code="AX821",
                hint="give a prompt that is not empty",
            )
        check_ids(self.model, [i for prompt in prompts for i in prompt], "a prompt")
        longest = max(map(len, prompts))
        limit = self.max_seq_len
        if limit is not None and longest + max_tokens > limit and not (slide and len(prompts) == 1):
            raise CliError(
                f"a prompt of {longest} tokens and {max_tokens} to generate exceed the model's "
                f"{limit} positions",
                code="AX822",
                hint=f"ask for at most {max(limit - longest, 0)} tokens, shorten the prompt, or "
                "let it slide: go on from the last half of the text (one prompt at a time)",
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

    def _is_eos(self, token: jax.Array) -> jax.Array:
        return jnp.isin(token, self._eos_ids) if self._eos_ids.size else jnp.zeros_like(token, bool)

    def _prefill_fn(self, chooser: Chooser, batch: int, max_len: int):
        def prefill(state: Any, ids: jax.Array, positions: jax.Array, args: Any):
            caches = init_cache(self.model, batch, max_len)
            caches, logits = self._step(caches, ids, positions, "prefill", state)
            rows = jnp.arange(batch)
            seen = None
            if chooser.penalty:
                seen = jnp.zeros(logits.shape, bool)
                seen = seen.at[rows[:, None], ids].max(positions >= 0, mode="drop")
            token = chooser.choose(logits, args["values"], _keys(args["keys"], args["made"]), seen)
            if seen is not None:
                seen = seen.at[rows, token].set(True)
            return caches, token, jnp.max(positions, axis=1) + 1, seen

        return prefill

    def _decode_fn(self, chooser: Chooser, batch: int):
        def decode(state: Any, carry: Any, done: jax.Array, args: Any):
            rows = jnp.arange(batch)

            def more(carry: Any) -> jax.Array:
                i, _, done, _ = carry
                return (i < args["num"]) & ~jnp.all(done)

            def one(carry: Any) -> Any:
                i, (caches, token, position, seen), done, out = carry
                at = jnp.where(done, -1, position)
                caches, logits = self._step(caches, token[:, None], at[:, None], "decode", state)
                keys = _keys(args["keys"], args["made"] + i)
                token = chooser.choose(logits, args["values"], keys, seen)
                if seen is not None:
                    seen = seen.at[rows, token].set(True)
                out = jax.lax.dynamic_update_slice(out, token[:, None], (0, i))
                done = done | self._is_eos(token)
                return i + 1, (caches, token, position + 1, seen), done, out

            out = jnp.zeros((batch, self._chunk), jnp.int32)
            i, carry, _, out = jax.lax.while_loop(more, one, (jnp.int32(0), carry, done, out))
            return carry, out, i

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
        seeds: Sequence[int],
        made: int,
        on_tokens: OnTokens | None,
    ) -> Generation:
        """Generates what fits the model's positions; ``made`` tokens of it were there before."""
        batch = 1 << (len(prompts) - 1).bit_length()
        longest, limit = max(map(len, prompts)), self.max_seq_len
        padded = _round_up(longest, limit)
        max_len = _round_up(longest + max_tokens, limit)
        ids = np.zeros((batch, padded), np.int32)
        positions = np.full((batch, padded), -1, np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = prompt
            positions[row, : len(prompt)] = np.arange(len(prompt))
        chooser = sampling.chooser
        keys = row_keys([*seeds, *([0] * (batch - len(prompts)))])
        args = {"values": sampling.values, "keys": keys, "made": np.int32(made)}
        before, state = self._compile_seconds, self.state
        prefill = self._compile(
            ("prefill", chooser, batch, padded, max_len),
            self._prefill_fn(chooser, batch, max_len),
            state,
            ids,
            positions,
            args,
        )
        start = time.perf_counter()
        carry = prefill(state, ids, positions, args)
        first = np.asarray(carry[1])
        ttft = time.perf_counter() - start
        out: list[list[int]] = [[] for _ in prompts]
        ended = np.arange(batch) >= len(prompts)  # by eos; rows that only fill up have no text
        done = ended.copy()  # by whatever
        self._take(out, ended, done, first[:, None], on_tokens)
        num_made, seconds = 1, 0.0
        while num_made < max_tokens and not done.all():
            num = min(self._chunk, max_tokens - num_made)
            args = args | {"made": np.int32(made + num_made), "num": np.int32(num)}
            decode = self._compile(
                ("decode", chooser, batch, max_len),
                self._decode_fn(chooser, batch),
                state,
                carry,
                done,
                args,
                donate_argnums=1,
            )
            start = time.perf_counter()
            carry, tokens, count = decode(state, carry, done, args)
            new = np.asarray(tokens)[:, : int(count)]
            seconds += time.perf_counter() - start
            self._take(out, ended, done, new, on_tokens)
            num_made += num
        total = sum(map(len, out)) - len(prompts)
        rate = max(total, 0) / seconds if seconds else 0.0
        hidden = ended[: len(prompts)].tolist()
        return Generation(out, hidden, ttft, rate, self._compile_seconds - before)

    def _take(
        self,
        out: list[list[int]],
        ended: np.ndarray,
        done: np.ndarray,
        new: np.ndarray,
        on_tokens: OnTokens | None,
    ) -> None:
        """Appends new tokens (batch, n) to what was generated, up to each row's end of text."""
        taken: list[list[int]] = []
        eos = set(self._eos_ids.tolist())
        for row, tokens in enumerate(new.tolist()[: len(out)]):
            kept: list[int] = []
            for token in tokens if not done[row] else ():
                if token in eos:
                    done[row] = ended[row] = True
                    break
                kept.append(token)
            out[row] += kept
            taken.append(kept)
        finished = on_tokens(taken) if on_tokens is not None else None
        if finished is not None:
            done[: len(out)] |= np.asarray(finished, bool)


def _keys(data: jax.Array, index: jax.Array) -> jax.Array:
    """The keys of the ``index``-th token of each row."""
    keys = jax.random.wrap_key_data(data, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)


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
    rounded = max(16, 1 << (length - 1).bit_length()) if length <= 256 else -(-length // 256) * 256
    return rounded if limit is None else min(rounded, limit)


def check_ids(model: Module, ids: Any, what: str) -> None:
    """Raises CliError (AX829) for a token id, of an int array or list, that the model lacks."""
    vocab_size = getattr(model.cfg, "vocab_size", None)
    array = np.asarray(ids)
    if not isinstance(vocab_size, int) or not array.size:
        return
    least, most = int(array.min()), int(array.max())
    if least < 0 or most >= vocab_size:
        bad = most if most >= vocab_size else least
        raise CliError(
            f"{what} has the token {bad}, the model knows those from 0 to {vocab_size - 1}",
            code="AX829",
            hint="the tokenizer is of another model, or it has tokens that this one lacks",
        )
