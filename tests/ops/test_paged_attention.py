"""Paged attention equals attention over the same tokens in order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore import ops
from axcore.errors import OpError
from axcore.ops import Causal, SlidingWindow
from axcore.ops import _paged_attention as paged

PAGE, NUM_PAGES, COLUMNS = 4, 16, 5
LENGTHS = (0, 7, 20)


@pytest.fixture(scope="module")
def call():
    """q, pages and a table of pages in no order; slots that no row owns are NaN."""
    rng = np.random.default_rng(0)
    table = rng.permutation(NUM_PAGES)[: 3 * COLUMNS].reshape(3, COLUMNS)
    q = rng.normal(size=(3, 4, 8)).astype("float32")
    k, v = (np.full((2, NUM_PAGES, PAGE, n), np.nan, "float32") for n in (8, 6))
    for row, length in enumerate(LENGTHS):
        for token in range(length):
            at = (slice(None), table[row, token // PAGE], token % PAGE)
            k[at], v[at] = rng.normal(size=(2, 8)), rng.normal(size=(2, 6))
    table[1, 2:] = 10_000  # past row 1's tokens: may hold anything
    arrays = (q, k, v, np.array(LENGTHS, "int32"), table.astype("int32"))
    return tuple(jnp.asarray(x) for x in arrays)


def expected(call, window=None, **options):
    q, k, v, lengths, table = call
    rows = []
    for row, length in enumerate(LENGTHS):
        which = np.asarray(table)[row, : -(-length // PAGE)]
        kv = [np.asarray(x)[:, which].reshape(2, -1, x.shape[-1])[:, :length] for x in (k, v)]
        kv = [jnp.asarray(x.swapaxes(0, 1)[None]) for x in kv]
        mask = Causal() if window is None else Causal() & SlidingWindow(left=window)
        at = lengths[row : row + 1] - 1
        rows.append(ops.attention(q[row][None, None], *kv, mask=mask, q_positions=at, **options))
    return jnp.concatenate(rows)[:, 0]


@pytest.mark.parametrize(
    "options",
    [{}, {"logit_cap": 1.5, "logit_scale": 0.5}, {"window": 2}, {"sinks": True}],
    ids=["plain", "cap", "window", "sinks"],
)
def test_it_equals_attention_over_the_tokens_in_order(call, options, monkeypatch):
    monkeypatch.setattr(paged, "_KEYS_PER_STEP", 2 * PAGE)  # several steps, the last one short
    if "sinks" in options:
        options = {"sinks": jnp.linspace(-1.0, 2.0, 4)}
    got = jax.jit(lambda *arrays: ops.paged_attention(*arrays, **options))(*call)
    assert not np.asarray(got[0]).any()  # a row without tokens
    # float32 sums in another order
    np.testing.assert_allclose(got, expected(call, **options), atol=2e-6)


def test_no_buffer_grows_with_the_table(call):
    q, k, v, lengths, _ = call
    table = jnp.zeros((3, 4096), jnp.int32)  # room for 16,384 tokens of each row
    text = jax.jit(ops.paged_attention).lower(q, k, v, lengths, table).as_text()
    assert f"{4096 * PAGE}x" not in text and f"x{4096 * PAGE}" not in text


def test_shapes_are_checked(call):
    q, k, v, lengths, table = call
    with pytest.raises(OpError, match="N divisible by K"):
        ops.paged_attention(q[:, :3], k, v, lengths, table)
    with pytest.raises(OpError, match=r"window=-1.*AX413"):
        ops.paged_attention(q, k, v, lengths, table, window=-1)
