"""Attention over another sequence: what an encoder made of the source."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from axcore import ops
from axcore.errors import ModuleError
from axcore.layers.attention import head_dims
from axcore.layers.base import BETWEEN_BRANCHES
from axcore.layers.kv_cache import ContiguousKVCache
from axcore.layers.linear import Linear, replacement
from axcore.layers.roles import BaseAttention, BaseKVCache, SequenceInfo
from axcore.ops import DotGeneral
from axcore.ops.masks import Full, Mask, SegmentIds
from axcore.remat import site

__all__ = ["CrossAttention"]


class CrossAttention(BaseAttention):
    r"""Queries of the sequence over keys and values of ``info.memory``.

    Vaswani et al., arXiv:1706.03762, section 3.2.3. In ``prefill`` keys and values go into the
    cache; ``decode`` reads them there, so the source is projected once. Positions of padding in the
    memory (segment 0) are seen by no query.
    """

    class Config(BaseAttention.Config):
        """The parent sets ``input_dim``."""

        # None: input_dim.
        memory_dim: int | None = None
        num_heads: int = 8
        num_kv_heads: int | None = None
        # None: input_dim / num_heads.
        head_dim: int | None = None
        query: Linear.Config = Linear.Config()
        key: Linear.Config = Linear.Config()
        value: Linear.Config = Linear.Config()
        output: Linear.Config = Linear.Config()
        kv_cache: BaseKVCache.Config = ContiguousKVCache.Config()
        # None: 1 / sqrt(head_dim).
        logit_scale: float | None = None
        logit_cap: float | None = None
        logits_dot: DotGeneral.Config = DotGeneral.Config()
        values_dot: DotGeneral.Config = DotGeneral.Config()
        # Forces a kernel by name; None lets ops choose.
        kernel: str | None = None

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._check_positive("logit_cap")
        num_kv_heads, head_dim = head_dims(self)
        memory_dim = cfg.input_dim if cfg.memory_dim is None else cfg.memory_dim

        def projection(name: str, input_dim: int, num_heads: int, axis: str) -> Linear:
            return self._add_child(
                name,
                getattr(cfg, name),
                Linear,
                input_dim=input_dim,
                output_dim=(num_heads, head_dim),
                axes=("embed", axis, "head_dim"),
            )

        self.query = projection("query", cfg.input_dim, cfg.num_heads, "heads")
        self.key = projection("key", memory_dim, num_kv_heads, "kv_heads")
        self.value = projection("value", memory_dim, num_kv_heads, "kv_heads")
        kv_axes = ("kv_heads", "head_dim")
        self.kv_cache = self._add_child(
            "kv_cache",
            cfg.kv_cache,
            BaseKVCache,
            tensors={"key": (num_kv_heads, head_dim), "value": (num_kv_heads, head_dim)},
            axes={"key": kv_axes, "value": kv_axes},
            memory=True,
        )
        self.logits_dot = self._add_child("logits_dot", cfg.logits_dot, DotGeneral)
        self.values_dot = self._add_child("values_dot", cfg.values_dot, DotGeneral)
        self.output = self._add_child(
            "output",
            cfg.output,
            Linear,
            input_dim=(cfg.num_heads, head_dim),
            output_dim=cfg.input_dim,
            axes=("heads", "head_dim", "embed"),
        )

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        q = self.query(x)
        q = self._constrain(site(q, "qkv_proj"), "batch", "seq", "heads", "head_dim")
        out = self._attend(q, info)
        out = self._constrain(site(out, "attn_context"), "batch", "seq", "heads", "head_dim")
        return self._constrain(site(self.output(out), "attn_out"), *BETWEEN_BRANCHES)

    def _attend(self, q: jax.Array, info: SequenceInfo) -> jax.Array:
        cfg = self.cfg
        purpose = info.purpose
        shared: dict[str, Any] = dict(
            logit_scale=cfg.logit_scale,
            logit_cap=cfg.logit_cap,
            implementation=cfg.kernel,
            purpose=purpose,
            qk_dot_general=replacement(self.logits_dot),
            pv_dot_general=replacement(self.values_dot),
        )
        if purpose == "decode":
            return ops.attention(q, mask=Full(), view=self._stored(info, q), **shared)
        if info.memory is None:
            raise ModuleError(
                "has no memory to attend to",
                code="AX352",
                where=self.path,
                hint="pass the encoder's output as SequenceInfo.memory (batch, source, dim)",
            )
        k = self._constrain(self.key(info.memory), "batch", "seq", "kv_heads", "head_dim")
        v = self._constrain(self.value(info.memory), "batch", "seq", "kv_heads", "head_dim")
        k, v = site(k, "qkv_proj"), site(v, "qkv_proj")
        ids = info.memory_segment_ids
        if purpose == "prefill":
            view = self.kv_cache.extend({"key": k, "value": v}, _slots(info, k.shape[:2]))
            return ops.attention(q, mask=Full(), view=view, **shared)
        mask: Mask = Full()
        if ids is not None and info.segment_ids is not None:
            mask = SegmentIds()
            shared |= dict(q_segment_ids=info.segment_ids, kv_segment_ids=ids)
        elif ids is not None:
            shared["kv_valid"] = ids != 0
        return ops.attention(q, k, v, mask=mask, **shared)

    def _stored(self, info: SequenceInfo, q: jax.Array) -> Any:
        """The view of what ``prefill`` stored: one token of padding is added, which stores none."""
        token = {
            n: jnp.zeros((q.shape[0], 1, *s), q.dtype) for n, s in self.kv_cache.cfg.tensors.items()
        }
        positions = jnp.full((q.shape[0], 1), -1, jnp.int32)
        return self.kv_cache.extend(token, dataclasses.replace(info, positions=positions))


def _slots(info: SequenceInfo, shape: tuple[int, ...]) -> SequenceInfo:
    """Cache positions of the memory's tokens: 0, 1, ... over those that are not padding."""
    valid = jnp.ones(shape, bool)
    if info.memory_segment_ids is not None:
        valid = info.memory_segment_ids != 0
    count = jnp.cumsum(valid, axis=1, dtype=jnp.int32)
    return dataclasses.replace(info, positions=jnp.where(valid, count - 1, -1))
