"""Schedules against their closed forms."""

import math

import jax
import numpy as np
import pytest

from axcore.errors import TrainError
from axcore.train import schedules

PEAK, WARMUP, TOTAL = 0.3, 10, 100


def values(schedule, steps=range(0, 120)):
    return np.array([float(schedule(t)) for t in steps])


def warmup(t):
    return PEAK * t / WARMUP


def cosine(t):
    s = min((t - WARMUP) / (TOTAL - WARMUP), 1.0)
    return PEAK * (0.1 + 0.9 * (1 + math.cos(math.pi * s)) / 2)


def line(t):
    return PEAK * (1 - 0.9 * min((t - WARMUP) / (TOTAL - WARMUP), 1.0))


def plateau(t):
    return PEAK * (1 - 0.9 * min(max(t - 80, 0) / 20, 1.0))


CASES = {
    "cosine": (schedules.linear_warmup_cosine(PEAK, WARMUP, TOTAL, end_ratio=0.1), cosine),
    "linear": (schedules.linear(PEAK, WARMUP, TOTAL, end_ratio=0.1), line),
    "wsd": (schedules.wsd(PEAK, WARMUP, TOTAL, decay_steps=20, end_ratio=0.1), plateau),
    "inverse_sqrt": (
        schedules.inverse_sqrt(PEAK, WARMUP),
        lambda t: PEAK * math.sqrt(WARMUP / t),
    ),
    "constant": (schedules.constant(PEAK, WARMUP), lambda t: PEAK),
}


@pytest.mark.parametrize("name", CASES)
def test_schedule_follows_its_closed_form(name):
    schedule, after = CASES[name]
    expected = [warmup(t) if t < WARMUP else after(t) for t in range(120)]
    np.testing.assert_allclose(values(schedule), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_schedule_takes_a_traced_count(name):
    schedule, _ = CASES[name]
    np.testing.assert_allclose(
        jax.jit(schedule)(jax.numpy.int32(37)), float(schedule(37)), rtol=1e-6
    )


def test_no_warmup_starts_at_the_peak():
    assert float(schedules.linear_warmup_cosine(PEAK, 0, TOTAL)(0)) == pytest.approx(PEAK)
    assert float(schedules.wsd(PEAK, 0, 10, decay_steps=10)(5)) == pytest.approx(PEAK / 2)
    assert float(schedules.inverse_sqrt(PEAK, 0)(0)) == pytest.approx(PEAK)
    assert float(schedules.inverse_sqrt(PEAK, 0)(4)) == pytest.approx(PEAK / 2)


def test_boundaries_that_a_short_horizon_rounds_to_zero_are_fine():
    assert values(schedules.wsd(PEAK, 0, 5, decay_steps=0), range(5)) == pytest.approx(PEAK)
    assert values(schedules.linear_warmup_cosine(PEAK, 0, 1), [0]) == pytest.approx(PEAK)


@pytest.mark.parametrize(
    "make",
    [
        lambda: schedules.linear_warmup_cosine(PEAK, 100, 100),
        lambda: schedules.linear(PEAK, -1, 100),
        lambda: schedules.wsd(PEAK, 90, 100, decay_steps=11),
        lambda: schedules.wsd(PEAK, 1, 100, decay_steps=-1),
        lambda: schedules.inverse_sqrt(PEAK, -1),
    ],
)
def test_boundaries_that_cannot_be_are_refused(make):
    with pytest.raises(TrainError, match="AX701"):
        make()


@pytest.mark.parametrize("peak", [float("nan"), float("inf"), -1e-3])
@pytest.mark.parametrize("name", ["constant", "inverse_sqrt"])
def test_a_peak_that_is_no_rate_is_refused(name, peak):
    with pytest.raises(TrainError, match="peak must be"):
        getattr(schedules, name)(peak, 10)


def test_the_held_rate_is_that_published_for_t5():
    # 1 / sqrt(max(n, 10^4)): arXiv:1910.10683, section 3.1.2.
    schedule = schedules.held_inverse_sqrt(0.01, 10_000)
    for step in (0, 1, 9_999, 10_000, 40_000, 524_288):
        assert float(schedule(step)) == pytest.approx(max(step, 1e4) ** -0.5, rel=1e-6)
    assert float(schedules.held_inverse_sqrt(0.01, 0)(4)) == pytest.approx(0.005)
