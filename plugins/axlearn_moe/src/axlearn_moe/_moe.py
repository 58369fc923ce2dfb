"""The mixture-of-experts layer: a feed-forward layer of which each token uses a part."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, Dim, Required, scaled
from axcore.errors import ModuleError
from axcore.layers import BaseFeedForward, Linear, SequenceInfo
from axlearn_moe._balance import LoadBalanceLoss, RouterLoss, RouterZLoss
from axlearn_moe._dispatch import BaseDispatch, GroupedDispatch
from axlearn_moe._experts import BaseExperts, Experts
from axlearn_moe._routers import BaseRouter, TopKRouter
from axlearn_moe._routing import Routing, drop_over_capacity, expert_capacity, real_tokens

__all__ = ["MoE"]


class MoE(BaseFeedForward):
    r"""A mixture of experts in place of a feed-forward layer.

    .. math:: y_t = \sum_{e \in \mathrm{chosen}(t)} g_{t,e}\, E_e(x_t) + S(x_t)

    with gates and choice by the ``router``, the experts' weights in ``experts``, and how tokens get
    there in ``dispatch``; ``shared_experts`` S is a feed-forward layer for all tokens. Shazeer et
    al., arXiv:1701.06538; Fedus et al., arXiv:2101.03961.

    Takes the place of a ``FeedForward`` and keeps what was set there, one expert being as that
    layer was::

        cfg.replace(FeedForward.Config, MoE.Config(num_experts=8, top_k=2))

    Padding (``info.segment_ids`` 0, or a negative position) goes to no expert, takes no one's place
    and weighs nothing in losses and summaries. In training ``losses`` go to the learner. Summaries:
    ``load`` (experts,), the share of the assignments that each expert got; ``max_load`` and
    ``min_load``, the largest and the smallest times the number of experts (1 when balanced);
    ``dropped_fraction`` of assignments; and ``router_entropy`` in nats.
    """

    class Config(BaseFeedForward.Config):
        """The parent sets ``input_dim``."""

        num_experts: Required[int] = REQUIRED
        # Experts of each token.
        top_k: int = 2
        # One expert is a FeedForward with these; the names are the same so that they carry over.
        hidden_dim: Dim = scaled(4, of="input_dim")
        activation: str = "gelu_tanh"
        up: Linear.Config = Linear.Config()
        gate: Linear.Config | None = None
        down: Linear.Config = Linear.Config()

        router: BaseRouter.Config = TopKRouter.Config()
        experts: BaseExperts.Config = Experts.Config()
        dispatch: BaseDispatch.Config = GroupedDispatch.Config()
        # A layer that every token goes through, and a map to one logit, whose sigmoid weighs it.
        shared_experts: BaseFeedForward.Config | None = None
        shared_gate: Linear.Config | None = None
        # Room of an expert in a row of the batch, as a multiple of its equal share; what exceeds it
        # is dropped, and the layer adds nothing there. None: nothing is dropped.
        capacity_factor: float | None = None
        # The same outside of training; None: as in training.
        eval_capacity_factor: float | None = None
        losses: tuple[RouterLoss, ...] = (LoadBalanceLoss(), RouterZLoss())

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        check_config(cfg, self.config_path or self.path)
        self.router = self._add_child(
            "router",
            cfg.router,
            BaseRouter,
            input_dim=cfg.input_dim,
            num_experts=cfg.num_experts,
            top_k=cfg.top_k,
            capacity_factor=cfg.capacity_factor,
        )
        self.experts = self._add_child(
            "experts",
            cfg.experts,
            BaseExperts,
            **{
                name: getattr(cfg, name)
                for name in ("num_experts", "input_dim", "hidden_dim", "activation")
            },
            up=cfg.up,
            gate=cfg.gate,
            down=cfg.down,
        )
        self.dispatch = self._add_child("dispatch", cfg.dispatch, BaseDispatch)
        self.dispatch.check(self.experts)
        self.shared_experts: BaseFeedForward | None = None
        if cfg.shared_experts is not None:
            self.shared_experts = self._add_child(
                "shared_experts", cfg.shared_experts, BaseFeedForward, input_dim=cfg.input_dim
            )
        self.shared_gate: Linear | None = None
        if cfg.shared_gate is not None:
            self.shared_gate = self._add_child(
                "shared_gate",
                cfg.shared_gate,
                Linear,
                input_dim=cfg.input_dim,
                output_dim=1,
                axes=("embed", None),
            )

    @property
    def experts_per_token(self) -> int:
        """Experts that one token goes to; what costs are counted by."""
        return self.cfg.top_k

    def forward(self, x: jax.Array, info: SequenceInfo) -> jax.Array:
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        cfg, ctx = self.cfg, self._context
        asked = self.router(x, real_tokens(info), info)
        factor = cfg.capacity_factor
        if not ctx.is_training and cfg.eval_capacity_factor is not None:
            factor = cfg.eval_capacity_factor
        capacity, routing = None, asked
        if asked.tokens is not None:  # experts that choose are within their capacity
            capacity = asked.tokens.shape[-1]
        elif factor is not None:
            capacity = expert_capacity(x.shape[1], cfg.top_k, cfg.num_experts, factor)
            routing = drop_over_capacity(asked, capacity)
        y, lost = self.dispatch(x, routing, self.experts, capacity)
        if self.shared_experts is not None:
            shared = self.shared_experts(x, info)
            if self.shared_gate is not None:
                shared = shared * jax.nn.sigmoid(self.shared_gate(x))
            y = y + shared
        if ctx.is_training:
            for loss in cfg.losses:
                value, num_items = loss(asked)
                ctx.add_loss(loss.name, value, weight=loss.weight, num_items=num_items)
        self._summarize(asked, routing, lost)
        return y

    def _summarize(self, asked: Routing, routing: Routing, lost: jax.Array) -> None:
        """Adds the summaries; ``asked`` is the routing before anything was dropped."""
        asked, routing, lost = jax.lax.stop_gradient((asked, routing, lost))
        ctx = self._context
        num_real = asked.num_real()
        loads = asked.loads()
        num_asked = jnp.sum(loads)
        share = loads / jnp.maximum(num_asked, 1.0)
        ctx.add_summary("load", share, weight=num_asked)
        ctx.add_summary("max_load", jnp.max(share) * asked.num_experts, weight=num_asked)
        ctx.add_summary("min_load", jnp.min(share) * asked.num_experts, weight=num_asked)
        kept = jnp.sum(routing.valid, dtype=jnp.float32) - lost
        dropped = 1.0 - kept / jnp.maximum(num_asked, 1.0)
        ctx.add_summary("dropped_fraction", dropped, weight=num_asked)
        entropy = -jnp.sum(asked.probs * jnp.log(jnp.maximum(asked.probs, 1e-30)), axis=-1)
        total = jnp.sum(jnp.where(asked.real, entropy, 0.0))
        ctx.add_summary("router_entropy", total / jnp.maximum(num_real, 1.0), weight=num_real)


def check_config(cfg: MoE.Config, where: str) -> None:
    """Raises ModuleError at ``where`` if the numbers of a mixture cannot be."""
    if cfg.num_experts < 1 or not 1 <= cfg.top_k <= cfg.num_experts:
        near = min(max(cfg.top_k, 1), max(cfg.num_experts, 1))
        raise ModuleError(
            f"top_k={cfg.top_k} of num_experts={cfg.num_experts}: a token goes to at least one "
            "expert and at most to all",
            code="AX910",
            where=f"{where}.top_k",
            hint=f"nearest: top_k={near}"
            + (f", or num_experts={cfg.top_k}" if cfg.top_k > cfg.num_experts else ""),
        )
    for name in ("capacity_factor", "eval_capacity_factor"):
        factor = getattr(cfg, name)
        if factor is not None and not 0 < factor < math.inf:
            raise ModuleError(
                f"{name}={factor}, expected a finite number above 0: how many equal shares an "
                "expert has room for",
                code="AX912",
                where=f"{where}.{name}",
                hint="1.0 is an equal share, 1.25 is common, None drops nothing",
            )
    names = [loss.name for loss in cfg.losses]
    if len(set(names)) != len(names):
        raise ModuleError(
            f"losses {names}: one is there twice",
            code="AX918",
            where=f"{where}.losses",
            hint="keep one of each kind, with the sum of their weights",
        )
    if cfg.shared_gate is not None and cfg.shared_experts is None:
        raise ModuleError(
            "shared_gate is set and there are no shared_experts",
            code="AX914",
            where=f"{where}.shared_gate",
            hint="set shared_experts, such as FeedForward.Config(hidden_dim=...), or "
            "shared_gate=None",
        )
