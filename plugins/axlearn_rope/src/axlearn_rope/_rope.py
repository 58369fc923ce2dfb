"""RoPE: rotary position embedding as a query/key transform of attention."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from axcore import ops
from axcore.errors import ModuleError, did_you_mean
from axcore.layers import BaseQueryKeyTransform, SequenceInfo
from axlearn_rope._axes import MultiAxis
from axlearn_rope._scaling import RoPEScaling, rotary_frequencies

__all__ = ["RoPE"]

_LAYER_VALUES = ("rope_base", "rope_enabled", "rope_scaling_enabled")


class RoPE(BaseQueryKeyTransform):
    r"""Rotary position embedding (Su et al., arXiv:2104.09864, eq. 15 and 34).

    Pair ``i`` of the rotated dims of every query and key, ``(a, b)``, is turned by the angle
    ``t = position * f_i``, ``f_i = base^(-2i / rotary_dim)``::

        a' = a cos t - b sin t        b' = a sin t + b cos t

    so that the score of a query and a key depends on the distance of their positions only. It has
    no parameters. Angles are float32 whatever the compute dtype; the output has its input's dtype.

    Positions are ``info.positions``, which restart in each packed document and go on in cached
    decode; negative ones are padding and are not turned.

    Entries of ``info.layer_values`` let the layers of one scanned stack differ:

    - ``rope_base``: the base of this layer, in place of ``base`` (Gemma 3: 10,000 in local and
      1,000,000 in global layers, arXiv:2503.19786);
    - ``rope_enabled``: 0 leaves queries and keys of this layer as they are (NoPE; Kazemnejad et
      al., arXiv:2305.19466), anything else turns them;
    - ``rope_scaling_enabled``: 0 leaves ``scaling`` out in this layer.

    Example:
        >>> from axcore.layers import Attention
        >>> Attention.Config(query_key_transform=RoPE.Config(base=500_000.0))
    """

    class Config(BaseQueryKeyTransform.Config):
        """The attention layer sets ``head_dim``."""

        # Longest wavelength over 2 pi, about, in tokens.
        base: float = 10_000.0
        # Which dims form a pair: (i, i + rotary_dim / 2) as in Llama, NeoX and Hugging Face's
        # files, or the adjacent (2 i, 2 i + 1) as in the paper, GPT-J and Meta's files.
        pairing: Literal["half", "interleaved"] = "half"
        # Share of head_dim that is rotated, its first int(share * head_dim) dims (GPT-NeoX).
        rotary_fraction: float = 1.0
        # For contexts longer than those trained on.
        scaling: RoPEScaling | None = None
        # Several position axes (images, video); None: info.positions.
        axes: MultiAxis | None = None

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        where = self.config_path or self.path
        if not 0 < cfg.rotary_fraction <= 1:
            raise ModuleError(
                f"rotary_fraction is {cfg.rotary_fraction}, expected above 0 and at most 1",
                code="AX381",
                where=where,
                hint="for no rotation at all set query_key_transform to None",
            )
        self._dim = int(cfg.head_dim * cfg.rotary_fraction)
        if self._dim < 2 or self._dim % 2:
            share = "" if cfg.rotary_fraction == 1 else f" ({cfg.rotary_fraction} of them rotated)"
            raise ModuleError(
                f"head_dim {cfg.head_dim}{share} gives {self._dim} rotated dims, expected an even "
                "number of at least 2",
                code="AX381",
                where=where,
                hint="dims are turned in pairs: change head_dim or rotary_fraction",
            )
        if not (cfg.base > 1 and math.isfinite(cfg.base)):
            raise ModuleError(
                f"base is {cfg.base}, expected a finite number above 1", code="AX381", where=where
            )
        if cfg.scaling is not None:
            cfg.scaling.check(self._dim)
        if cfg.axes is not None and sum(cfg.axes.sections) != self._dim // 2:
            sections = cfg.axes.sections
            raise ModuleError(
                f"sections {sections} add up to {sum(sections)}, expected {self._dim // 2}: half "
                f"of the {self._dim} rotated dims",
                code="AX382",
                where=where,
            )

    def forward(
        self, q: jax.Array, k: jax.Array, info: SequenceInfo
    ) -> tuple[jax.Array, jax.Array]:
        """Turns q (batch, seq, heads, head_dim) and k (batch, seq, kv_heads, head_dim)."""
        for name in info.layer_values:
            if name.startswith("rope_") and name not in _LAYER_VALUES:
                raise ModuleError(
                    f"layer_values has {name!r}, which RoPE does not know",
                    code="AX384",
                    where=self.path,
                    hint=did_you_mean(name, _LAYER_VALUES)
                    or f"it reads {', '.join(_LAYER_VALUES)}",
                )
        cos, sin = self._cos_sin(info)
        return ops.rotary(q, k, cos, sin, pairing=self.cfg.pairing)

    def _cos_sin(self, info: SequenceInfo) -> tuple[jax.Array, jax.Array]:
        """Returns cosines and sines, float32 (batch, seq, rotary_dim / 2)."""
        positions = self._positions(info)
        frequencies, factor = self._frequencies(info, jnp.max(positions, axis=-1))
        angles = positions.astype(jnp.float32) * frequencies
        cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
        enabled = info.layer_values.get("rope_enabled")
        if enabled is not None:
            cos, sin = jnp.where(enabled != 0, cos, 1.0), jnp.where(enabled != 0, sin, 0.0)
        return cos, sin

    def _positions(self, info: SequenceInfo) -> jax.Array:
        """Returns the position that each frequency reads: int (batch, seq, 1 or rotary_dim / 2)."""
        axes = self.cfg.axes
        if axes is None:
            return jnp.maximum(info.positions, 0)[:, :, None]
        positions = info.token_values.get(axes.name)
        expected = (*info.positions.shape, len(axes.sections))
        if positions is None or positions.shape != expected:
            has = f"shape {positions.shape}" if positions is not None else "no such entry"
            raise ModuleError(
                f"token_values[{axes.name!r}] must hold positions of shape {expected} (batch, seq, "
                f"axes), got {has}",
                code="AX383",
                where=self.path,
                hint="pass them to the model; a text token has the same position on every axis",
            )
        return jnp.take(jnp.maximum(positions, 0), np.array(axes.axis_of_frequency()), axis=-1)

    def _frequencies(self, info: SequenceInfo, positions: jax.Array) -> tuple[Any, Any]:
        """Returns float32 frequencies that broadcast with (batch, seq, dim / 2), and the factor."""
        base, scaling = info.layer_values.get("rope_base", self.cfg.base), self.cfg.scaling
        plain = jnp.asarray(rotary_frequencies(base, self._dim), jnp.float32)
        if scaling is None:
            return plain, 1.0
        length = _lengths(positions, info.segment_ids) if scaling.uses_length else None
        frequencies = jnp.asarray(scaling.frequencies(base, self._dim, length), jnp.float32)
        factor: Any = scaling.query_key_factor
        enabled = info.layer_values.get("rope_scaling_enabled")
        if enabled is not None:
            frequencies = jnp.where(enabled != 0, frequencies, plain)
            factor = jnp.where(enabled != 0, factor, 1.0)
        return frequencies, factor


def _lengths(positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Returns the number of tokens of each token's document so far seen: (batch, seq or 1, 1).

    Args:
        positions: int (batch, seq), not negative.
        segment_ids: int (batch, seq) document of each token; a document is contiguous.
    """
    if segment_ids is None:
        return jnp.max(positions, axis=1)[:, None, None] + 1
    starts = segment_ids[:, 1:] != segment_ids[:, :-1]
    document = jnp.pad(jnp.cumsum(starts, axis=1), ((0, 0), (1, 0)))

    def longest(row: jax.Array, which: jax.Array) -> jax.Array:
        return jax.ops.segment_max(row, which, num_segments=row.shape[0])[which]

    return jax.vmap(longest)(positions, document)[:, :, None] + 1
