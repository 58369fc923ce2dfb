"""Self-attention through ``ops.attention``: MHA, GQA and MQA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from axcore import ops
from axcore.errors import ModuleError
from axcore.layers.base import BETWEEN_BRANCHES
from axcore.layers.initializers import Zeros
from axcore.layers.kv_cache import ContiguousKVCache
from axcore.layers.linear import Linear, replacement
from axcore.layers.qkv import QKV
from axcore.layers.roles import (
    BaseAttention,
    BaseAttentionBias,
    BaseKVCache,
    BaseQKV,
    BaseQueryKeyTransform,
    SequenceInfo,
)
from axcore.module import Initializer, Module
from axcore.ops import DotGeneral
from axcore.ops.masks import Causal, Mask, SegmentIds
from axcore.remat import site

__all__ = ["Attention", "head_dims", "packed_mask"]

# Of a layer that sees everything; positions are far below.
_WIDEST_WINDOW = 2**30


class Attention(BaseAttention):
    r"""Multi-head self-attention: ``softmax(q k^T / sqrt(head_dim)) v``, projected back.

    Vaswani et al., arXiv:1706.03762; grouped queries: Ainslie et al., arXiv:2305.13245.
    ``num_kv_heads=None`` is multi-head, 1 is multi-query.

    The mask may need arrays: ``PrefixLM(None)`` reads ``info.prefix_lengths`` and ``TracedWindow``
    the layer's ``layer_values["window"]``, the number of earlier positions seen (inf for all).
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
        # Added to the scaled and capped logits.
        bias: BaseAttentionBias.Config | None = None
        # A learned logit per head that joins the softmax's denominator only (arXiv:2309.17453).
        sinks: bool = False
        sinks_init: Initializer = Zeros()
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
        self._check_positive("logit_cap")
        num_kv_heads, head_dim = head_dims(self)
        dims: dict[str, Any] = dict(
            num_heads=cfg.num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        self.qkv = self._add_child("qkv", cfg.qkv, BaseQKV, input_dim=cfg.input_dim, **dims)
        self.query_key_transform: BaseQueryKeyTransform | None = None
        if cfg.query_key_transform is not None:
            self.query_key_transform = self._add_child(
                "query_key_transform", cfg.query_key_transform, BaseQueryKeyTransform, **dims
            )
        self.bias: BaseAttentionBias | None = None
        if cfg.bias is not None:
            self.bias = self._add_child(
                "bias", cfg.bias, BaseAttentionBias, num_heads=cfg.num_heads
            )
        if cfg.sinks:
            self._add_weight(
                "sinks", (cfg.num_heads,), ("heads",), cfg.sinks_init, weight_decay=False
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
        return self._constrain(site(self.output(out), "attn_out"), *BETWEEN_BRANCHES)

    def _attend(self, q: jax.Array, k: jax.Array, v: jax.Array, info: SequenceInfo) -> jax.Array:
        cfg = self.cfg
        purpose = info.purpose
        shared: dict[str, Any] = dict(
            logit_scale=cfg.logit_scale,
            logit_cap=cfg.logit_cap,
            implementation=cfg.kernel,
            purpose=purpose,
            qk_dot_general=replacement(self.logits_dot),
            pv_dot_general=replacement(self.values_dot),
            **self._mask_arrays(info),
        )
        if cfg.sinks:
            shared["sinks"] = self._param("sinks", "float32")
        if (bias := self.bias) is not None:
            shared["bias"] = lambda q_positions, kv_positions: bias(q_positions, kv_positions, info)
        if purpose == "train":
            mask, arrays = packed_mask(cfg.mask, info)
            return ops.attention(q, k, v, mask=mask, **arrays, **shared)
        view = self.kv_cache.extend({"key": k, "value": v}, info)
        return ops.attention(q, mask=cfg.mask, view=view, q_positions=info.positions, **shared)

    def _mask_arrays(self, info: SequenceInfo) -> dict[str, jax.Array]:
        """Returns the arrays that the mask reads, as arguments of ``ops.attention``."""
        arrays: dict[str, jax.Array] = {}
        if "window" in self.cfg.mask.needs:
            if "window" not in info.layer_values:
                raise ModuleError(
                    f"the mask {self.cfg.mask} reads layer_values['window'], but the stack gives "
                    f"{sorted(info.layer_values) or 'none'}",
                    code="AX350",
                    where=self.path,
                    hint="set layer_values={'window': (...)} of the stack, a number for each layer",
                )
            window = jnp.minimum(info.layer_values["window"], _WIDEST_WINDOW)
            arrays["window"] = window.astype(jnp.int32)
        if "prefix_lengths" in self.cfg.mask.needs:
            lengths = info.prefix_lengths
            if lengths is None and info.purpose == "decode":
                # All of the prefix is in the cache, and so before every query.
                lengths = jnp.zeros(info.positions.shape[:1], jnp.int32)
            if lengths is None:
                raise ModuleError(
                    f"the mask {self.cfg.mask} needs prefix_lengths, got none",
                    code="AX350",
                    where=self.path,
                    hint="pass prefix_lengths (batch,) to the model, or PrefixLM(length) as mask",
                )
            arrays["prefix_lengths"] = lengths
        return arrays


def packed_mask(mask: Mask, info: SequenceInfo) -> tuple[Mask, dict[str, jax.Array]]:
    """Returns the mask of tokens that attend to each other, within segments where there are any.

    Args:
        mask: What holds within a segment.
        info: Positions and segments of the tokens, which are queries and keys alike.

    Returns:
        The mask, and the arrays that it reads, as arguments of ``ops.attention``.
    """
    if info.segment_ids is None:
        return mask, {}
    arrays = {"q_segment_ids": info.segment_ids}
    # Positions restart in each segment, so that of relative masks indices and segment ids say the
    # same, and let kernels skip what lies above the diagonal.
    if not mask.is_relative:
        arrays |= dict(q_positions=info.positions, kv_positions=info.positions)
    return mask & SegmentIds(), arrays


def head_dims(module: Module) -> tuple[int, int]:
    """Returns ``(num_kv_heads, head_dim)`` of an attention layer's config.

    Raises:
        ModuleError: The numbers of heads and dims do not fit each other.
    """
    cfg = module.cfg
    num_kv_heads = cfg.num_heads if cfg.num_kv_heads is None else cfg.num_kv_heads
    if cfg.num_heads < 1 or num_kv_heads < 1 or cfg.num_heads % num_kv_heads:
        raise ModuleError(
            f"num_heads {cfg.num_heads} is not a positive multiple of num_kv_heads {num_kv_heads}",
            code="AX342",
            where=module.config_path,
        )
    if cfg.head_dim is None and cfg.input_dim % cfg.num_heads:
        raise ModuleError(
            f"input_dim {cfg.input_dim} is no multiple of num_heads {cfg.num_heads}",
            code="AX342",
            where=module.config_path,
            hint="set head_dim, or a number of heads that divides input_dim",
        )
    return num_kv_heads, cfg.head_dim or cfg.input_dim // cfg.num_heads
