"""The scaling schemes: their limits, their records, and what they refuse."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.config import Config
from axcore.errors import ConfigError
from axcore.layers import SequenceInfo
from axlearn_rope import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    MultiAxis,
    NTKScaling,
    RoPE,
    RoPEScaling,
    YaRNScaling,
    rotary_frequencies,
)

DIM, BASE = 16, 10_000.0
PLAIN = BASE ** (-np.arange(DIM // 2) / (DIM // 2))
LONG = LongRoPEScaling(
    short_factor=tuple(1 + 0.1 * i for i in range(8)),
    long_factor=tuple(1 + 2.0 * i for i in range(8)),
    factor=4.0,
    original_max_seq_len=8,
)
ALL = {
    "linear": LinearScaling(8.0),
    "ntk": NTKScaling(4.0),
    "dynamic": DynamicNTKScaling(2.0, 8),
    "llama3": Llama3Scaling(original_max_seq_len=512),
    "yarn": YaRNScaling(4.0, 64, mscale=1.0, mscale_all_dim=0.5),
    "longrope": LONG,
}


def at_length(scaling, length):
    return np.asarray(scaling.frequencies(BASE, DIM, jnp.full((1, 1, 1), length)))[0, 0]


def turned_ones(scaling, positions, segment_ids=None):
    """Returns turned queries of ones, (batch, seq, DIM)."""
    rope = RoPE.Config(num_heads=1, num_kv_heads=1, head_dim=DIM, scaling=scaling)
    module = rope.instantiate(name="rope")

    @jax.jit
    def run(positions, segment_ids):
        x = jnp.ones((*positions.shape, 1, DIM))
        info = SequenceInfo(positions=positions, segment_ids=segment_ids)
        return functional(module, state={}, inputs=(x, x, info), is_training=False)[0][0]

    return np.asarray(run(jnp.asarray(positions), segment_ids))[:, :, 0]


@dataclasses.dataclass(frozen=True)
class OnlyFirst(RoPEScaling):
    """A scheme of another package: all but the highest frequency stand still."""

    factor: float = 1.0

    def frequencies(self, base, dim, length):
        """1, 0, 0, ..."""
        return np.arange(dim // 2) == 0


def test_a_scheme_of_another_package_fits_without_an_edit():
    positions = np.array([[0, 3]])
    got = turned_ones(OnlyFirst(), positions)[0, 1]
    expected = np.ones(DIM)
    expected[[0, DIM // 2]] = math.cos(3) - math.sin(3), math.cos(3) + math.sin(3)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_linear_divides_every_frequency():
    np.testing.assert_allclose(LinearScaling(8.0).frequencies(BASE, DIM, None), PLAIN / 8)


def test_ntk_keeps_the_highest_frequency_and_divides_the_lowest_by_the_factor():
    got = NTKScaling(4.0).frequencies(BASE, DIM, None)
    np.testing.assert_allclose([got[0], got[-1]], [1.0, PLAIN[-1] / 4])


def test_dynamic_changes_nothing_up_to_the_trained_length_and_is_ntk_beyond():
    scaling = DynamicNTKScaling(2.0, 8)
    np.testing.assert_allclose(at_length(scaling, 8), PLAIN, rtol=1e-6)
    # At twice the trained length: 2 * 2 - (2 - 1).
    expected = NTKScaling(3.0).frequencies(BASE, DIM, None)
    np.testing.assert_allclose(at_length(scaling, 16), expected, rtol=1e-6)
    fixed = DynamicNTKScaling(2.0, 8, seq_len=16)
    assert not fixed.uses_length
    np.testing.assert_allclose(fixed.frequencies(BASE, DIM, None), expected)


def test_llama3_keeps_short_and_divides_long_wavelengths():
    got = Llama3Scaling(original_max_seq_len=512).frequencies(BASE, DIM, None)
    turns = 512 * PLAIN / (2 * math.pi)
    np.testing.assert_allclose(got[turns > 4], PLAIN[turns > 4])
    np.testing.assert_allclose(got[turns < 1], PLAIN[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert (got[between] < PLAIN[between]).all() and (got[between] > PLAIN[between] / 8).all()


def test_yarn_interpolates_by_parts():
    scaling = YaRNScaling(4.0, 2048)
    got = scaling.frequencies(BASE, DIM, None)
    assert got[0] == PLAIN[0]
    np.testing.assert_allclose(got[-1], PLAIN[-1] / 4)
    assert (np.diff(PLAIN / got) >= -1e-9).all()  # from 1 to the factor
    assert scaling.query_key_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_the_attention_factor_multiplies_rotated_dims():
    positions = np.zeros((1, 2), np.int32)  # at position 0 nothing turns
    got = turned_ones(YaRNScaling(4.0, 64, attention_factor=1.25), positions)
    np.testing.assert_allclose(got, 1.25)
    expected = math.sqrt(1 + math.log(4) / math.log(8))
    np.testing.assert_allclose(turned_ones(LONG, positions), expected, rtol=1e-6)


def test_longrope_takes_the_long_divisors_past_the_trained_length():
    np.testing.assert_allclose(at_length(LONG, 8), PLAIN / LONG.short_factor, rtol=1e-6)
    np.testing.assert_allclose(at_length(LONG, 9), PLAIN / LONG.long_factor, rtol=1e-6)
    for seq_len, divisors in ((8, LONG.short_factor), (9, LONG.long_factor)):
        fixed = dataclasses.replace(LONG, seq_len=seq_len)
        assert not fixed.uses_length
        np.testing.assert_allclose(fixed.frequencies(BASE, DIM, None), PLAIN / divisors)


@pytest.mark.parametrize("scaling", [ALL["dynamic"], LONG], ids=["dynamic", "longrope"])
def test_a_documents_length_is_its_own(scaling):
    """Neither a neighbour in the batch nor a packed document changes a result."""
    short, long = np.arange(5), np.arange(11)
    alone_short = turned_ones(scaling, short[None])[0]
    alone_long = turned_ones(scaling, long[None])[0]
    packed = np.concatenate([short, long])[None]
    segments = jnp.asarray([[1] * 5 + [2] * 11])
    got = turned_ones(scaling, packed, segments)[0]
    np.testing.assert_allclose(got, np.concatenate([alone_short, alone_long]), atol=1e-6)
    padded = np.stack([np.pad(short, (0, 6), constant_values=-1), long])
    got = turned_ones(scaling, padded)
    np.testing.assert_allclose(got[0, :5], alone_short, atol=1e-6)
    np.testing.assert_allclose(got[1], alone_long, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_a_traced_base_gives_what_a_static_one_does(name):
    length = jnp.full((1, 1, 1), 20) if ALL[name].uses_length else None
    static = ALL[name].frequencies(500.0, DIM, length)
    np.testing.assert_allclose(
        ALL[name].frequencies(jnp.float32(500.0), DIM, length), static, rtol=2e-5
    )
    np.testing.assert_allclose(rotary_frequencies(jnp.float32(500.0), 2), [1.0])


@pytest.mark.parametrize("name", ALL)
def test_text_form_round_trip(name):
    cfg = RoPE.Config(scaling=ALL[name], axes=MultiAxis((3, 3, 2), "interleaved"))
    text = cfg.to_text()
    assert f'data("axlearn_rope.{type(ALL[name]).__name__}"' in text
    assert Config.from_text(text, trusted=("axlearn_rope",)) == cfg


def test_bad_records_are_refused_when_made():
    cases = {
        r"LinearScaling\(factor=0.5\): expected a number >= 1": lambda: LinearScaling(0.5),
        r"NTKScaling\(factor=True\)": lambda: NTKScaling(True),
        r"DynamicNTKScaling\(original_max_seq_len=0\)": lambda: DynamicNTKScaling(2.0, 0),
        r"Llama3Scaling\(factor=nan\)": lambda: Llama3Scaling(math.nan),
        "high_freq_factor 1.0 is not above": lambda: Llama3Scaling(8.0, 1.0, 1.0),
        "beta_fast 1.0 is not above": lambda: YaRNScaling(2.0, 64, beta_fast=1.0),
        r"short_factor\[1\]=0": lambda: LongRoPEScaling((1.0, 0), (1.0, 1.0), 2.0, 8),
        r"sections=\(2, 0\)": lambda: MultiAxis((2, 0)),
        "cannot be interleaved": lambda: MultiAxis((1, 3, 1), "interleaved"),
        "expected 'blocks' or 'interleaved'": lambda: MultiAxis((1, 1), "mixed"),
    }
    for message, make in cases.items():
        with pytest.raises(ConfigError, match=message):
            make()


def test_a_scheme_that_does_not_fit_the_dims_is_refused():
    for scaling, dim, message in (
        (LONG, 8, "short_factor.*8 divisors for 4 rotated pairs"),
        (NTKScaling(2.0), 2, "more than two rotated dims"),
    ):
        cfg = RoPE.Config(num_heads=1, num_kv_heads=1, head_dim=dim, scaling=scaling)
        with pytest.raises(ConfigError, match=message):
            cfg.instantiate(name="rope")
