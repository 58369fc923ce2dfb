"""Samplers against their definitions in numpy, and draws against the probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axcore.errors import CliError
from axcore.inference import Sampling

VOCAB = 12


def softmax(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


def expected(logits, sampling: Sampling, seen):
    """The probabilities that the sampling's description gives, one token at a time."""
    logits = np.array(logits, np.float64)
    for token in seen:
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    logits /= sampling.temperature
    order = np.argsort(-logits, kind="stable")
    kept = list(order[: sampling.top_k] if sampling.top_k else order)
    probs = softmax(logits[kept])
    total, inside = 0.0, []
    for token, prob in zip(kept, probs, strict=True):
        if total < sampling.top_p:
            inside.append(token)
        total += prob
    probs = softmax(logits[inside])
    inside = [t for t, p in zip(inside, probs, strict=True) if p >= sampling.min_p * probs[0]]
    out = np.zeros(VOCAB)
    out[inside] = softmax(logits[inside])
    return out


def probabilities(logits, sampling: Sampling, seen):
    mask = np.zeros((1, VOCAB), bool)
    mask[0, list(seen)] = True
    filtered = sampling.chooser.filtered(
        jnp.asarray([logits], jnp.float32), sampling.values, jnp.asarray(mask)
    )
    return np.asarray(jax.nn.softmax(filtered, axis=-1))[0]


# Distinct scores, far enough apart that float32 decides like float64.
LOGITS = st.permutations(list(range(VOCAB))).map(lambda p: np.array(p) * 0.7 - 3.1)


@settings(max_examples=60)
@given(
    logits=LOGITS,
    temperature=st.sampled_from([0.5, 1.0, 2.3]),
    top_k=st.sampled_from([0, 1, 3, 7, 50]),
    top_p=st.sampled_from([0.13, 0.57, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.11, 0.43, 1.0]),
    penalty=st.sampled_from([1.0, 1.3, 0.7]),
    seen=st.sets(st.integers(0, VOCAB - 1), max_size=4),
)
def test_probabilities_are_those_of_the_definition(
    logits, temperature, top_k, top_p, min_p, penalty, seen
):
    sampling = Sampling(temperature, top_k, top_p, min_p, penalty)
    wanted = expected(logits, sampling, seen)
    np.testing.assert_allclose(probabilities(logits, sampling, seen), wanted, atol=2e-6)


def draws(sampling, logits, num):
    keys = jax.random.split(jax.random.key(0), num)
    rows = jnp.tile(jnp.asarray([logits], jnp.float32), (num, 1))
    return np.asarray(sampling.chooser.choose(rows, sampling.values, keys))


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=2.0), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.8, min_p=0.2)],
    ids=["temperature", "top-k", "top-p-min-p"],
)
def test_tokens_are_drawn_as_often_as_their_probability_says(sampling):
    logits = np.linspace(1.5, -2.5, VOCAB)
    frequency = np.bincount(draws(sampling, logits, 4000), minlength=VOCAB) / 4000
    wanted = expected(logits, sampling, ())
    assert not frequency[wanted == 0].any()
    # 4,000 draws: four standard errors are at most 0.032.
    np.testing.assert_allclose(frequency, wanted, atol=0.032)


def test_top_k_and_top_p_leave_out_the_tail():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(draws(Sampling(temperature=1.0, top_k=2), logits, 400)) == {0, 1}
    assert set(draws(Sampling(temperature=1.0, top_p=0.75), logits, 400)) == {0, 1}
    assert set(draws(Sampling(temperature=1.0, top_p=0.85), logits, 400)) == {0, 1, 2}
    assert set(draws(Sampling(temperature=1.0, top_p=0.01), logits, 400)) == {0}
    assert set(draws(Sampling(temperature=1.0, min_p=0.5), logits, 400)) == {0, 1}


def test_greedy_takes_the_largest_after_the_penalty():
    logits = jnp.array([[2.0, 1.9, -1.0], [-1.0, -1.1, -5.0]])
    seen = jnp.array([[True, False, False], [True, False, False]])
    greedy = Sampling(repetition_penalty=1.2)
    keys = jax.random.split(jax.random.key(0), 2)
    assert greedy.chooser.choose(logits, greedy.values, keys, seen).tolist() == [1, 1]
    assert Sampling().chooser.choose(logits, greedy.values, keys).tolist() == [0, 0]


@pytest.mark.parametrize("tiny", [dict(temperature=1e-40), dict(temperature=1.0, top_p=1e-50)])
def test_values_that_float32_takes_for_zero_leave_the_largest(tiny):
    logits = np.array([1.0, 3.0, 2.0, -5.0])
    assert set(draws(Sampling(**tiny), logits, 50)) == {1}


@pytest.mark.parametrize(
    "bad", [dict(temperature=-1.0), dict(top_k=-1), dict(top_p=0.0), dict(top_p=1.5)]
)
def test_impossible_sampling_is_refused(bad):
    with pytest.raises(CliError, match="temperature >= 0"):
        Sampling(**bad)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e300),
        ("repetition_penalty", 1e-300),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("seed", 10**20),
    ],
)
def test_numbers_that_no_sampling_can_have_are_refused(name, value):
    with pytest.raises(CliError, match="AX820"):
        Sampling(**{name: value})
