"""MoE: several experts in place of every feed-forward layer."""
# The layer below stands in for this package's own until there is one.
# pyright: basic, reportMissingImports=false
# ruff: noqa: E402, F811

# %% feature
import jax
import jax.numpy as jnp

from axcore import REQUIRED, Required
from axcore.layers import BaseFeedForward, VarianceScaling


class SparseFeedForward(BaseFeedForward):
    """Sends each token to its two best experts, weighted by the router's softmax over them."""

    class Config(BaseFeedForward.Config):
        """``expert`` is made ``num_experts`` times."""

        expert: Required[BaseFeedForward.Config] = REQUIRED
        num_experts: int = 4

    def __init__(self, cfg: Config, *, parent=None):
        super().__init__(cfg, parent=parent)
        self._add_weight(
            "router", (cfg.input_dim, cfg.num_experts), ("embed", "experts"), VarianceScaling(),
            fan_in_dims=(0,), fan_out_dims=(1,),
        )  # fmt: skip
        self._experts = [
            self._add_child(f"expert_{i}", cfg.expert, BaseFeedForward, input_dim=cfg.input_dim)
            for i in range(cfg.num_experts)
        ]

    def forward(self, x, info):
        """(batch, seq, input_dim) -> (batch, seq, input_dim)."""
        scores = x.astype("float32") @ self._param("router", "float32")
        best, which = jax.lax.top_k(scores, 2)
        share = jax.nn.softmax(best)
        chosen = jax.nn.one_hot(which, self.cfg.num_experts)
        weights = jnp.einsum("bsk,bske->bse", share, chosen).astype(x.dtype)
        results = jnp.stack([expert(x, info) for expert in self._experts], axis=-1)
        return jnp.einsum("bsde,bse->bsd", results, weights)


# %% integration
from axcore.layers import FeedForward

from .feature import SparseFeedForward


def integrate(cfg):
    """Makes every feed-forward layer an expert of four."""
    for path, expert in cfg.find(FeedForward.Config).items():
        cfg.set_path(path, SparseFeedForward.Config(expert=expert, num_experts=4))


# %% check
from axcore.layers import BaseTransformerLayer, FeedForward

from .feature import SparseFeedForward


def is_present(cfg, model):
    """Whether every layer of the stack has experts, all of the kind that was there."""
    layers = [m for _, m in model.walk() if isinstance(m, BaseTransformerLayer)]
    routed = [m for _, m in model.walk() if isinstance(m, SparseFeedForward)]
    experts = [m for _, m in model.walk() if isinstance(m, FeedForward)]
    return layers and len(routed) == len(layers) and len(experts) == 4 * len(layers)


def check(probe):
    """Equal experts make the router irrelevant; different ones do not."""
    probe.differ(probe.after_logits, probe.before_logits, "the result changes")
    params = dict(probe.after_params)

    def other_router(params):
        return probe.scaled(params, -1.0, lambda path: path.endswith("router"))

    other = probe.logits(probe.after_model, other_router(params))
    probe.differ(other, probe.after_logits, "the router chooses between experts")

    def equal(tree):
        if "expert_0" in tree:
            same = {name: tree["expert_0"] for name in tree if name.startswith("expert_")}
            return {**tree, **same}
        return {n: equal(t) if isinstance(t, dict) else t for n, t in tree.items()}

    alike = equal(params)
    probe.same(
        probe.logits(probe.after_model, other_router(alike)),
        probe.logits(probe.after_model, alike),
        "equal experts give the same result whatever the router says",
    )


# %% flat feed_forward
import jax
import jax.numpy as jnp


def flat(x, w_in, w_out, y, *, use_moe=False, num_experts=4, moe_scale=0.5):
    """The same, written into a feed-forward function; experts are scaled copies."""
    if use_moe:
        router = w_in[:, :num_experts]
        gates = jax.nn.softmax(x @ router)
        copies = jnp.stack([y * (1 + moe_scale * i) for i in range(num_experts)], -1)
        y = jnp.einsum("bsde,bse->bsd", copies, gates)
