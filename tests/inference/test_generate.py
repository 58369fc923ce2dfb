"""Generation agrees with running the whole sequence again for every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.errors import CliError
from axcore.inference import Generator, Sampling, unrolled
from axcore.layers import (
    Attention,
    CausalLM,
    Decoder,
    EncoderDecoder,
    RepeatedTransformer,
    StackedTransformer,
    TransformerLayer,
)
from axcore.testing import check_cached_decode

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


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_that_the_model_does_not_know_is_named(generator, token):
    with pytest.raises(CliError, match=f"has the token {token}, the model knows"):
        generator.generate([[1, 2], [token]], 3)


def test_sampling_is_reproducible_and_follows_the_seed(generator):
    draw = [
        generator.generate([[3, 1]], 12, Sampling(temperature=1.5, seed=s)).tokens
        for s in (1, 1, 2)
    ]
    assert draw[0] == draw[1] != draw[2]


def test_a_row_draws_as_a_prompt_alone_with_its_seed_does(generator):
    sampling = Sampling(temperature=1.5, seed=7)
    together = generator.generate([[3, 1], [5]], 9, sampling).tokens
    assert together[0] == generator.generate([[3, 1]], 9, sampling).tokens[0]
    assert together[1] == generator.generate([[5]], 9, sampling, seeds=[8]).tokens[0]


def test_what_is_drawn_does_not_depend_on_the_chunks(model, generator):
    module, params, _ = model
    sampling = Sampling(temperature=1.5, repetition_penalty=1.4, seed=3)
    whole = Generator(module, params, max_seq_len=LIMIT, chunk=16)
    expected = generator.generate([[3, 1]], 9, sampling).tokens
    assert whole.generate([[3, 1]], 9, sampling).tokens == expected


def test_the_repetition_penalty_counts_the_prompt_and_the_answer(model, generator):
    prompt, penalty = [1, 2, 3], 3.0
    tokens = list(prompt)
    for _ in range(9):
        logits = np.array(model[2](tokens), np.float64)
        for token in set(tokens):
            logits[token] = (
                logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
            )
        tokens.append(int(np.argmax(logits)))
    made = generator.generate([prompt], 9, Sampling(repetition_penalty=penalty))
    assert made.tokens[0] == tokens[3:] != generator.generate([prompt], 9).tokens[0]


def test_any_of_several_tokens_ends_a_text(model):
    module, params, last_logits = model
    expected = greedy(last_logits, [1, 2, 3], 9)
    first = min(expected.index(expected[4]), expected.index(expected[2]))
    made = Generator(
        module, params, max_seq_len=LIMIT, eos_id=[expected[4], expected[2]], chunk=4
    ).generate([[1, 2, 3], [7]], 9)
    assert made.tokens[0] == expected[:first] and made.ended[0]


def test_a_prompt_can_be_finished_from_outside(generator):
    seen = []

    def watch(new):
        seen.append([len(tokens) for tokens in new])
        return [len(seen) >= 2, len(seen) >= 3]

    made = generator.generate([[1, 2, 3], [7]], 17, on_tokens=watch)
    assert [len(tokens) for tokens in made.tokens] == [5, 9] and made.ended == [False, False]
    assert seen == [[1, 1], [4, 4], [0, 4]]


def test_a_bucket_is_compiled_once(model):
    """Prompts, lengths, seeds and values of one bucket share two programs."""
    module, params, _ = model
    generator = Generator(module, params, max_seq_len=LIMIT, chunk=4)
    for prompts, num, sampling in (
        ([[1, 2, 3]], 9, Sampling(temperature=1.0)),
        ([[4]], 3, Sampling(temperature=0.3, seed=9)),
        ([[1] * 8], 8, Sampling(temperature=2.0)),
        ([[5, 6]], 1, Sampling(temperature=2.0)),
    ):
        generator.generate(prompts, num, sampling)
    assert generator.num_programs == 2
    generator.generate([[1, 2], [3], [4]], 5, Sampling(temperature=1.0))
    generator.generate([[1, 2], [3], [4], [5]], 7, Sampling(temperature=1.0))
    assert generator.num_programs == 4, "three prompts run as four"


def test_compiled_programs_are_all_there_is(model, monkeypatch):
    """A second request compiles nothing, counted by JAX itself."""
    module, params, _ = model
    generator = Generator(module, params, max_seq_len=LIMIT, chunk=4)
    generator.generate([[1, 2, 3]], 9)
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, _, **kw: events.append(name) if "backend_compile" in name else None
    )
    made = generator.generate([[4, 5]], 6)
    assert not events and made.compile_seconds == 0
    assert made.ttft_seconds > 0 and made.tokens_per_second > 0


def test_a_model_that_cannot_generate_is_named(model):
    with pytest.raises(CliError, match="AX825"):
        Generator(model[0].embedding, {}, max_seq_len=None)


def test_an_encoder_decoder_needs_more_than_a_prompt():
    with pytest.raises(CliError, match="AX825"):
        Generator(EncoderDecoder.__new__(EncoderDecoder), {}, max_seq_len=None)


@pytest.mark.parametrize("stack", [RepeatedTransformer.Config(), StackedTransformer.Config()])
def test_any_split_of_the_prompt_gives_the_full_forward(stack):
    """Prefill, then pieces of any lengths, then single tokens, in rows of different lengths."""
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=4, num_kv_heads=2))
    module = CausalLM.Config(
        vocab_size=24,
        model_dim=16,
        max_seq_len=16,
        decoder=Decoder.Config(num_layers=2, layer=layer, stack=stack),
    ).instantiate(name="m")
    check_cached_decode(module, module.initialize(jax.random.key(3)), vocab_size=24)


def test_layers_one_by_one_give_the_same_tokens(model, generator):
    module, params, _ = model
    made, state = unrolled(module, params)
    assert list(state["decoder"]["layer"]) == ["0", "1"] and "0:2:1" in params["decoder"]["layer"]
    alone = Generator(made, state, max_seq_len=LIMIT, chunk=4).generate([[1, 2, 3]], 9)
    assert alone.tokens == generator.generate([[1, 2, 3]], 9).tokens
    assert unrolled(made, state)[0] is made
