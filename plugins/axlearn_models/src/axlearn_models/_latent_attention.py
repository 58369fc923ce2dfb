"""Multi-head latent attention: keys and values of all heads are made of one small vector a token.

Legend of shapes: b batch, t queries, s keys, n heads, r rank of the latent, h width of a head that
is not rotated, p width that is rotated, v width of a value.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from axcore import ops
from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.layers import (
    BaseAttention,
    BaseKVCache,
    BaseNorm,
    BaseQueryKeyTransform,
    ContiguousKVCache,
    Linear,
    RMSNorm,
    SequenceInfo,
    VarianceScaling,
)
from axcore.layers.attention import packed_mask
from axcore.layers.base import BETWEEN_BRANCHES, Layer
from axcore.module import Initializer
from axcore.ops import BaseDotGeneral, DenseKV, DotGeneral
from axcore.ops.masks import Causal, Mask
from axcore.parallel import Axis
from axcore.remat import site, weight_product

__all__ = ["LatentAttention", "LatentHeads", "LatentView"]

# Split as the model's dim is, where there are no more devices than it has parts.
LATENT = Axis(
    "latent", rule=(("fsdp",), ()), description="the vector that keys and values are made of"
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LatentView:
    """View of a cache of latents, as the keys and values of one head that all queries read.

    Attributes:
        latent: (b, s, r).
        rotated: (b, s, p), keys that are turned by their positions.
        positions: (s,) or (b, s) int position of each slot.
        valid: (b, s) bool, False for empty slots.
    """

    latent: jax.Array
    rotated: jax.Array
    positions: jax.Array | None
    valid: jax.Array | None

    @property
    def kind(self) -> str:
        """``latent``; what kernels match on."""
        return "latent"

    def dense(self) -> DenseKV:
        """Returns keys (b, s, 1, r + p) and values (b, s, 1, r)."""
        keys = jnp.concatenate([self.latent, self.rotated], axis=-1)[:, :, None]
        return DenseKV(keys, self.latent[:, :, None], self.positions, self.valid)


class LatentHeads(Layer):
    """Makes each head's keys and values of the latent, or lets queries and results meet it instead.

    Parameters: ``key`` (r, n, h) and ``value`` (r, n, v).
    """

    class Config(Layer.Config):
        """The attention layer sets the dims."""

        rank: Required[int] = REQUIRED
        num_heads: Required[int] = REQUIRED
        head_dim: Required[int] = REQUIRED
        value_dim: Required[int] = REQUIRED
        weight_init: Initializer = VarianceScaling()
        dot: BaseDotGeneral.Config = DotGeneral.Config()

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        for name, width in (("key", cfg.head_dim), ("value", cfg.value_dim)):
            self._add_weight(
                name,
                (cfg.rank, cfg.num_heads, width),
                ("latent", "heads", "head_dim"),
                cfg.weight_init,
                fan_in_dims=(0,),
                fan_out_dims=(1, 2),
            )
        self.dot = self._add_child("dot", cfg.dot, BaseDotGeneral)

    def forward(self, latent_bsr: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(b, s, r) -> keys (b, s, n, h) and values (b, s, n, v)."""
        dims = (((2,), (0,)), ((), ()))
        keys, values = (self._product(latent_bsr, name, dims) for name in ("key", "value"))
        return keys, values

    def queries(self, q_btnh: jax.Array) -> jax.Array:
        """Returns (b, t, n, r), whose products with latents are those of ``q`` with keys."""
        made_nbtr = self._product(q_btnh, "key", (((3,), (2,)), ((2,), (1,))))
        return jnp.moveaxis(made_nbtr, 0, 2)

    def results(self, context_btnr: jax.Array) -> jax.Array:
        """Returns (b, t, n, v), what weighted sums of latents are as sums of values."""
        made_nbtv = self._product(context_btnr, "value", (((3,), (0,)), ((2,), (1,))))
        return jnp.moveaxis(made_nbtv, 0, 2)

    def _product(self, x: jax.Array, name: str, dims: Any) -> jax.Array:
        return weight_product(self.dot(x.astype(self.compute_dtype), self._param(name), dims))


