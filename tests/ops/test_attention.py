"""Attention against float64 numpy, jax.nn.dot_product_attention and finite differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import axcore.ops._attention._xla as xla
from axcore import ops
from axcore.errors import OpError
from axcore.ops import Causal, DenseKV, Full, PrefixLM, SegmentIds, SlidingWindow, TracedWindow
from axcore.testing import equations


def qkv(b=2, t=9, s=None, n=4, k=2, h=8, v=None, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    s = t if s is None else s
    shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, v or h))
    return [jax.random.normal(key, x).astype(dtype) for key, x in zip(keys, shapes, strict=True)]


def oracle(q, k, v, seen, *, scale=None, cap=None, bias=None, sinks=None):
    """Float64, one row at a time; ``seen`` is (B, T, S) or (T, S) bool."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    b, t, n, h = q.shape
    s, num_kv = k.shape[1:3]
    seen = np.broadcast_to(np.asarray(seen), (b, t, s))
    out = np.zeros((b, t, n, v.shape[-1]))
    for ib, it, i in np.ndindex(b, t, n):
        head = i // (n // num_kv)
        logits = k[ib, :, head] @ q[ib, it, i] * (h**-0.5 if scale is None else scale)
        if cap is not None:
            logits = cap * np.tanh(logits / cap)
        if bias is not None:
            logits = logits + np.broadcast_to(np.asarray(bias, np.float64), (b, n, t, s))[ib, i, it]
        weights = np.where(seen[ib, it], np.exp(logits), 0.0)
        total = weights.sum() + (0.0 if sinks is None else np.exp(float(sinks[i])))
        if total > 0:
            out[ib, it, i] = weights @ v[ib, :, head] / total
    return out


def attend(*arrays, **kwargs):
    """``ops.attention`` as one compiled program."""
    traced = {n: x for n, x in kwargs.items() if isinstance(x, jax.Array)}
    static = {n: x for n, x in kwargs.items() if n not in traced}
    return jax.jit(lambda args, named: ops.attention(*args, **named, **static))(arrays, traced)


@dataclasses.dataclass(frozen=True)
class Ring:
    """A cache's view: keys and values wherever they say they are."""

    kv: DenseKV
    kind = "ring"

    def dense(self):
        return self.kv


def close(got, expected, tolerance=2e-6):
    scale = max(np.abs(expected).max(), 1e-3)
    assert np.abs(np.asarray(got, np.float64) - expected).max() <= tolerance * scale


@pytest.fixture
def small_chunks(monkeypatch):
    """The long-sequence form on short sequences."""
    monkeypatch.setattr(xla, "LONG_SEQUENCE", 8)
    monkeypatch.setattr(xla, "QUERY_CHUNK", 4)
    monkeypatch.setattr(xla, "_MIN_BLOCK", 8)


