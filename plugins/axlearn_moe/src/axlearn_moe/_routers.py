"""Routers: which experts a token goes to, and with what weight. All of them work in float32."""

from __future__ import annotations

import abc
import math
from typing import Literal

import jax
import jax.numpy as jnp

from axcore.config import REQUIRED, Required
from axcore.errors import ModuleError
from axcore.layers import SequenceInfo, VarianceScaling
from axcore.layers.base import Layer
from axcore.layers.initializers import Zeros
from axcore.module import Initializer, ParameterSpec
from axcore.remat import declare_site, site
from axlearn_moe._routing import Routing, best, chosen

__all__ = ["BaseRouter", "ScoreRouter", "TopKRouter"]

ROUTER_LOGITS = declare_site("router_logits", "a router's output, float32 (batch, seq, experts)")
_TINY = 1e-20  # what sigmoid scores are kept from dividing by


class BaseRouter(Layer):
    """Role of the router: assigns tokens to experts."""

    class Config(Layer.Config):
        """The mixture sets all of these."""

        input_dim: Required[int] = REQUIRED
        num_experts: Required[int] = REQUIRED
        top_k: Required[int] = REQUIRED
        # Room of an expert in a row, as a multiple of its equal share; None: no limit.
        capacity_factor: float | None = None

    @abc.abstractmethod
    def forward(self, x: jax.Array, real: jax.Array, info: SequenceInfo) -> Routing:
        """Assigns the tokens of (batch, seq, input_dim).

        Args:
            x: The layer's input.
            real: bool (batch, seq), False for padding, which goes nowhere.
            info: Of the sequence.
        """


class ScoreRouter(BaseRouter):
    """Base of routers with a learned score for each expert.

    Parameters: ``weight`` (input_dim, experts), and ``bias`` (experts,) where asked for.
    """

    class Config(BaseRouter.Config):
        """Fields of the learned scores."""

        bias: bool = False
        weight_init: Initializer = VarianceScaling()
        # In training the input is multiplied by noise in 1 +- jitter (Switch Transformer,
        # arXiv:2101.03961, section 2.4, which uses 0.01).
        jitter: float = 0.0

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        if not 0 <= cfg.jitter < 1:
            raise ModuleError(
                f"jitter is {cfg.jitter}, expected 0 <= jitter < 1",
                code="AX918",
                where=f"{self.config_path}.jitter",
                hint="0.01 is common, 0 adds no noise",
            )
        self._add_weight(
            "weight",
            (cfg.input_dim, cfg.num_experts),
            ("embed", "experts"),
            cfg.weight_init,
            fan_in_dims=(0,),
            fan_out_dims=(1,),
        )
        if cfg.bias:
            self._add_weight("bias", (cfg.num_experts,), ("experts",), Zeros(), weight_decay=False)

    def _logits(self, x: jax.Array) -> jax.Array:
        """float32 (batch, seq, experts) of (batch, seq, input_dim)."""
        x = x.astype(jnp.float32)
        if self.cfg.jitter and self._context.is_training:
            low, high = 1 - self.cfg.jitter, 1 + self.cfg.jitter
            x = x * jax.random.uniform(self._context.key(), x.shape, minval=low, maxval=high)
        weight = self._param("weight", "float32")
        # Some platforms multiply float32 in fewer bits by default.
        logits = jnp.matmul(x, weight, precision=jax.lax.Precision.HIGHEST)
        if self.cfg.bias:
            logits = logits + self._param("bias", "float32")
        return site(self._constrain(logits, "batch", "seq", None), ROUTER_LOGITS)