class LatentAttention(BaseAttention):
    r"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    .. math::
        c_t = \mathrm{norm}(W^{c} x_t), \quad
        k_{t,i} = [W^{k}_i c_t;\; R(W^{p} x_t)], \quad
        v_{t,i} = W^{v}_i c_t, \quad
        q_{t,i} = [q^h_{t,i};\; R(q^p_{t,i})]

    with :math:`q_{t} = W^{q}\, \mathrm{norm}(W^{a} x_t)` (without ``query_rank``:
    :math:`W^{q} x_t`), and rotations R, for all heads the same key. A cache holds :math:`c_t` and
    the rotated key alone, ``rank + rotated_dim`` numbers a token.

    In decode the matrices are absorbed (appendix C): queries become
    :math:`[(W^{k}_i)^\top q^h;\; R(q^p)]`, meet :math:`[c; R(W^p x)]` as the only key of all heads,
    and :math:`W^v_i` makes the values of the weighted sum of latents, so nothing of the cache is
    ever expanded.
    """

    class Config(BaseAttention.Config):
        """The parent sets ``input_dim``; the defaults are DeepSeek-V3's."""

        num_heads: int = 128
        # Width of a query's and key's part that is not rotated, of the rotated one, of a value.
        head_dim: int = 128
        rotated_dim: int = 64
        value_dim: int = 128
        # Width of what keys and values are made of, and of what queries are; None: of the input.
        rank: int = 512
        query_rank: int | None = 1536
        query_down: Linear.Config = Linear.Config(bias=False)
        query_norm: BaseNorm.Config = RMSNorm.Config(eps=1e-6)
        query: Linear.Config = Linear.Config(bias=False)
        latent: Linear.Config = Linear.Config(bias=False)
        latent_norm: BaseNorm.Config = RMSNorm.Config(eps=1e-6)
        heads: LatentHeads.Config = LatentHeads.Config()
        output: Linear.Config = Linear.Config(bias=False)
        # Of the rotated parts; one key for all heads.
        query_key_transform: BaseQueryKeyTransform.Config | None = None
        kv_cache: BaseKVCache.Config = ContiguousKVCache.Config()
        mask: Mask = Causal()
        # None: 1 / sqrt(head_dim + rotated_dim).
        logit_scale: float | None = None
        # Forces a kernel by name; None lets ops choose.
        kernel: str | None = None

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        heads, rank = cfg.num_heads, cfg.rank
        self._check_mask()
        query_dim, axis = cfg.input_dim, "embed"
        self.query_down: Linear | None = None
        self.query_norm: BaseNorm | None = None
        if cfg.query_rank is not None:
            self.query_down = self._linear("query_down", cfg.query_rank)
            self.query_norm = self._add_child(
                "query_norm", cfg.query_norm, BaseNorm, input_dim=cfg.query_rank, axis="latent"
            )
            query_dim, axis = cfg.query_rank, "latent"
        self.query = self._add_child(
            "query",
            cfg.query,
            Linear,
            input_dim=query_dim,
            output_dim=(heads, cfg.head_dim + cfg.rotated_dim),
            axes=(axis, "heads", "head_dim"),
        )
        self.latent = self._linear("latent", rank + cfg.rotated_dim)
        self.latent_norm = self._add_child(
            "latent_norm", cfg.latent_norm, BaseNorm, input_dim=rank, axis="latent"
        )
        dims: dict[str, Any] = {"num_heads": heads, "head_dim": cfg.head_dim}
        self.heads = self._add_child(
            "heads", cfg.heads, LatentHeads, rank=rank, value_dim=cfg.value_dim, **dims
        )
        self.query_key_transform: BaseQueryKeyTransform | None = None
        if cfg.query_key_transform is not None:
            self.query_key_transform = self._add_child(
                "query_key_transform",
                cfg.query_key_transform,
                BaseQueryKeyTransform,
                num_heads=heads,
                num_kv_heads=1,
                head_dim=cfg.rotated_dim,
            )
        self.kv_cache = self._add_child(
            "kv_cache",
            cfg.kv_cache,
            BaseKVCache,
            tensors={"latent": (rank,), "rotated": (cfg.rotated_dim,)},
            axes={"latent": (None,), "rotated": (None,)},
        )
        self.output = self._add_child(
            "output",
            cfg.output,
            Linear,
            input_dim=(heads, cfg.value_dim),
            output_dim=cfg.input_dim,
            axes=("heads", "head_dim", "embed"),
        )

    @property
    def attention_dims(self) -> tuple[int, int, int]:
        """Heads, width of a key and of a value; what costs are counted by."""
        cfg = self.cfg
        return cfg.num_heads, cfg.head_dim + cfg.rotated_dim, cfg.value_dim

    def _linear(self, name: str, output_dim: int) -> Linear:
        return self._add_child(
            name,
            getattr(self.cfg, name),
            Linear,
            input_dim=self.cfg.input_dim,
            output_dim=output_dim,
            axes=("embed", None),
        )

    def _check_mask(self) -> None:
        if needs := sorted(self.cfg.mask.needs):
            raise ModuleError(
                f"the mask {self.cfg.mask} needs {', '.join(needs)}, which latent attention does "
                "not read",
                code="AX392",
                where=f"{self.config_path}.mask",
                hint="Causal() and SlidingWindow(n) need nothing",
            )

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        cfg = self.cfg
        c = x if self.query_down is None else self.query_down(x)
        c = c if self.query_norm is None else self.query_norm(c)
        q = self.query(c)
        q_plain, q_rotated = q[..., : cfg.head_dim], q[..., cfg.head_dim :]
        made = self.latent(x)
        latent = self.latent_norm(made[..., : cfg.rank])
        k_rotated = made[..., None, cfg.rank :]  # one head
        if self.query_key_transform is not None:
            q_rotated, k_rotated = self.query_key_transform(q_rotated, k_rotated, info)
        out = self._attend(q_plain, q_rotated, latent, k_rotated[:, :, 0], info)
        out = self._constrain(site(out, "attn_context"), "batch", "seq", "heads", "head_dim")
        return self._constrain(site(self.output(out), "attn_out"), *BETWEEN_BRANCHES)

    def _attend(
        self,
        q_plain: jax.Array,
        q_rotated: jax.Array,
        latent: jax.Array,
        k_rotated: jax.Array,
        info: SequenceInfo,
    ) -> jax.Array:
        """Returns (b, t, n, v) of queries (b, t, n, h or p) and this call's (b, t, r or p)."""
        cfg = self.cfg
        scale = cfg.logit_scale or (cfg.head_dim + cfg.rotated_dim) ** -0.5
        shared: dict[str, Any] = dict(
            logit_scale=scale, implementation=cfg.kernel, purpose=info.purpose
        )
        latent, k_rotated = site(latent, "qkv_proj"), site(k_rotated, "qkv_proj")
        if info.purpose == "train":
            mask, arrays = packed_mask(cfg.mask, info)
            q, k, v = self._expanded(q_plain, q_rotated, latent, k_rotated)
            return ops.attention(q, k, v, mask=mask, **arrays, **shared)
        view = self._view(latent, k_rotated, info)
        shared |= dict(mask=cfg.mask, q_positions=info.positions)
        if info.purpose == "decode":
            q = jnp.concatenate([self.heads.queries(q_plain), q_rotated], axis=-1)
            return self.heads.results(ops.attention(q, view=view, **shared))
        q, k, v = self._expanded(q_plain, q_rotated, view.latent, view.rotated)
        return ops.attention(q, k, v, kv_positions=view.positions, kv_valid=view.valid, **shared)

    def _expanded(
        self, q_plain: jax.Array, q_rotated: jax.Array, latent: jax.Array, k_rotated: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries, keys and values of all heads."""
        keys, values = self.heads(latent)
        rotated = jnp.broadcast_to(
            k_rotated[:, :, None].astype(keys.dtype), (*keys.shape[:3], k_rotated.shape[-1])
        )
        q = jnp.concatenate([q_plain, q_rotated], axis=-1)
        k = jnp.concatenate([keys, rotated], axis=-1)
        q, k, values = (
            self._constrain(site(a, "qkv_proj"), "batch", "seq", "heads", "head_dim")
            for a in (q, k, values)
        )
        return q, k, values

    def _view(self, latent: jax.Array, k_rotated: jax.Array, info: SequenceInfo) -> LatentView:
        """Stores this call's tokens; returns all that are stored."""
        held = self.kv_cache.extend({"latent": latent, "rotated": k_rotated}, info)
        tensors, lengths = getattr(held, "tensors", None), getattr(held, "lengths", None)
        if tensors is None or lengths is None:
            raise ModuleError(
                f"the cache hands back a {type(held).__name__} of the kind "
                f"{getattr(held, 'kind', None)!r}; latent attention reads contiguous ones",
                code="AX393",
                where=self.kv_cache.config_path,
                hint="set kv_cache to ContiguousKVCache.Config()",
            )
        slots = jnp.arange(tensors["latent"].shape[1], dtype=jnp.int32)
        valid = slots[None] < lengths[:, None]
        return LatentView(tensors["latent"], tensors["rotated"], slots, valid)
