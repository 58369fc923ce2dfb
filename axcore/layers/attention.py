"""Self-attention through ``ops.attention``: MHA, GQA and MQA."""

from __future__ import annotations

from typing import Literal

import jax

from axcore import ops
from axcore.errors import ModuleError
from axcore.layers.kv_cache import ContiguousKVCache
from axcore.layers.linear import Linear, replacement
from axcore.layers.roles import (
    BaseAttention,
    BaseKVCache,
    BaseQKV,
    BaseQueryKeyTransform,
    SequenceInfo,
)
from axcore.ops import DotGeneral
from axcore.ops.masks import Causal, Mask, SegmentIds
from axcore.remat import site

__all__ = ["QKV", "Attention"]


class QKV(BaseQKV):
    """Separate projections for queries, keys and values."""

    class Config(BaseQKV.Config):
        """``bias`` belongs to each projection's own config."""

        query: Linear.Config = Linear.Config()
        key: Linear.Config = Linear.Config()
        value: Linear.Config = Linear.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)

        def projection(name: str, num_heads: int, axis: str) -> Linear:
            return self._add_child(
                name,
                getattr(cfg, name),
                Linear,
                input_dim=cfg.input_dim,
                output_dim=(num_heads, cfg.head_dim),
                axes=("embed", axis, "head_dim"),
            )

        self.query = projection("query", cfg.num_heads, "heads")
        self.key = projection("key", cfg.num_kv_heads, "kv_heads")
        self.value = projection("value", cfg.num_kv_heads, "kv_heads")

    def forward(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(batch, seq, input_dim) -> q, k, v of (batch, seq, heads or kv_heads, head_dim)."""
        return self.query(x), self.key(x), self.value(x)


class Attention(BaseAttention):
    r"""Multi-head self-attention: ``softmax(q k^T / sqrt(head_dim)) v``, projected back.

    Vaswani et al., arXiv:1706.03762; grouped queries: Ainslie et al., arXiv:2305.13245.
    ``num_kv_heads=None`` is multi-head, 1 is multi-query.
    """

    class Config(BaseAttention.Config):
        """The parent sets ``input_dim``; the seams are child configs."""

        num_heads: int = 8
        num_kv_heads: int | None = None
        # None: input_dim / num_heads.
        head_dim: int | None = None
        qkv: BaseQKV.Config = QKV.Config()
        output: Linear.Config = Linear.Config()
        query_key_transform: BaseQueryKeyTransform.Config | None = None
        kv_cache: BaseKVCache.Config = ContiguousKVCache.Config()
        mask: Mask = Causal()
        # None: 1 / sqrt(head_dim).
        logit_scale: float | None = None
        logit_cap: float | None = None
        # The two contractions of attention itself; replacing one limits the kernels that can serve.
        logits_dot: DotGeneral.Config = DotGeneral.Config()
        values_dot: DotGeneral.Config = DotGeneral.Config()
        # Forces a kernel by name; None lets ops choose.
        kernel: str | None = None

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        num_kv_heads = cfg.num_heads if cfg.num_kv_heads is None else cfg.num_kv_heads
        if cfg.num_heads < 1 or num_kv_heads < 1 or cfg.num_heads % num_kv_heads:
            raise ModuleError(
                f"num_heads {cfg.num_heads} is not a positive multiple of num_kv_heads "
                f"{num_kv_heads}",
                code="AX342",
                where=self.config_path,
            )
        if cfg.head_dim is None and cfg.input_dim % cfg.num_heads:
            raise ModuleError(
                f"input_dim {cfg.input_dim} is no multiple of num_heads {cfg.num_heads}",
                code="AX342",
                where=self.config_path,
                hint="set head_dim, or a number of heads that divides input_dim",
            )
        head_dim = cfg.head_dim or cfg.input_dim // cfg.num_heads
        self.qkv = self._add_child(
            "qkv",
            cfg.qkv,
            BaseQKV,
            input_dim=cfg.input_dim,
            num_heads=cfg.num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        self.query_key_transform: BaseQueryKeyTransform | None = None
        if cfg.query_key_transform is not None:
            self.query_key_transform = self._add_child(
                "query_key_transform",
                cfg.query_key_transform,
                BaseQueryKeyTransform,
                head_dim=head_dim,
            )
        kv_axes = ("kv_heads", "head_dim")
        self.kv_cache = self._add_child(
            "kv_cache",
            cfg.kv_cache,
            BaseKVCache,
            tensors={"key": (num_kv_heads, head_dim), "value": (num_kv_heads, head_dim)},
            axes={"key": kv_axes, "value": kv_axes},
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
        q, k, v = self.qkv(x)
        if self.query_key_transform is not None:
            q, k = self.query_key_transform(q, k, info)
        q = self._constrain(site(q, "qkv_proj"), "batch", "seq", "heads", "head_dim")
        k = self._constrain(site(k, "qkv_proj"), "batch", "seq", "kv_heads", "head_dim")
        v = self._constrain(site(v, "qkv_proj"), "batch", "seq", "kv_heads", "head_dim")
        out = self._attend(q, k, v, info)
        out = self._constrain(site(out, "attn_context"), "batch", "seq", "heads", "head_dim")
        return self._constrain(site(self.output(out), "attn_out"), "batch", "seq", "embed")

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, info: SequenceInfo) -> jax.Array:
        cfg = self.cfg
        purpose: Literal["train", "prefill", "decode"] = info.purpose
        shared = dict(
            logit_scale=cfg.logit_scale,
            logit_cap=cfg.logit_cap,
            implementation=cfg.kernel,
            purpose=purpose,
            qk_dot_general=replacement(self.logits_dot),
            pv_dot_general=replacement(self.values_dot),
        )
        if purpose == "train":
            mask = cfg.mask
            if info.segment_ids is not None:
                # Positions restart in each segment, so indices and segment ids say the same as
                # positions and segment ids, and let kernels skip what lies above the diagonal.
                mask = mask & SegmentIds()
                shared["q_segment_ids"] = info.segment_ids
            return ops.attention(q, k, v, mask=mask, **shared)
        view = self.kv_cache.extend({"key": k, "value": v}, info)
        return ops.attention(q, mask=cfg.mask, view=view, q_positions=info.positions, **shared)
