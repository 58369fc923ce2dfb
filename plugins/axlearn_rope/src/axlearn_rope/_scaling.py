"""Scaling schemes: rotary frequencies for contexts longer than a model was trained on.

A scheme is a frozen record. With rotary dims ``d`` and base ``b``, RoPE turns pair ``i`` of a head
by ``position * f_i``, ``f_i = b^(-2i/d)``; a scheme gives other ``f_i``, and a factor on the
rotated queries and keys. A package adds a scheme by deriving from :class:`RoPEScaling`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axcore.errors import ConfigError

__all__ = [
    "DynamicNTKScaling",
    "LinearScaling",
    "Llama3Scaling",
    "LongRoPEScaling",
    "NTKScaling",
    "RoPEScaling",
    "YaRNScaling",
    "rotary_frequencies",
]

Scalar = float | jax.Array


def _numpy_of(*values: Any) -> Any:
    """Returns jax.numpy if any value is a JAX array, else numpy: a constant, made in float64."""
    return jnp if any(isinstance(v, jax.Array) for v in values) else np


def rotary_frequencies(base: Scalar, dim: int) -> Any:
    """Returns ``base^(-2i/dim)`` in radians per position (Su et al., arXiv:2104.09864, eq. 15).

    Args:
        base: A float, or a JAX array that broadcasts against (dim / 2,), such as (batch, seq, 1).
        dim: Number of dims that are rotated, even.

    Returns:
        (dim / 2,) float64 numpy, or for a JAX base float32 of the broadcast shape.
    """
    exponents = -np.arange(0, dim, 2) / dim
    if isinstance(base, jax.Array):
        return jnp.power(base.astype(jnp.float32), jnp.asarray(exponents, jnp.float32))
    return float(base) ** exponents


def _check(record: RoPEScaling, *, at_least: float, **values: Any) -> None:
    """Raises ConfigError unless every value is a number of at least ``at_least``."""
    for name, value in values.items():
        is_number = type(value) in (int, float)
        if not is_number or not math.isfinite(value) or value < at_least:
            raise ConfigError(
                f"{type(record).__name__}({name}={value!r}): expected a number >= {at_least:g}",
                code="AX380",
                hint="a factor of 4 serves four times the trained length; lengths are in tokens",
            )


@dataclasses.dataclass(frozen=True)
class RoPEScaling(abc.ABC):
    """Base of scaling schemes: frozen, of static values only."""

    @property
    def uses_length(self) -> bool:
        """Whether the frequencies depend on how long the sequence is by now.

        If so, a cache that was filled while the sequence was shorter holds keys of the earlier
        frequencies, and cached decode differs from the full forward past the trained length.
        """
        return False

    @property
    def query_key_factor(self) -> float:
        """What rotated queries and keys are each multiplied by; logits grow by its square."""
        return 1.0

    def check(self, dim: int) -> None:
        """Raises ConfigError unless the scheme fits ``dim`` rotated dims."""
        del dim

    @abc.abstractmethod
    def frequencies(self, base: Scalar, dim: int, length: jax.Array | None) -> Any:
        """Returns the frequencies in radians per position.

        Args:
            base: A float, or a scalar JAX array where it differs by layer.
            dim: Number of dims that are rotated, even.
            length: int32 (batch, seq or 1, 1), tokens in each token's sequence; None unless
                ``uses_length``.

        Returns:
            (dim / 2,), or (batch, seq or 1, dim / 2) where they depend on the length.
        """


@dataclasses.dataclass(frozen=True)
class LinearScaling(RoPEScaling):
    """Position interpolation: ``f_i / factor`` (Chen et al., arXiv:2306.15595).

    Attributes:
        factor: New over trained length, >= 1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check(self, at_least=1, factor=self.factor)

    def frequencies(self, base: Scalar, dim: int, length: jax.Array | None) -> Any:
        """``base^(-2i/dim) / factor``."""
        return rotary_frequencies(base, dim) / self.factor


@dataclasses.dataclass(frozen=True)
class NTKScaling(RoPEScaling):
    """NTK-aware interpolation: a larger base, ``b' = b factor^(d / (d - 2))``.

    The highest frequency stays, the lowest is divided by ``factor``. Due to bloc97 (2023); written
    down in Peng et al., arXiv:2309.00071, definition 1.

    Attributes:
        factor: New over trained length, >= 1.
    """

    factor: float

    def __post_init__(self) -> None:
        _check(self, at_least=1, factor=self.factor)

    def check(self, dim: int) -> None:
        """Two dims have one frequency only, which cannot both stay and shrink."""
        _check_more_than_two(self, dim)

    def frequencies(self, base: Scalar, dim: int, length: jax.Array | None) -> Any:
        """``b'^(-2i/dim)``."""
        return rotary_frequencies(base * self.factor ** (dim / (dim - 2)), dim)


