"""Further routers: two experts with a random second, experts that choose, and a fixed hash."""

from __future__ import annotations

import functools
import logging

import jax
import jax.numpy as jnp

from axcore.errors import ModuleError
from axcore.layers import SequenceInfo
from axlearn_moe._routers import BaseRouter, ScoreRouter
from axlearn_moe._routing import Routing, best, chosen, expert_capacity

__all__ = ["ExpertChoiceRouter", "HashRouter", "Top2RandomRouter"]

_TOKEN_IDS = "input_ids"
# Below core's name, so that the command line shows it.
_log = logging.getLogger("axcore.moe")


class Top2RandomRouter(ScoreRouter):
    """The best expert, and in training the second only with probability ``2 x its weight``.

    Weights are the softmax over all experts, made to sum to 1 over the two. Outside of training
    the second is always taken. The router of GShard, arXiv:2006.16668, algorithm 1.
    """

    class Config(ScoreRouter.Config):
        """No further fields; ``top_k`` must be 2."""

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        _require_top_k(self, 2)

    def forward(self, x: jax.Array, real: jax.Array, info: SequenceInfo) -> Routing:
        """Assigns each token of (batch, seq, input_dim) to one or two experts."""
        del info
        logits = self._logits(x)
        probs = jax.nn.softmax(logits)
        experts = best(jax.lax.stop_gradient(probs), 2)
        gates = chosen(probs, experts)
        gates = gates / jnp.sum(gates, axis=-1, keepdims=True)
        second = real
        if self._context.is_training:
            draw = jax.random.uniform(self._context.key(), real.shape)
            second = real & (2 * jax.lax.stop_gradient(gates[..., 1]) > draw)
        valid = jnp.stack([real, second], axis=-1)
        return Routing(experts, jnp.where(valid, gates, 0.0), valid, logits, probs, real)


class ExpertChoiceRouter(ScoreRouter):
    """Each expert takes the tokens of a row that score highest for it: loads are equal.

    It takes ``top_k x seq / experts`` tokens, times ``capacity_factor``; a token may go to none or
    to several. Weights are the softmax over all experts. Zhou et al., arXiv:2202.09368.

    An expert's choice depends on the whole row. In a decoder this lets a token know of later ones:
    it is meant for encoders; decoding, which has one token of a row at a time, warns.
    """

    class Config(ScoreRouter.Config):
        """No further fields."""

    def forward(self, x: jax.Array, real: jax.Array, info: SequenceInfo) -> Routing:
        """Lets each expert choose among the tokens of (batch, seq, input_dim)."""
        if info.purpose == "decode":
            # A word, not an error: a run that samples at its end must not fail there.
            _tell_decoding(self.config_path or self.path)
        cfg = self.cfg
        logits = self._logits(x)
        probs = jax.nn.softmax(logits)
        factor = 1.0 if cfg.capacity_factor is None else cfg.capacity_factor
        capacity = expert_capacity(x.shape[1], cfg.top_k, cfg.num_experts, factor)
        by_expert = jnp.swapaxes(jnp.where(real[..., None], probs, -1.0), 1, 2)
        gates, tokens = jax.lax.top_k(by_expert, capacity)
        valid = gates >= 0
        experts = jnp.broadcast_to(jnp.arange(cfg.num_experts)[:, None], tokens.shape)
        gates = jnp.where(valid, gates, 0.0)
        return Routing(experts, gates, valid, logits, probs, real, tokens=tokens)


class HashRouter(BaseRouter):
    """A fixed choice by the token's id, all experts weighing the same. It has no parameters.

    Experts ``h(id), h(id) + 1, ...`` (modulo their number) of a hash ``h``. Reads
    ``info.token_values["input_ids"]``. Roller et al., arXiv:2106.04426, section 3.1.
    """

    class Config(BaseRouter.Config):
        """``seed`` chooses the hash."""

        seed: int = 0

    def forward(self, x: jax.Array, real: jax.Array, info: SequenceInfo) -> Routing:
        """Assigns each token of (batch, seq, input_dim) to ``top_k`` experts."""
        cfg = self.cfg
        ids = info.token_values.get(_TOKEN_IDS)
        if ids is None:
            raise ModuleError(
                f"a hash router needs the tokens' ids and info.token_values has "
                f"{sorted(info.token_values) or 'nothing'}",
                code="AX915",
                where=self.config_path or self.path,
                hint=f"give the model token_values={{{_TOKEN_IDS!r}: ids}}; one of images has "
                "none: use TopKRouter",
            )
        first = _hashed(ids, cfg.seed) % jnp.uint32(cfg.num_experts)
        steps = jnp.arange(cfg.top_k, dtype=jnp.uint32)
        experts = ((first[..., None] + steps) % jnp.uint32(cfg.num_experts)).astype(jnp.int32)
        valid = jnp.broadcast_to(real[..., None], experts.shape)
        gates = jnp.where(valid, 1.0 / cfg.top_k, 0.0).astype(jnp.float32)
        is_chosen = jnp.any(experts[..., None] == jnp.arange(cfg.num_experts), axis=-2)
        probs = is_chosen / jnp.float32(cfg.top_k)
        return Routing(experts, gates, valid, jnp.zeros_like(probs), probs, real)


@functools.cache  # once, however many layers there are
def _tell_decoding(where: str) -> None:
    _log.warning(
        "%s: experts choose among all tokens of a row, and decoding has one at a time: what is "
        "generated is not what was trained (use another router in a decoder)",
        where,
    )


def _hashed(ids: jax.Array, seed: int) -> jax.Array:
    """Returns uint32 hashes of ids: the finalizer of MurmurHash3 (public domain)."""
    h = ids.astype(jnp.uint32) ^ jnp.uint32(seed * 0x9E3779B9 & 0xFFFFFFFF)
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _require_top_k(router: BaseRouter, top_k: int) -> None:
    if router.cfg.top_k != top_k:
        raise ModuleError(
            f"{type(router).__name__} got top_k={router.cfg.top_k}, expected {top_k}",
            code="AX910",
            where=router.config_path or router.path,
            hint=f"set top_k={top_k} of the mixture, or use TopKRouter",
        )
