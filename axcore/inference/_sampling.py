"""How the next token is chosen from the model's scores."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.errors import CliError

__all__ = ["GREEDY", "Chooser", "Sampling", "row_keys"]

# What is smaller may be zero on a device, and logits over it may be infinite.
_TINY = 1e-30


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    In this order: the repetition penalty changes scores, ``temperature`` divides them, ``top_k``,
    ``top_p`` and ``min_p`` each leave out tokens (probabilities are those of what is left), and one
    is drawn from the rest. Temperature 0 takes the largest score instead.

    Attributes:
        temperature: Divides the logits; 0 (and what float32 hardly tells from it, less than 1e-30)
            takes the largest (greedy).
        top_k: Only the k largest logits take part; 0 for all.
        top_p: Only the smallest set of tokens with this much probability takes part (nucleus
            sampling, arXiv:1904.09751); 1.0 for all.
        min_p: Only tokens with at least this share of the likeliest token's probability take part
            (arXiv:2407.01082); 0 for all.
        repetition_penalty: Logits of tokens that the prompt or the answer already has are divided
            by this where positive and multiplied where negative (arXiv:1909.05858); 1.0 for none.
        seed: Seed of the draws: row r of a batch draws as a single prompt with ``seed + r`` does.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0 or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise CliError(
                f"got temperature={self.temperature}, top_k={self.top_k}, top_p={self.top_p}; "
                "expected temperature >= 0, top_k >= 0, 0 < top_p <= 1",
                code="AX820",
            )
        if not math.isfinite(self.temperature):
            raise CliError(f"got temperature={self.temperature}, expected a number", code="AX820")
        if not 0 <= self.min_p <= 1 or not 0 < self.repetition_penalty < math.inf:
            raise CliError(
                f"got min_p={self.min_p}, repetition_penalty={self.repetition_penalty}; "
                "expected 0 <= min_p <= 1, repetition_penalty > 0",
                code="AX820",
            )
        penalty = self.repetition_penalty
        if not _TINY <= penalty <= 1 / _TINY:
            raise CliError(
                f"got repetition_penalty={penalty}, expected a number that float32 holds",
                code="AX820",
            )
        if not -(2**63) <= self.seed < 2**63:
            raise CliError(f"seed is {self.seed}, expected a number of 64 bits", code="AX820")

    @property
    def chooser(self) -> Chooser:
        """The part of it that a compiled program depends on."""
        greedy = self.temperature < _TINY
        return Chooser(
            greedy=greedy,
            top_k=0 if greedy else self.top_k,
            top_p=not greedy and self.top_p < 1,
            min_p=not greedy and self.min_p > 0,
            penalty=self.repetition_penalty != 1,
        )

    @property
    def values(self) -> dict[str, np.float32]:
        """The part of it that is an argument of the program."""
        names = ("temperature", "top_p", "min_p", "repetition_penalty")
        return {name: np.float32(getattr(self, name)) for name in names}


GREEDY = Sampling()


@dataclasses.dataclass(frozen=True)
class Chooser:
    """The steps of a ``Sampling`` that take part; requests that differ in values share a program.

    Attributes:
        greedy: Take the largest.
        top_k: Number of candidates, 0 for all: a shape.
        top_p: Whether there is a nucleus.
        min_p: Whether there is a least probability.
        penalty: Whether repetition costs.
    """

    greedy: bool = True
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False
    penalty: bool = False

    def filtered(
        self, logits: jax.Array, values: Mapping[str, Any], seen: jax.Array | None = None
    ) -> jax.Array:
        """Returns the logits to draw from, -inf where a token takes no part.

        Args:
            logits: float32 (batch, vocab_size).
            values: See ``Sampling.values``.
            seen: bool (batch, vocab_size), the tokens that are there already.
        """
        if self.penalty and seen is not None:
            penalty = values["repetition_penalty"]
            logits = jnp.where(
                seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits
            )
        if self.greedy:
            return logits
        logits = logits / values["temperature"]
        ordered = None  # the candidates, largest first
        if 0 < self.top_k < logits.shape[-1]:
            ordered = jax.lax.top_k(logits, self.top_k)[0]
            logits = jnp.where(logits < ordered[:, -1:], -jnp.inf, logits)
        if self.top_p:
            if ordered is None:
                ordered = jnp.sort(logits, axis=-1, descending=True)
            probs = jax.nn.softmax(ordered, axis=-1)
            # A token is in when what comes before it has less than top_p; the first always is.
            inside = jnp.cumsum(probs, axis=-1) - probs < values["top_p"]
            inside = inside.at[:, 0].set(True)  # also where top_p is no more than float32's zero
            least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.min_p:
            least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(values["min_p"])
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return logits

    def choose(
        self,
        logits: jax.Array,
        values: Mapping[str, Any],
        keys: jax.Array,
        seen: jax.Array | None = None,
    ) -> jax.Array:
        """Returns int32 (batch,) tokens.

        Args:
            logits: float32 (batch, vocab_size).
            values: See ``Sampling.values``.
            keys: (batch,) random keys, one a row.
            seen: See ``filtered``.
        """
        logits = self.filtered(logits, values, seen)
        if self.greedy:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)


def row_keys(seeds: Sequence[int]) -> np.ndarray:
    """Returns the key data of each row's seed, uint32 (rows, 2), for threefry on any platform."""
    data = [((seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF) for seed in seeds]
    return np.array(data, np.uint32)
