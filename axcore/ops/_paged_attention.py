"""Attention of one new token a row over keys and values that lie in pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from axcore.errors import OpError
from axcore.ops._select import Operand, dispatch

__all__ = ["paged_attention", "paged_attention_xla"]

#: Keys that the reference looks at in one step; it never holds more than these of each row.
_KEYS_PER_STEP = 512


def paged_attention(
    q: Float[Array, "B N H"],
    k_pages: Float[Array, "K P page H"],
    v_pages: Float[Array, "K P page V"],
    lengths: Int[Array, " B"],
    page_table: Int[Array, "B M"],
    *,
    logit_scale: float | None = None,
    logit_cap: float | None = None,
    window: int | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B N V"]:
    r"""Decodes: attention of one query a row over the tokens that its pages hold.

    Row b has ``lengths[b]`` tokens, the query's own among them; token j lies in slot ``j % page``
    of page ``page_table[b, j // page]``. The query is the last of them, at position
    ``lengths[b] - 1``. The maths is that of :func:`axcore.ops.attention`; query head n reads
    key/value head ``n // (N / K)``.

    Args:
        q: Queries, (B, N, H).
        k_pages: Keys of all pages, (K, P, page_size, H); heads come first, as kernels read them.
        v_pages: Values, (K, P, page_size, V).
        lengths: (B,) int32 tokens of each row; a row of 0 gives zeros.
        page_table: (B, M) int32 page of each ``page_size`` tokens; entries past a row's length are
            never looked at and may hold anything.
        logit_scale: Defaults to ``H ** -0.5``.
        logit_cap: Soft cap on scaled logits: ``cap * tanh(logit / cap)``.
        window: Earlier tokens seen besides the query's own, as ``SlidingWindow(left=window)``;
            None sees all.
        sinks: (N,) logit per head that joins the denominator only.
        implementation: Forces a kernel by name.

    Returns:
        (B, N, V) in q's dtype. Logits, softmax and sums are float32. It has no gradient.

    Raises:
        OpError: Shapes do not fit, or no acceptable kernel serves the call.

    References:
        PagedAttention, arXiv:2309.06180.
    """
    _check(q, k_pages, v_pages, lengths, page_table, sinks, window)
    if logit_scale is None:
        logit_scale = float(q.shape[-1]) ** -0.5
    pages = ("kv_heads", None, None, "head_dim")
    return dispatch(
        "paged_attention",
        {
            "q": Operand(q, ("batch", "heads", "head_dim")),
            "k_pages": Operand(k_pages, pages),
            "v_pages": Operand(v_pages, pages),
            "lengths": Operand(lengths, ("batch",)),
            "page_table": Operand(page_table, ("batch", None)),
            "sinks": Operand(sinks, ("heads",)),
        },
        output_axes=("batch", "heads", "head_dim"),
        static={"logit_scale": logit_scale, "logit_cap": logit_cap, "window": window},
        options={"logit_scale": logit_scale, "logit_cap": logit_cap, "window": window},
        purpose="decode",
        implementation=implementation,
    )


def paged_attention_xla(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    page_table: jax.Array,
    sinks: jax.Array | None = None,
    *,
    logit_scale: float,
    logit_cap: float | None = None,
    window: int | None = None,
) -> jax.Array:
    """Reference of :func:`paged_attention`: a running softmax over a few pages at a time.

    It stops after the longest row's last page, so the time follows the tokens that there are.
    """
    b, n, h = q.shape
    num_kv, _, page_size, v_dim = v_pages.shape
    g, m = n // num_kv, page_table.shape[1]
    num = min(max(_KEYS_PER_STEP // page_size, 1), m)  # pages in a step
    table = jnp.pad(page_table, ((0, 0), (0, -m % num)))
    q_bkgh = q.reshape(b, num_kv, g, h)
    s = num * page_size
    first = jnp.zeros_like(lengths) if window is None else lengths - 1 - window

    def step(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        peak, total, out = carry
        which = lax.dynamic_slice_in_dim(table, i * num, num, axis=1)  # (b, num)
        k, v = (
            # Entries beyond a row's length may point anywhere; what they give is masked below.
            jnp.take(x, which, axis=1, mode="clip").reshape(num_kv, b, s, x.shape[-1])
            for x in (k_pages, v_pages)
        )
        logits = logit_scale * jnp.einsum(
            "bkgh,kbsh->bkgs", q_bkgh, k, preferred_element_type=jnp.float32
        )
        if logit_cap is not None:
            logits = logit_cap * jnp.tanh(logits / logit_cap)
        tokens = i * s + jnp.arange(s, dtype=lengths.dtype)
        seen = (tokens < lengths[:, None]) & (tokens >= first[:, None])
        logits = jnp.where(seen[:, None, None, :], logits, -jnp.inf)
        highest = jnp.maximum(peak, jnp.max(logits, axis=-1, keepdims=True))
        base = jnp.where(highest == -jnp.inf, 0.0, highest)  # nothing seen yet
        weights = jnp.exp(logits - base)
        shrink = jnp.exp(peak - base)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        # A page that was never written may hold anything, NaN too: 0 * NaN is not 0.
        v = jnp.where(seen[None, :, :, None], v, jnp.zeros((), v.dtype))
        values = jnp.einsum(
            "bkgs,kbsv->bkgv", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return highest, total, out * shrink + values

    shape = (b, num_kv, g, 1)
    if sinks is None:
        peak, total = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
    else:
        peak = jnp.broadcast_to(sinks.astype(jnp.float32).reshape(1, num_kv, g, 1), shape)
        total = jnp.ones(shape, jnp.float32)
    out = jnp.zeros((b, num_kv, g, v_dim), jnp.float32)
    num_steps = -(-jnp.max(lengths, initial=0) // s)
    start = jnp.zeros_like(num_steps)
    if window is not None:  # no row looks at what lies before every row's window
        start = jnp.maximum(jnp.min(first, initial=jnp.iinfo(first.dtype).max) // s, 0)
    _, total, out = lax.fori_loop(start, num_steps, step, (peak, total, out))
    out = out / jnp.where(total == 0.0, 1.0, total)
    return out.reshape(b, n, v_dim).astype(q.dtype)


def _check(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    page_table: jax.Array,
    sinks: jax.Array | None,
    window: int | None,
) -> None:
    """Raises OpError unless the shapes fit."""
    fits = (
        q.ndim == 3
        and k_pages.ndim == v_pages.ndim == 4
        and k_pages.shape[:3] == v_pages.shape[:3]
        and k_pages.shape[3] == q.shape[2]
        and q.shape[1] % k_pages.shape[0] == 0
        and lengths.shape == q.shape[:1]
        and page_table.ndim == 2
        and page_table.shape[0] == q.shape[0]
        and (sinks is None or sinks.shape == q.shape[1:2])
    )
    if not fits:
        raise OpError(
            f"paged_attention got q {q.shape}, k_pages {k_pages.shape}, v_pages {v_pages.shape},"
            f" lengths {lengths.shape}, page_table {page_table.shape}"
            f"{'' if sinks is None else f', sinks {sinks.shape}'}: expected (B, N, H),"
            " (K, P, page_size, H), (K, P, page_size, V), (B,), (B, M) and (N,), with N divisible"
            " by K",
            code="AX413",
        )
    if window is not None and window < 0:
        raise OpError(
            f"paged_attention got window={window}: expected >= 0 tokens or None", code="AX413"
        )
