"""RoPE against closed forms: what is turned, by how much, and what must not change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import functional
from axcore.errors import ModuleError
from axcore.layers import SequenceInfo
from axcore.testing import LayerConformance
from axlearn_rope import DynamicNTKScaling, LinearScaling, MultiAxis, RoPE, YaRNScaling

BATCH, SEQ, HEADS, KV_HEADS, DIM = 2, 6, 4, 2, 8


def config(**fields):
    fields = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, **fields}
    return RoPE.Config(**fields)


def turn(cfg, q, k, positions, **info):
    """Returns turned q and k; ``info`` are further fields of SequenceInfo."""
    info = SequenceInfo(positions=jnp.asarray(positions), **info)
    call = dict(state={}, inputs=(q, k, info), is_training=False)
    return functional(cfg.instantiate(name="rope"), **call)[0]


def random_qk(seq=SEQ, dim=DIM, dtype=jnp.float32):
    q = jax.random.normal(jax.random.key(0), (BATCH, seq, HEADS, dim), dtype)
    k = jax.random.normal(jax.random.key(1), (BATCH, seq, KV_HEADS, dim), dtype)
    return q, k


def rows(seq=SEQ):
    return np.tile(np.arange(seq), (BATCH, 1))


def exact(x, positions, base=10_000.0, pairing="half", scale=1.0):
    """The definition by complex numbers, in float64: (a + ib) e^(i position f)."""
    x = np.asarray(x, np.float64)
    half = x.shape[-1] // 2
    if pairing == "half":
        pairs = x[..., :half] + 1j * x[..., half:]
    else:
        pairs = x[..., 0::2] + 1j * x[..., 1::2]
    rates = float(base) ** (-np.arange(half) / half)
    pairs = pairs * np.exp(1j * np.asarray(positions)[..., None, None] * rates * scale)
    if pairing == "half":
        return np.concatenate([pairs.real, pairs.imag], axis=-1)
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


class _QueryTransform(LayerConformance):
    """A query/key transform takes two arrays and gives two back."""

    def inputs(self, key):
        q, k = random_qk()
        return q, k, SequenceInfo(positions=jnp.asarray(rows()))


class TestRoPEConformance(_QueryTransform):
    def config(self):
        return config(pairing="interleaved", rotary_fraction=0.5, scaling=YaRNScaling(4.0, 64))


class TestMultiAxisConformance(_QueryTransform):
    def config(self):
        return config(axes=MultiAxis((2, 1, 1), "interleaved"), scaling=DynamicNTKScaling(2.0, 4))

    def inputs(self, key):
        q, k, info = super().inputs(key)
        axes = jnp.stack([info.positions, info.positions // 2, info.positions % 2], axis=-1)
        return q, k, dataclasses.replace(info, token_values={"rope_positions": axes})


def test_it_has_no_parameters():
    assert config().instantiate(name="rope").initialize(jax.random.key(0)) == {}


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_pairs_turn_as_complex_numbers_do(pairing):
    q, k = random_qk()
    positions = np.array([[0, 1, 2, 3, 4, 5], [3, 7, 100, 2, 0, 1]])
    got = turn(config(pairing=pairing, base=500.0), q, k, positions)
    for x, y in zip((q, k), got, strict=True):
        assert y.dtype == x.dtype
        np.testing.assert_allclose(y, exact(x, positions, 500.0, pairing), atol=2e-5)


def test_interleaved_is_half_with_dims_in_another_order():
    q, k = random_qk()
    order = np.arange(DIM).reshape(2, DIM // 2).T.reshape(-1)  # 0, 4, 1, 5, ...
    half = turn(config(), q, k, rows())
    interleaved = turn(config(pairing="interleaved"), q[..., order], k[..., order], rows())
    for x, y in zip(half, interleaved, strict=True):
        np.testing.assert_array_equal(x[..., order], y)


def test_scores_depend_on_distance_only():
    """Su et al., eq. 16; one kv head serves two query heads."""
    q, k = random_qk()
    scores = []
    for shift in (0, 37, 1000):
        tq, tk = turn(config(), q, k, rows() + shift)
        tk = jnp.repeat(tk, HEADS // KV_HEADS, axis=2)
        scores.append(jnp.einsum("bthd,bshd->bhts", tq, tk))
    np.testing.assert_allclose(scores[1], scores[0], atol=5e-5)
    np.testing.assert_allclose(scores[2], scores[0], atol=1e-3)  # angles of 1,000 rad: 6e-5 each


def test_norms_stay():
    q, k = random_qk()
    for x, y in zip((q, k), turn(config(), q, k, rows() * 91), strict=True):
        np.testing.assert_allclose(
            jnp.linalg.norm(y, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-6
        )


def test_partial_rotary_leaves_the_last_dims():
    q, k = random_qk()
    tq, _ = turn(config(rotary_fraction=0.5), q, k, rows())
    np.testing.assert_array_equal(tq[..., 4:], q[..., 4:])
    np.testing.assert_allclose(tq[..., :4], exact(q[..., :4], rows()), atol=1e-5)


def test_padding_is_not_turned():
    q, k = random_qk()
    positions = rows()
    positions[:, -2:] = -1
    tq, tk = turn(config(scaling=DynamicNTKScaling(2.0, 4)), q, k, positions)
    np.testing.assert_array_equal(tq[:, -2:], q[:, -2:])
    np.testing.assert_array_equal(tk[:, -2:], k[:, -2:])


def test_float32_is_precise_over_1000_positions():
    q, k = random_qk(seq=500, dim=64)
    positions = np.arange(1000).reshape(2, 500)
    got, _ = turn(config(head_dim=64), q, k, positions)
    # An angle of up to 1,000 rad is rounded to 3e-5.
    np.testing.assert_allclose(got, exact(q, positions), atol=2e-4)


def test_bfloat16_loses_only_the_last_rounding_at_large_positions():
    """Positions of 100,000 do not exist in bfloat16; angles are float32 all the same."""
    q, k = random_qk(dtype=jnp.bfloat16)
    positions = rows() * 7 + 100_001
    got, _ = turn(config(base=500_000.0), q, k, positions)
    assert got.dtype == jnp.bfloat16
    wide, _ = turn(config(base=500_000.0), q.astype(jnp.float32), k, positions)
    np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))
    expected = exact(q, positions, 500_000.0)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=2e-2, rtol=2**-8)


def test_text_positions_on_all_axes_are_ordinary_rope():
    q, k = random_qk()
    axes = jnp.repeat(jnp.asarray(rows())[..., None], 3, axis=-1)
    got, _ = turn(
        config(axes=MultiAxis((2, 1, 1))), q, k, rows(), token_values={"rope_positions": axes}
    )
    np.testing.assert_array_equal(got, turn(config(), q, k, rows())[0])


@pytest.mark.parametrize(
    ("layout", "axis_of"), [("blocks", [0, 0, 1, 2]), ("interleaved", [0, 1, 2, 0])]
)
def test_each_frequency_reads_its_axis(layout, axis_of):
    q, k = random_qk()
    axes = np.stack([rows(), rows() * 3, rows() * 5], axis=-1)
    cfg = config(axes=MultiAxis((2, 1, 1), layout, name="thw"))
    got, _ = turn(cfg, q, k, rows(), token_values={"thw": jnp.asarray(axes)})
    for pair, axis in enumerate(axis_of):
        dims = [pair, pair + DIM // 2]
        expected = exact(q, axes[..., axis])
        np.testing.assert_allclose(got[..., dims], expected[..., dims], atol=2e-5)


def test_layer_values_choose_base_rotation_and_scaling():
    q, k = random_qk()
    cfg = config(scaling=LinearScaling(8.0))

    def with_values(**values):
        values = {name: jnp.float32(value) for name, value in values.items()}
        return turn(cfg, q, k, rows(), layer_values=values)[0]

    np.testing.assert_allclose(
        with_values(rope_base=100.0), exact(q, rows(), 100.0, scale=1 / 8), atol=1e-5
    )
    np.testing.assert_allclose(with_values(rope_scaling_enabled=0), exact(q, rows()), atol=1e-5)
    np.testing.assert_array_equal(with_values(rope_enabled=0), q)
    np.testing.assert_array_equal(with_values(rope_enabled=1), with_values(window=5))


def test_bad_configs_are_refused():
    cases = {
        "even number": config(head_dim=7),
        "even number of at least 2": config(rotary_fraction=0.4),
        "rotary_fraction is 1.5": config(rotary_fraction=1.5),
        "base is 0.0": config(base=0.0),
        r"sections \(2, 1\) add up to 3, expected 4": config(axes=MultiAxis((2, 1))),
    }
    for message, cfg in cases.items():
        with pytest.raises(ModuleError, match=message):
            cfg.instantiate(name="rope")


def test_missing_or_misshapen_axis_positions_are_refused():
    q, k = random_qk()
    cfg = config(axes=MultiAxis((2, 1, 1)))
    with pytest.raises(ModuleError, match=r"rope_positions.*\(2, 6, 3\).*no such entry"):
        turn(cfg, q, k, rows())
    with pytest.raises(ModuleError, match=r"got shape \(2, 6\)"):
        turn(cfg, q, k, rows(), token_values={"rope_positions": jnp.asarray(rows())})


def test_a_misspelt_layer_value_is_refused():
    q, k = random_qk()
    with pytest.raises(ModuleError, match="did you mean 'rope_base'"):
        turn(config(), q, k, rows(), layer_values={"rope_bsae": jnp.float32(1e6)})
