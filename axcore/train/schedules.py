"""Learning-rate schedules: plain functions that return an optax schedule.

A schedule maps the number of updates made so far (0 for the first) to a value. In a config it is a
node, ``config_for(linear_warmup_cosine, peak=3e-4, warmup_steps=scaled(0.02, of="max_step"),
total_steps=scaled(1.0, of="max_step"))``, so a change of the horizon moves every boundary with it.

All of them take ``peak``, and all but ``held_inverse_sqrt`` are linear from 0 to ``peak`` over the
first ``warmup_steps`` updates (none when 0).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import optax

from axcore.errors import TrainError

__all__ = [
    "constant",
    "held_inverse_sqrt",
    "inverse_sqrt",
    "linear",
    "linear_warmup_cosine",
    "wsd",
]


def constant(peak: float, warmup_steps: int = 0) -> optax.Schedule:
    """Returns ``min(1, t / warmup) * peak``.

    Args:
        peak: The value after warm-up.
        warmup_steps: Updates over which the value rises linearly from 0.

    Example:
        >>> float(constant(0.5)(10))
        0.5
    """
    _check(peak, warmup_steps)
    return _after_warmup(peak, warmup_steps, optax.constant_schedule(peak))


def linear_warmup_cosine(
    peak: float, warmup_steps: int, total_steps: int, end_ratio: float = 0.0
) -> optax.Schedule:
    """Returns warm-up, then half a cosine from ``peak`` down to ``end_ratio * peak``.

    ``peak * (r + (1 - r) * (1 + cos(pi * s)) / 2)``, where ``r`` is ``end_ratio`` and ``s`` rises
    from 0 to 1 between ``warmup_steps`` and ``total_steps``; constant afterwards.

    Args:
        peak: The largest value.
        warmup_steps: Updates over which the value rises linearly from 0.
        total_steps: Updates in all, warm-up included.
        end_ratio: Last value as a fraction of ``peak``.

    References:
        Loshchilov and Hutter, SGDR, arXiv:1608.03983.
    """
    _check(peak, warmup_steps, total_steps)
    decay = optax.cosine_decay_schedule(peak, total_steps - warmup_steps, alpha=end_ratio)
    return _after_warmup(peak, warmup_steps, decay)


def linear(
    peak: float, warmup_steps: int, total_steps: int, end_ratio: float = 0.0
) -> optax.Schedule:
    """Returns warm-up, then a straight line from ``peak`` down to ``end_ratio * peak``.

    Args:
        peak: The largest value.
        warmup_steps: Updates over which the value rises linearly from 0.
        total_steps: Updates in all, warm-up included.
        end_ratio: Last value as a fraction of ``peak``.
    """
    _check(peak, warmup_steps, total_steps)
    decay = optax.linear_schedule(peak, end_ratio * peak, total_steps - warmup_steps)
    return _after_warmup(peak, warmup_steps, decay)


def wsd(
    peak: float,
    warmup_steps: int,
    total_steps: int,
    decay_steps: int,
    end_ratio: float = 0.0,
) -> optax.Schedule:
    """Returns warm-up, a stable plateau at ``peak``, then a linear decay over the last steps.

    Args:
        peak: The largest value.
        warmup_steps: Updates over which the value rises linearly from 0.
        total_steps: Updates in all.
        decay_steps: Updates of the final decay, typically 0.1 to 0.2 of the total.
        end_ratio: Last value as a fraction of ``peak``.

    References:
        Hu et al., MiniCPM, arXiv:2404.06395.
    """
    _check(peak, warmup_steps, total_steps, decay_steps)
    rest = optax.constant_schedule(peak)
    if decay_steps:
        decay = optax.linear_schedule(peak, end_ratio * peak, decay_steps)
        stable = total_steps - decay_steps - warmup_steps
        rest = optax.join_schedules([rest, decay], [stable])
    return _after_warmup(peak, warmup_steps, rest)


def inverse_sqrt(peak: float, warmup_steps: int) -> optax.Schedule:
    """Returns warm-up, then ``peak * sqrt(warmup_steps / t)``; it needs no horizon.

    Args:
        peak: The largest value, reached at ``t = warmup_steps``.
        warmup_steps: Updates over which the value rises linearly from 0; also the time scale of
            the decay, for which 0 counts as 1.

    References:
        Vaswani et al., Attention Is All You Need, arXiv:1706.03762.
    """
    _check(peak, warmup_steps)
    scale = max(warmup_steps, 1)

    def decay(step: jax.typing.ArrayLike) -> jax.Array:
        since_start = jnp.asarray(step, jnp.float32) + warmup_steps
        return peak * jnp.sqrt(scale / jnp.maximum(since_start, scale))

    return _after_warmup(peak, warmup_steps, decay)


def held_inverse_sqrt(peak: float, hold_steps: int) -> optax.Schedule:
    """Returns ``peak / sqrt(max(t, hold_steps) / hold_steps)``: constant, then falling.

    Args:
        peak: The largest value, of the first ``hold_steps`` updates.
        hold_steps: Updates at ``peak``; also the time scale of the decay, for which 0 counts as 1.

    References:
        Raffel et al., T5, arXiv:1910.10683, section 3.1.2: ``1 / sqrt(max(t, 10^4))`` is a peak of
        0.01 held for 10,000 updates.
    """
    _check(peak, hold_steps)
    scale = max(hold_steps, 1)

    def value(step: jax.typing.ArrayLike) -> jax.Array:
        return peak * jnp.sqrt(scale / jnp.maximum(jnp.asarray(step, jnp.float32), scale))

    return value


def _after_warmup(peak: float, warmup_steps: int, rest: optax.Schedule) -> optax.Schedule:
    if warmup_steps == 0:
        return rest
    return optax.join_schedules(
        [optax.linear_schedule(0.0, peak, warmup_steps), rest], [warmup_steps]
    )


def _check(
    peak: float, warmup_steps: int, total_steps: int | None = None, decay_steps: int = 1
) -> None:
    if not 0 <= peak < math.inf:  # NaN is no rate either
        raise TrainError(f"peak must be a number of at least 0, got {peak}", code="AX701")
    # Zero is fine everywhere: what is derived from a short horizon rounds down to it.
    if warmup_steps < 0 or decay_steps < 0:
        raise TrainError(
            f"steps must not be negative, got {min(warmup_steps, decay_steps)}",
            code="AX701",
            hint="0 warms up, or decays, not at all",
        )
    if total_steps is not None and warmup_steps + decay_steps > total_steps:
        raise TrainError(
            f"{warmup_steps} steps of warm-up and at least {decay_steps} of decay exceed "
            f"total_steps={total_steps}",
            code="AX701",
            hint='derive the boundaries from the horizon: scaled(0.02, of="max_step")',
        )