class TopKRouter(ScoreRouter):
    r"""The ``top_k`` experts of highest score, weighted by their scores.

    Scores are the softmax of the logits over all experts (Mixtral, Qwen, OLMoE, GPT-OSS,
    DeepSeek-V2), or their sigmoid (DeepSeek-V3). With ``top_k=1`` this is the Switch Transformer.

    With ``num_groups`` experts lie in that many groups of equal size, on one node each perhaps, and
    a token chooses among the experts of its ``num_chosen_groups`` best groups (DeepSeek-V2,
    arXiv:2405.04434, section 2.1.3).

    With ``choice_bias`` the state ``choice_bias`` (experts,) is added to the scores for the choice,
    not in the weights. In training it moves towards equal loads, by
    :math:`\gamma\,\mathrm{sign}(\bar{c} - c_e)` a step, with :math:`c_e` the tokens that went to
    expert e: balance without a loss (Wang et al., arXiv:2408.15664). It is never trained. With
    gradient accumulation it moves by the mean of the microbatches' moves.
    """

    class Config(ScoreRouter.Config):
        """The defaults are Mixtral's, and with one expert a token the Switch Transformer's."""

        score: Literal["softmax", "sigmoid"] = "softmax"
        # Whether the weights of a token are made to sum to 1; None: if it has several experts.
        # (One expert's would be 1 whatever the router says, and it would not learn.)
        normalize: bool | None = None
        # What the weights are multiplied by in the end.
        scale: float = 1.0
        num_groups: int = 1
        num_chosen_groups: int = 1
        # A group's score: of its best expert (DeepSeek-V2), or the sum of its best two (V3).
        group_score: Literal["max", "top2_sum"] = "max"
        choice_bias: bool = False
        # Step of that bias; 0 keeps it as it is.
        choice_bias_rate: float = 0.001

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        check_groups(cfg, cfg.num_experts, cfg.top_k, self.config_path)
        check_amounts(cfg, self.config_path)
        if cfg.choice_bias:
            shape = (cfg.num_experts,)
            spec = ParameterSpec(shape, "float32", (None,), Zeros(), kind="state")
            self._add_parameter("choice_bias", spec)

    def forward(self, x: jax.Array, real: jax.Array, info: SequenceInfo) -> Routing:
        """Assigns each token of (batch, seq, input_dim) to its ``top_k`` best experts."""
        del info
        cfg = self.cfg
        logits = self._logits(x)
        if cfg.score == "softmax":
            scores = probs = jax.nn.softmax(logits)
        else:
            scores = jax.nn.sigmoid(logits)
            probs = scores / (jnp.sum(scores, -1, keepdims=True) + _TINY)
        choice = jax.lax.stop_gradient(scores)
        if cfg.choice_bias:
            choice = choice + jax.lax.stop_gradient(self._param("choice_bias", "float32"))
        if cfg.num_groups > 1:
            choice = self._within_groups(choice)
        experts = best(choice, cfg.top_k)
        gates = chosen(scores, experts)
        if cfg.top_k > 1 if cfg.normalize is None else cfg.normalize:
            gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + _TINY)
        gates = jnp.where(real[..., None], gates * cfg.scale, 0.0)
        valid = jnp.broadcast_to(real[..., None], experts.shape)
        routing = Routing(experts, gates, valid, logits, probs, real)
        if cfg.choice_bias and cfg.choice_bias_rate and self._context.is_training:
            loads = routing.loads()
            move = cfg.choice_bias_rate * jnp.sign(jnp.mean(loads) - loads)
            bias = self._param("choice_bias", "float32") + move
            self._context.set_state("choice_bias", bias, reduction="mean")
        return routing

    def _within_groups(self, choice: jax.Array) -> jax.Array:
        """Returns the scores with minus infinity outside of each token's best groups."""
        cfg = self.cfg
        by_group = choice.reshape(*choice.shape[:-1], cfg.num_groups, -1)
        num_best = 1 if cfg.group_score == "max" else min(2, by_group.shape[-1])
        of_group = jnp.sum(chosen(by_group, best(by_group, num_best)), axis=-1)
        groups = best(of_group, cfg.num_chosen_groups)
        is_open = jnp.any(groups[..., None] == jnp.arange(cfg.num_groups), axis=-2)
        return jnp.where(is_open[..., None], by_group, -jnp.inf).reshape(choice.shape)


def check_amounts(cfg: TopKRouter.Config, where: str) -> None:
    """Raises ModuleError if a number of the router's is none that weights or biases can take."""
    expected = {
        "scale": (0 < cfg.scale < math.inf, "above 0", "1.0 leaves a token's weights as they are"),
        "choice_bias_rate": (
            0 <= cfg.choice_bias_rate < math.inf,
            "of at least 0",
            "0.001 is common, 0 keeps the bias as it is",
        ),
    }
    for name, (fits, what, hint) in expected.items():
        if not fits:
            raise ModuleError(
                f"{name} is {getattr(cfg, name)}, expected a finite number {what}",
                code="AX918",
                where=f"{where}.{name}",
                hint=hint,
            )


def check_groups(cfg: TopKRouter.Config, experts: int, top_k: int, where: str) -> None:
    """Raises ModuleError if ``top_k`` of ``experts`` cannot be chosen from the router's groups."""
    groups = cfg.num_groups
    if groups < 1 or experts % groups:
        divisors = [d for d in range(1, experts + 1) if experts % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(d - groups))[:2])
        raise ModuleError(
            f"{experts} experts do not divide into num_groups={groups}",
            code="AX913",
            where=f"{where}.num_groups",
            hint=f"nearest that do: {' or '.join(map(str, near))} groups",
        )
    fewest = -(-top_k * groups // experts)
    if not fewest <= cfg.num_chosen_groups <= groups:
        raise ModuleError(
            f"num_chosen_groups is {cfg.num_chosen_groups}: the {top_k} experts of a token are "
            f"chosen from {groups} groups of {experts // groups}",
            code="AX913",
            where=f"{where}.num_chosen_groups",
            hint=f"expected {fewest} to {groups}",
        )