MASKS = {
    "causal": Causal(),
    "full": Full(),
    "window": Causal() & SlidingWindow(3),
    "two-sided": SlidingWindow(2, 3),
    "prefix": PrefixLM(4),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_matches_float64(mask):
    q, k, v = qkv()
    close(attend(q, k, v, mask=mask), oracle(q, k, v, mask.dense(*[np.arange(9)] * 2)))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_blocks_and_chunks_are_exact(mask, small_chunks):
    q, k, v = qkv(t=27)
    close(attend(q, k, v, mask=mask), oracle(q, k, v, mask.dense(*[np.arange(27)] * 2)))


@given(
    b=st.integers(1, 2),
    t=st.integers(1, 20),
    k=st.sampled_from([1, 2, 3]),
    g=st.sampled_from([1, 2]),
    h=st.sampled_from([1, 4, 5]),
    v=st.sampled_from([1, 4]),
    mask=st.sampled_from(list(MASKS.values())),
    chunked=st.booleans(),
)
@settings(max_examples=6)
def test_any_shape(b, t, k, g, h, v, mask, chunked):
    q, key, value = qkv(b=b, t=t, n=k * g, k=k, h=h, v=v)
    with pytest.MonkeyPatch.context() as patch:
        if chunked:
            patch.setattr(xla, "LONG_SEQUENCE", 4)
            patch.setattr(xla, "QUERY_CHUNK", 3)
            patch.setattr(xla, "_MIN_BLOCK", 5)
        got = attend(q, key, value, mask=mask)
    close(got, oracle(q, key, value, mask.dense(np.arange(t), np.arange(t))))


def test_scale_cap_bias_and_sinks():
    q, k, v = qkv()
    bias = jax.random.normal(jax.random.key(7), (1, 4, 9, 9))
    sinks = jnp.array([-1.0, 0.0, 1.0, 3.0])
    options = {"logit_scale": 0.7, "logit_cap": 1.5}
    got = attend(q, k, v, bias=bias, sinks=sinks, **options)
    seen = np.tril(np.ones((9, 9), bool))
    close(got, oracle(q, k, v, seen, scale=0.7, cap=1.5, bias=bias, sinks=sinks))


@pytest.mark.parametrize("shape", [(1, 1, 27, 27), (2, 4, 27, 27), (2, 1, 1, 27)])
def test_a_bias_is_cut_with_the_blocks(shape, small_chunks):
    q, k, v = qkv(t=27)
    bias = jax.random.normal(jax.random.key(7), shape)
    got = attend(q, k, v, bias=bias)
    close(got, oracle(q, k, v, np.tril(np.ones((27, 27), bool)), bias=bias))


def test_a_bias_may_be_a_function_of_the_positions_in_use():
    def minus_distance(q_positions, kv_positions):
        distance = q_positions[..., :, None] - kv_positions[..., None, :]
        return -jnp.abs(distance).astype(jnp.float32).reshape(-1, 1, *distance.shape[-2:])

    def expected(q_positions, kv_positions):
        return -np.abs(q_positions[..., :, None] - kv_positions[..., None, :])[:, None]

    q, k, v = qkv()
    indices = np.arange(9)[None]
    got = attend(q, k, v, bias=minus_distance)
    seen = np.tril(np.ones((9, 9), bool))
    close(got, oracle(q, k, v, seen, bias=expected(indices, indices)))
    # A cache whose slots run backwards, and rows that are at different places.
    slots, at = np.arange(9)[::-1], np.array([[4, 5], [6, 7]])
    view = Ring(DenseKV(k, v, positions=jnp.asarray(slots)))
    got = attend(q[:, :2], view=view, q_positions=jnp.asarray(at), bias=minus_distance)
    seen = at[:, :, None] >= slots
    close(got, oracle(q[:, :2], k, v, seen, bias=expected(at, slots[None])))


def test_a_scale_may_be_traced():
    q, k, v = qkv()
    got = jax.jit(lambda scale: ops.attention(q, k, v, logit_scale=scale))(0.3)
    close(got, oracle(q, k, v, np.tril(np.ones((9, 9), bool)), scale=0.3))


@pytest.mark.parametrize("chunked", [False, True])
def test_segments_equal_separate_sequences(chunked, request):
    if chunked:
        request.getfixturevalue("small_chunks")
    q, k, v = qkv(b=1, t=27)
    ids = jnp.array([[1] * 10 + [2] * 12 + [0] * 5])
    got = attend(q, k, v, mask=Causal() & SegmentIds(), q_segment_ids=ids)
    for lo, hi in ((0, 10), (10, 22)):
        alone = attend(*(x[:, lo:hi] for x in (q, k, v)))
        np.testing.assert_allclose(got[:, lo:hi], alone, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[:, 22:], 0.0)


def test_a_window_may_be_traced():
    q, k, v = qkv()
    mask = Causal() & TracedWindow()
    got = jax.jit(lambda w: ops.attention(q, k, v, mask=mask, window=w))(2)
    static = attend(q, k, v, mask=Causal() & SlidingWindow(2))
    np.testing.assert_allclose(got, static, rtol=1e-6, atol=1e-6)


def test_prefix_lengths_differ_by_example():
    q, k, v = qkv()
    mask, lengths = PrefixLM(), jnp.array([0, 5])
    got = attend(q, k, v, mask=mask, prefix_lengths=lengths)
    arrays = ops.MaskArrays(prefix_lengths=np.asarray(lengths))
    close(got, oracle(q, k, v, mask.dense(np.arange(9), np.arange(9), arrays)))


@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_that_see_nothing_give_zeros_and_no_gradient(with_bias):
    q, k, v = qkv(b=1, t=4)
    ids = jnp.array([[1, 1, 0, 0]])

    def masked(q, k, v):
        if with_bias:
            bias = jnp.where(jnp.arange(4) < 2, 0.0, -jnp.inf)[None, None, :, None]
            return ops.attention(q, k, v, mask=Full(), bias=jnp.broadcast_to(bias, (1, 1, 4, 4)))
        return ops.attention(q, k, v, mask=SegmentIds(), q_segment_ids=ids)

    np.testing.assert_array_equal(jax.jit(masked)(q, k, v)[:, 2:], 0.0)
    grads = jax.jit(jax.grad(lambda *x: jnp.sum(jnp.sin(masked(*x))), (0, 1, 2)))(q, k, v)
    assert all(jnp.isfinite(g).all() for g in grads)
    np.testing.assert_array_equal(grads[0][:, 2:], 0.0)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_gradients_match_finite_differences(mask, chunked, request):
    if chunked:
        request.getfixturevalue("small_chunks")
    q, k, v = qkv(b=1, t=13, n=2, k=1, h=3)
    sinks = jnp.array([0.3, -0.2])

    @jax.jit
    def capped(q, k, v, sinks):
        return ops.attention(q, k, v, mask=mask, sinks=sinks, logit_cap=2.0)

    check_grads(capped, (q, k, v, sinks), order=1, modes=["rev"], rtol=2e-2, atol=2e-2)


@pytest.mark.oracle
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_values_and_gradients_match_jax_nn(window):
    q, k, v = qkv(t=33, n=6, k=3)
    mask = Causal() if window is None else Causal() & SlidingWindow(window[0])

    def ours(*x):
        return ops.attention(*x, mask=mask)

    def theirs(*x):
        return jax.nn.dot_product_attention(*x, is_causal=True, local_window_size=window)

    for fn in (lambda f: f, lambda f: jax.grad(lambda *x: jnp.sum(jnp.cos(f(*x))), (0, 1, 2))):
        got, expected = jax.jit(fn(ours))(q, k, v), jax.jit(fn(theirs))(q, k, v)
        jax.tree.map(lambda a, b: close(a, np.asarray(b), 5e-6), got, expected)


def test_softmax_is_float32_in_bfloat16():
    q, k, v = qkv(t=64, dtype=jnp.bfloat16)
    got = attend(q, k, v)
    assert got.dtype == jnp.bfloat16
    # bfloat16 keeps 8 bits: probabilities and result are rounded once each.
    close(got, oracle(q, k, v, np.tril(np.ones((64, 64), bool))), tolerance=2**-7)


def test_large_logits_stay_finite():
    q, k, v = qkv()
    q = q * 1e4
    close(attend(q, k, v), _hard(q, k, v), tolerance=1e-5)


def _hard(q, k, v):
    """The limit of large logits: the best key's value."""
    out = np.zeros(q.shape)
    logits = np.einsum("btnh,bsnh->bnts", np.float64(q), np.repeat(np.float64(k), 2, axis=2))
    logits = np.where(np.tril(np.ones((9, 9), bool)), logits, -np.inf)
    best = logits.argmax(-1)
    for b, t, n in np.ndindex(*q.shape[:3]):
        out[b, t, n] = v[b, best[b, n, t], n // 2]
    return out


def test_is_deterministic():
    q, k, v = qkv(t=40)
    step = jax.jit(jax.grad(lambda *x: jnp.sum(ops.attention(*x) ** 2), (0, 1, 2)))
    jax.tree.map(np.testing.assert_array_equal, step(q, k, v), step(q, k, v))


def test_decode_equals_the_rows_of_the_whole():
    q, k, v = qkv(t=10)
    whole = attend(q, k, v)
    positions = jnp.array([[4], [9]])
    row = jnp.take_along_axis(q, positions[..., None, None], axis=1)
    valid = jnp.arange(10) <= positions
    got = attend(row, k, v, q_positions=positions, kv_valid=valid, purpose="decode")
    expected = jnp.take_along_axis(whole, positions[..., None, None], axis=1)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_kv_positions_say_where_keys_are():
    q, k, v = qkv(t=6)
    order = jnp.array([3, 0, 5, 1, 4, 2])
    indices = jnp.arange(6)
    got = attend(q, k[:, order], v[:, order], q_positions=indices, kv_positions=order)
    np.testing.assert_allclose(got, attend(q, k, v), rtol=1e-5, atol=1e-6)


def test_a_cache_view_is_taken_as_it_is():
    q, k, v = qkv(t=6)
    order = jnp.array([3, 0, 5, 1, 4, 2])
    view = Ring(DenseKV(k[:, order], v[:, order], positions=order))
    with ops.record_choices() as choices:
        got = ops.attention(q, view=view, q_positions=jnp.arange(6), purpose="decode")
    np.testing.assert_allclose(got, attend(q, k, v), rtol=1e-5, atol=1e-6)
    assert (choices[0].call.view, choices[0].call.purpose) == ("ring", "decode")


def test_both_contractions_can_be_replaced():
    q, k, v = qkv()
    seen = []

    def counted(name, factor):
        def dot(lhs, rhs, dims, preferred_element_type=None):
            seen.append(name)
            return factor * jax.lax.dot_general(
                lhs, rhs, dims, preferred_element_type=preferred_element_type
            )

        return dot

    got = ops.attention(
        q, k, v, qk_dot_general=counted("qk", 0.5), pv_dot_general=counted("pv", 2.0)
    )
    expected = 2.0 * attend(q, k, v, logit_scale=0.5 * 8**-0.5)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert seen == ["qk", "pv"]


def long_dims(fn, *args, size):
    """The most dims of at least ``size`` that one value of the program has."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    found = 0
    for eqn in equations(jaxpr):
        for var in eqn.outvars:
            dims = sorted(d for d in var.aval.shape if d >= size)
            found = max(found, len(dims))
    return found


@pytest.mark.parametrize("mask", [Causal(), Full(), Causal() & SegmentIds()])
def test_no_square_buffer_exists_for_long_sequences(mask):
    t = 2 * xla.LONG_SEQUENCE
    q = jax.ShapeDtypeStruct((1, t, 2, 8), jnp.float32)
    k = jax.ShapeDtypeStruct((1, t, 1, 8), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, t), jnp.int32)

    def loss(q, k, v, ids):
        return jnp.sum(ops.attention(q, k, v, mask=mask, q_segment_ids=ids))

    step = jax.grad(loss, (0, 1, 2))
    assert long_dims(step, q, k, k, ids, size=xla.QUERY_CHUNK + 1) == 1
    # The check itself sees a square buffer where there is one.
    naive = lambda q, k: jnp.einsum("btnh,bskh->bnts", q, k)  # noqa: E731
    assert long_dims(naive, q, k, size=xla.QUERY_CHUNK + 1) == 2


def test_compiled_memory_grows_with_the_chunk_and_not_with_the_square():
    t = 4 * xla.LONG_SEQUENCE
    q = jax.ShapeDtypeStruct((1, t, 2, 8), jnp.float32)
    k = jax.ShapeDtypeStruct((1, t, 1, 8), jnp.float32)
    step = jax.jit(jax.grad(lambda q, k, v: jnp.sum(ops.attention(q, k, v)), (0, 1, 2)))
    memory = step.lower(q, k, k).compile().memory_analysis()
    square_bytes = 4 * 2 * t * t
    assert memory.temp_size_in_bytes < square_bytes / 2


def test_at_32k_tokens_all_of_the_contract_needs_a_twentieth_of_the_square():
    """Window, packed documents, groups of heads, soft cap, sinks and a traced scale, backward."""
    t, heads = 32768, 2
    q = jax.ShapeDtypeStruct((1, t, heads, 8), jnp.float32)
    k = jax.ShapeDtypeStruct((1, t, 1, 8), jnp.float32)
    ids, sinks = jax.ShapeDtypeStruct((1, t), jnp.int32), jax.ShapeDtypeStruct((heads,), "float32")
    mask = Causal() & SlidingWindow(left=4096) & SegmentIds()

    def loss(q, k, v, ids, sinks, scale):
        options = {"logit_scale": scale, "logit_cap": 30.0, "sinks": sinks, "q_segment_ids": ids}
        return jnp.sum(ops.attention(q, k, v, mask=mask, **options))

    step = jax.jit(jax.grad(loss, (0, 1, 2, 4, 5)))
    memory = step.lower(q, k, k, ids, sinks, 0.3).compile().memory_analysis()
    # A chunk of 512 queries has a 64th of the logits, of which the backward pass holds two copies.
    assert memory.temp_size_in_bytes < 4 * heads * t * t / 20


def test_causal_blocks_skip_what_lies_above_the_diagonal():
    args = [jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.float32)] * 3

    def flops(mask):
        compiled = jax.jit(lambda q, k, v: ops.attention(q, k, v, mask=mask)).lower(*args).compile()
        return compiled.cost_analysis()["flops"]

    assert flops(Causal()) < 0.66 * flops(Full())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 9, 3, 8)}, "divisible by K"),
        ({"v": (2, 8, 2, 8)}, r"expected k \(B, S, K, H\)"),
        ({"q": (2, 9, 8)}, "expected rank 4"),
        ({"q": (2, 3, 4, 8)}, "3 queries and 9 keys .* no q_positions"),
        ({"bias": (4, 9, 9)}, "expected rank 4, broadcastable"),
        ({"sinks": (2,)}, r"sinks \(2,\): expected \(4,\)"),
        ({"mask": SegmentIds()}, "without q_segment_ids, kv_segment_ids"),
        ({"mask": PrefixLM()}, "without prefix_lengths"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    shapes = {"q": (2, 9, 4, 8), "k": (2, 9, 2, 8), "v": (2, 9, 2, 8)} | change
    kwargs = {n: jnp.zeros(x) if isinstance(x, tuple) else x for n, x in shapes.items()}
    with pytest.raises(OpError, match=message):
        ops.attention(**kwargs)


def test_keys_are_given_once():
    q, k, v = qkv()
    with pytest.raises(OpError, match="needs k and v, or a view"):
        ops.attention(q)
    with pytest.raises(OpError, match="both k, v and a view"):
        ops.attention(q, k, v, view=DenseKV(k, v))
