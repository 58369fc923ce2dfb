"""Rotary positions applied to queries and keys: pairs of dims turned by given angles."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from axcore.errors import OpError
from axcore.ops._select import Operand, dispatch

__all__ = ["rotary", "rotary_xla"]

Pairing = Literal["half", "interleaved"]
_PAIRINGS = ("half", "interleaved")


def rotary(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    cos: Float[Array, "#B T P"],
    sin: Float[Array, "#B T P"],
    *,
    pairing: Pairing = "half",
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
    r"""Turns pairs of dims of every query and key by the angle of its position.

    .. math::
        a' = a \cos t - b \sin t, \qquad b' = b \cos t + a \sin t

    for each pair :math:`(a, b)` of the first 2P dims; the rest passes as it is (partial rotary).
    A factor on queries and keys (YaRN) belongs into ``cos`` and ``sin``.

    Args:
        q: Queries, (B, T, N, H).
        k: Keys, (B, T, K, H), in q's dtype.
        cos: Cosines, (B, T, P) or (1, T, P) float32, of at most H / 2 angles.
        sin: Sines, the same shape.
        pairing: ``half`` pairs dims i and i + P (Llama, NeoX); ``interleaved`` 2i and 2i + 1 (the
            paper, GPT-J).
        implementation: Forces a kernel by name.

    Returns:
        q and k, turned, in their dtype; products are float32.

    Raises:
        OpError: Shapes do not fit, the pairing is unknown, or no acceptable kernel serves the call.

    References:
        arXiv:2104.09864.
    """
    _check(q, k, cos, sin, pairing)
    angles = ("batch", "seq", None)
    q_axes = ("batch", "seq", "heads", "head_dim")
    k_axes = ("batch", "seq", "kv_heads", "head_dim")
    return dispatch(
        "rotary",
        {
            "q": Operand(q, q_axes),
            "k": Operand(k, k_axes),
            "cos": Operand(cos, angles),
            "sin": Operand(sin, angles),
        },
        output_axes=(q_axes, k_axes),
        static={"pairing": pairing},
        options={"pairing": pairing},
        implementation=implementation,
    )


def rotary_xla(
    q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, *, pairing: Pairing = "half"
) -> tuple[jax.Array, jax.Array]:
    """Reference of :func:`rotary`."""
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return _turn(q, cos, sin, pairing), _turn(k, cos, sin, pairing)


def _turn(x: jax.Array, cos: jax.Array, sin: jax.Array, pairing: Pairing) -> jax.Array:
    """Turns the first dims of (b, t, n, h)."""
    dim = 2 * cos.shape[-1]
    wide = x[..., :dim].astype(jnp.float32 if x.dtype.itemsize < 4 else x.dtype)
    cos, sin = cos.astype(wide.dtype), sin.astype(wide.dtype)
    if pairing == "half":
        a, b = wide[..., : dim // 2], wide[..., dim // 2 :]
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    else:
        a, b = wide[..., 0::2], wide[..., 1::2]
        pairs = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1)
        turned = pairs.reshape(wide.shape)
    turned = turned.astype(x.dtype)
    if dim == x.shape[-1]:
        return turned
    return jnp.concatenate([turned, x[..., dim:]], axis=-1)


def _check(q: jax.Array, k: jax.Array, cos: jax.Array, sin: jax.Array, pairing: str) -> None:
    """Raises OpError unless the shapes fit."""
    if pairing not in _PAIRINGS:
        raise OpError(
            f"rotary got pairing {pairing!r}: expected one of {', '.join(_PAIRINGS)}", code="AX412"
        )
    fits = (
        q.ndim == k.ndim == 4
        and (*q.shape[:2], q.shape[3]) == (*k.shape[:2], k.shape[3])
        and cos.ndim == 3
        and cos.shape == sin.shape
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1] == q.shape[1]
        and 0 < 2 * cos.shape[2] <= q.shape[3]
    )
    if not fits:
        raise OpError(
            f"rotary got q {q.shape}, k {k.shape}, cos {cos.shape}, sin {sin.shape}: expected"
            " (B, T, N, H), (B, T, K, H) and twice (B or 1, T, P) with 2P <= H",
            code="AX412",
        )