@dataclasses.dataclass(frozen=True)
class DynamicNTKScaling(RoPEScaling):
    """NTK-aware interpolation by the length at hand: nothing changes up to the trained length.

    ``b' = b (factor L / L0 - (factor - 1))^(d / (d - 2))`` with ``L = max(length, L0)`` and trained
    length ``L0`` (emozilla, 2023; arXiv:2309.00071, "Dynamic NTK"). A row's length is that of the
    document, so neither neighbours in a batch nor packed documents change a result.

    Attributes:
        factor: How fast the base grows, >= 1.
        original_max_seq_len: Trained length in tokens.
        seq_len: Serve all lengths with the base of this one, which makes cached decode exact;
            None: by the length at hand.
    """

    factor: float
    original_max_seq_len: int
    seq_len: int | None = None

    def __post_init__(self) -> None:
        _check(self, at_least=1, factor=self.factor, original_max_seq_len=self.original_max_seq_len)
        if self.seq_len is not None:
            _check(self, at_least=1, seq_len=self.seq_len)

    @property
    def uses_length(self) -> bool:
        """Unless ``seq_len`` is given."""
        return self.seq_len is None

    def check(self, dim: int) -> None:
        """As for :class:`NTKScaling`."""
        _check_more_than_two(self, dim)

    def frequencies(self, base: Scalar, dim: int, length: jax.Array | None) -> Any:
        """``b'^(-2i/dim)``."""
        original = self.original_max_seq_len
        if length is None:
            ratio: Scalar = max(self.seq_len or original, original) / original
        else:
            ratio = jnp.maximum(length, original).astype(jnp.float32) / original
        growth = self.factor * ratio - (self.factor - 1)
        return rotary_frequencies(base * growth ** (dim / (dim - 2)), dim)


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RoPEScaling):
    """Llama 3.1: long wavelengths are interpolated, short ones kept, a ramp between.

    With trained length ``L0`` and ``r_i = L0 f_i / 2 pi`` turns within it,
    ``s = clip((r_i - low) / (high - low), 0, 1)`` and ``f'_i = (1 - s) f_i / factor + s f_i``.
    The values of Llama 3.1 are the defaults (Grattafiori et al., arXiv:2407.21783; the formula is
    that of ``apply_scaling`` in Meta's llama-models).

    Attributes:
        factor: What low frequencies are divided by, >= 1 (3.1: 8; 3.2: 32).
        low_freq_factor: Turns within ``L0`` at or below which a frequency is divided in full.
        high_freq_factor: Turns at or above which it is kept.
        original_max_seq_len: Trained length in tokens.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_seq_len: int = 8192

    def __post_init__(self) -> None:
        _check(self, at_least=1, factor=self.factor, original_max_seq_len=self.original_max_seq_len)
        _check(self, at_least=0, low_freq_factor=self.low_freq_factor)
        _check(self, at_least=0, high_freq_factor=self.high_freq_factor)
        if self.high_freq_factor <= self.low_freq_factor:
            raise ConfigError(
                f"Llama3Scaling: high_freq_factor {self.high_freq_factor} is not above "
                f"low_freq_factor {self.low_freq_factor}",
                code="AX380",
                hint="both count turns within the trained length; Llama 3.1 has 1 and 4",
            )

    def frequencies(self, base: Scalar, dim: int, length: jax.Array | None) -> Any:
        """The ramp above."""
        xp = _numpy_of(base)
        plain = rotary_frequencies(base, dim)
        turns = self.original_max_seq_len * plain / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        keep = xp.clip((turns - low) / (high - low), 0.0, 1.0)
        return (1 - keep) * plain / self.factor + keep * plain


@dataclasses.dataclass(frozen=True)
class YaRNScaling(RoPEScaling):
    """YaRN: NTK-by-parts interpolation and a factor on attention (Peng et al., arXiv:2309.00071).

    ``f'_i = (1 - g_i) f_i + g_i f_i / factor``, where ``g`` rises linearly over pair indices from 0
    at ``i(beta_fast)`` to 1 at ``i(beta_slow)``, ``i(r) = d ln(L0 / (2 pi r)) / (2 ln b)`` being
    the pair that makes ``r`` turns within the trained length ``L0``. (The paper's ramp is over
    turns; this one, over pair indices and rounded outwards, is that of the authors' code and of
    Hugging Face.) Queries and keys are multiplied by ``0.1 ln(factor) + 1``, the paper's
    ``sqrt(1/t)``; with both ``mscale`` values (DeepSeek) by
    ``(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)``.

    Attributes:
        factor: New over trained length, >= 1.
        original_max_seq_len: Trained length ``L0`` in tokens.
        beta_fast: Turns within ``L0`` from which on a frequency is kept.
        beta_slow: Turns up to which it is interpolated in full.
        mscale: See above; None or 0: not given.
        mscale_all_dim: See above.
        attention_factor: Replaces the formula.
        truncate: Whether the ends of the ramp are rounded to whole pairs (gpt-oss: not).
    """

    factor: float
    original_max_seq_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check(self, at_least=1, factor=self.factor, original_max_seq_len=self.original_max_seq_len)
        positive = math.nextafter(0.0, 1.0)
        _check(self, at_least=positive, beta_slow=self.beta_slow, beta_fast=self.beta_fast)
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(
                f"YaRNScaling: beta_fast {self.beta_fast} is not above beta_slow {self.beta_slow}",
                code="AX380",
                hint="both count turns within the trained length; the paper has 32 and 1",
            )
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            if getattr(self, name) is not None:
                _check(self, at_least=0, **{name: getattr(self, name)})

    @property
    def query_key_factor(self) -> float:
        """See the class."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        log = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * log + 1) / (self.mscale_all_dim * log + 1)
        return log + 1

    def frequencies(self, base: Scalar, dim: int, length: jax.Array | None) -> Any:
        """The ramp above."""
        xp = _numpy_of(base)

        def pair_of(turns: float) -> Any:
            within = math.log(self.original_max_seq_len / (2 * math.pi * turns))
            return dim * within / (2 * xp.log(base))

        first, last = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            first, last = xp.floor(first), xp.ceil(last)
        first, last = xp.maximum(first, 0), xp.minimum(last, dim - 1)
        # A ramp of no width is a step; the width keeps the division finite.
        width = xp.where(last == first, 1e-3, last - first)
        share = xp.clip((np.arange(dim // 2) - first) / width, 0.0, 1.0)
        plain = rotary_frequencies(base, dim)
        return (1 - share) * plain + share * plain / self.factor


@dataclasses.dataclass(frozen=True)
class LongRoPEScaling(RoPEScaling):
    """LongRoPE: a searched divisor per frequency, ``f_i / lambda_i``; Phi-3's ``longrope``, ``su``.

    ``short_factor`` serves sequences up to the trained length ``L0`` and ``long_factor`` longer
    ones; queries and keys are multiplied by ``sqrt(1 + ln(factor) / ln(L0))``. Ding et al.,
    arXiv:2402.13753; Abdin et al., arXiv:2404.14219.

    Attributes:
        short_factor: Divisors up to ``L0``, one for each rotated pair.
        long_factor: Divisors beyond it.
        factor: New over trained length, >= 1; enters attention's factor only.
        original_max_seq_len: Trained length ``L0`` in tokens.
        attention_factor: Replaces the formula.
        seq_len: Choose the divisors for this length once, which makes cached decode exact; None:
            by the length at hand.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float
    original_max_seq_len: int
    attention_factor: float | None = None
    seq_len: int | None = None

    def __post_init__(self) -> None:
        _check(self, at_least=1, factor=self.factor)
        _check(self, at_least=2, original_max_seq_len=self.original_max_seq_len)
        positive = math.nextafter(0.0, 1.0)
        for name in ("short_factor", "long_factor"):
            for i, value in enumerate(getattr(self, name)):
                _check(self, at_least=positive, **{f"{name}[{i}]": value})
        if self.attention_factor is not None:
            _check(self, at_least=0, attention_factor=self.attention_factor)
        if self.seq_len is not None:
            _check(self, at_least=1, seq_len=self.seq_len)

    @property
    def uses_length(self) -> bool:
        """Unless ``seq_len`` is given."""
        return self.seq_len is None

    @property
    def query_key_factor(self) -> float:
        """See the class."""
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_seq_len))

    def check(self, dim: int) -> None:
        """There is one divisor for each rotated pair."""
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if count != dim // 2:
                raise ConfigError(
                    f"LongRoPEScaling({name}) has {count} divisors for {dim // 2} rotated pairs",
                    code="AX380",
                    hint=f"give one divisor for each pair of the {dim} rotated dims",
                )

    def frequencies(self, base: Scalar, dim: int, length: jax.Array | None) -> Any:
        """``base^(-2i/dim) / lambda_i``."""
        plain = rotary_frequencies(base, dim)
        short, long = np.asarray(self.short_factor), np.asarray(self.long_factor)
        if length is None:
            beyond = (self.seq_len or 0) > self.original_max_seq_len
            return plain / (long if beyond else short)
        short, long = (jnp.asarray(plain / x, jnp.float32) for x in (short, long))
        return jnp.where(length > self.original_max_seq_len, long, short)


def _check_more_than_two(record: RoPEScaling, dim: int) -> None:
    if dim <= 2:
        raise ConfigError(
            f"{type(record).__name__} needs more than two rotated dims, got {dim}",
            code="AX380",
            hint="raise head_dim or rotary_fraction, or use LinearScaling",
        )
