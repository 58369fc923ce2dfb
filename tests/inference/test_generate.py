"""Generation agrees with running the whole sequence again for every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.errors import CliError
from axcore.inference import Generator, Sampling
from axcore.layers import Attention, CausalLM, Decoder, TransformerLayer

LIMIT = 24


@pytest.fixture(scope="module")
def model():
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=2))
    module = CausalLM.Config(
        vocab_size=16,
        model_dim=8,
        max_seq_len=LIMIT,
        decoder=Decoder.Config(num_layers=2, layer=layer),
    ).instantiate(name="m")
    params = module.initialize(jax.random.key(5))
    # Sharper logits than fresh weights give, so that rounding decides no argmax.
    params["embedding"]["weight"] *= 40

    @jax.jit
    def logits(ids):
        return functional(module, state=params, inputs=(ids,), is_training=False, method="logits")[
            0
        ]

    def last_logits(tokens):
        padded = np.zeros((1, LIMIT), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(logits(jnp.asarray(padded)))[0, len(tokens) - 1]

    return module, params, last_logits


@pytest.fixture(scope="module")
def generator(model):
    module, params, _ = model
    return Generator(module, params, max_seq_len=LIMIT, chunk=4)


def greedy(last_logits, prompt, num):
    tokens = list(prompt)
    for _ in range(num):
        tokens.append(int(np.argmax(last_logits(tokens))))
    return tokens[len(prompt) :]


def test_greedy_tokens_are_those_of_the_full_forward(model, generator):
    prompts = [[1, 2, 3], [7], [4, 5, 6, 7, 8]]  # of different lengths, in one batch
    made = generator.generate(prompts, 9)
    assert made.tokens == [greedy(model[2], p, 9) for p in prompts]


def test_a_row_does_not_depend_on_its_neighbours(generator):
    together = generator.generate([[1, 2, 3], [9, 9]], 6).tokens
    assert together == [generator.generate([p], 6).tokens[0] for p in ([1, 2, 3], [9, 9])]


def test_generation_ends_at_the_end_of_text(model):
    module, params, last_logits = model
    expected = greedy(last_logits, [1, 2, 3], 9)
    eos = expected[4]
    first = expected.index(eos)
    made = Generator(module, params, max_seq_len=LIMIT, eos_id=eos, chunk=4)
    seen = []
    result = made.generate([[1, 2, 3]], 9, on_tokens=lambda new: seen.extend(new[0]))
    assert result.tokens[0] == expected[:first] == seen


def test_too_many_tokens_are_refused_or_slide(generator):
    with pytest.raises(CliError, match=f"{LIMIT} positions") as caught:
        generator.generate([[1] * 20], 10)
    assert "at most 4 tokens" in caught.value.hint and "slide" in caught.value.hint
    assert len(generator.generate([[1] * 20], 40, slide=True).tokens[0]) == 40


@pytest.mark.parametrize(("prompts", "num"), [([[]], 3), ([], 3), ([[1]], 0), ([[1]], -1)])
def test_empty_prompts_and_counts_are_refused(generator, prompts, num):
    with pytest.raises(CliError, match="at least"):
        generator.generate(prompts, num)


def test_sampling_is_reproducible_and_follows_the_seed(generator):
    draw = [
        generator.generate([[3, 1]], 12, Sampling(temperature=1.5, seed=s)).tokens
        for s in (1, 1, 2)
    ]
    assert draw[0] == draw[1] != draw[2]


def choose(sampling, logits, num=400):
    keys = jax.random.split(jax.random.key(0), num)
    rows = jnp.asarray([logits], jnp.float32)
    return np.asarray(jax.vmap(lambda k: sampling.choose(rows, k)[0])(keys))


def test_top_k_and_top_p_leave_out_the_tail():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(choose(Sampling(temperature=1.0, top_k=2), logits)) == {0, 1}
    assert set(choose(Sampling(temperature=1.0, top_p=0.75), logits)) == {0, 1}
    assert set(choose(Sampling(temperature=1.0, top_p=0.85), logits)) == {0, 1, 2}
    assert set(choose(Sampling(temperature=1.0, top_p=0.01), logits)) == {0}


def test_temperature_gives_the_softmax_frequencies():
    logits = np.array([1.0, 0.0, -1.0])
    draws = choose(Sampling(temperature=2.0), logits, num=4000)
    expected = np.exp(logits / 2) / np.exp(logits / 2).sum()
    # 4,000 draws: three standard errors are 0.024.
    np.testing.assert_allclose(np.bincount(draws, minlength=3) / 4000, expected, atol=0.024)


@pytest.mark.parametrize(
    "bad", [dict(temperature=-1.0), dict(top_k=-1), dict(top_p=0.0), dict(top_p=1.5)]
)
def test_impossible_sampling_is_refused(bad):
    with pytest.raises(CliError, match="temperature >= 0"):
        Sampling(**bad)


def test_a_seed_of_more_than_64_bits_is_refused():
    with pytest.raises(CliError, match="AX820"):
        Sampling(seed=10**20)
