import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

from axcore import ops
from axcore.errors import OpError
from axcore.parallel.cost import count_function

E, K, N, M = 3, 4, 5, 11
ROWS = jax.random.normal(jax.random.key(0), (M, K))
WEIGHTS = jax.random.normal(jax.random.key(1), (E, K, N))


def oracle(rows, weights, sizes):
    out, start = np.zeros((M, N)), 0
    for weight, size in zip(np.asarray(weights, np.float64), sizes, strict=True):
        stop = start + size
        out[start:stop] = np.asarray(rows, np.float64)[start:stop] @ weight
        start = stop
    return out


@given(cuts=st.lists(st.integers(0, M), min_size=E, max_size=E).map(sorted))
@settings(max_examples=20)
def test_each_group_has_its_matrix_and_the_rest_is_zero(cuts):
    sizes = np.diff([0, *cuts]).astype(np.int32)
    got = jax.jit(ops.grouped_matmul)(ROWS, WEIGHTS, jnp.asarray(sizes))
    np.testing.assert_allclose(got, oracle(ROWS, WEIGHTS, sizes), rtol=1e-5, atol=1e-5)


def test_gradients_match_finite_differences():
    sizes = jnp.array([4, 0, 5])
    check_grads(
        jax.jit(lambda r, w: ops.grouped_matmul(r, w, sizes)),
        (ROWS, WEIGHTS),
        order=1,
        modes=["rev"],
        rtol=1e-2,
        atol=1e-2,
    )


def test_a_group_has_no_part_in_what_goes_wrong_in_the_rows_after_it():
    sizes = jnp.array([4, 0, 5])
    _, pull = jax.vjp(lambda r, w: ops.grouped_matmul(r, w, sizes), ROWS, WEIGHTS)
    past_all = jnp.ones((M, N)).at[9:].set(jnp.nan)
    assert all(jnp.isfinite(grad).all() for grad in pull(past_all))
    of_the_last = jnp.ones((M, N)).at[4].set(jnp.nan)
    d_rows, d_weights = pull(of_the_last)
    np.testing.assert_array_equal(jnp.isnan(d_rows).any(1), jnp.arange(M) == 4)
    np.testing.assert_array_equal(jnp.isnan(d_weights).any((1, 2)), [False, False, True])


def test_sums_are_float32_in_bfloat16():
    k = 512
    rows = jnp.ones((2, k), jnp.bfloat16)
    weights = jnp.ones((1, k, 1), jnp.bfloat16)
    got = ops.grouped_matmul(rows, weights, jnp.array([2]))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, k)  # bfloat16 sums stop at 256
    wide = ops.grouped_matmul(rows, weights, jnp.array([2]), preferred_element_type="float32")
    assert wide.dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_weights_of_fewer_bits_are_widened_and_rows_have_a_gradient(dtype):
    sizes = np.array([4, 0, 5], np.int32)
    narrow = (8 * WEIGHTS).astype(dtype)

    def product(rows):
        return ops.grouped_matmul(rows, narrow, jnp.asarray(sizes))

    got, pull = jax.vjp(jax.jit(product), ROWS)
    wide = np.asarray(narrow, np.float64)
    np.testing.assert_allclose(got, oracle(ROWS, wide, sizes), rtol=1e-5, atol=1e-4)
    (d_rows,) = pull(jnp.ones((M, N)))
    of_row = np.repeat(np.arange(E), sizes)
    np.testing.assert_allclose(d_rows[: len(of_row)], wide.sum(2)[of_row], rtol=1e-5, atol=1e-4)


def test_what_does_not_fit_is_refused():
    with pytest.raises(OpError, match=r"expected \(M, K\), \(E, K, N\), \(E,\)"):
        ops.grouped_matmul(ROWS, WEIGHTS, jnp.array([1, 2]))


@pytest.mark.parametrize("num_groups", [4, 64])
def test_work_on_a_cpu_does_not_grow_with_the_number_of_groups(num_groups):
    rows, weights = jnp.ones((256, 16)), jnp.ones((num_groups, 16, 8))
    sizes = jnp.full((num_groups,), 256 // num_groups, jnp.int32)
    cost = count_function(lambda r, w: ops.grouped_matmul(r, w, sizes), rows, weights)
    # Each group's last tile may be half empty, and one tile a group may not be needed.
    assert cost.matmul_flops <= 2 * 2 * 256 * 16 * 8 + num_groups * 8 * 2 * 16 * 8
